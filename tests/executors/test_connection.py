"""Clients of clusters that are named by a text."""

import re
import socket

import dask
import pytest
from distributed import LocalCluster

from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors import connection
from daskfactor.executors.connection import check_versions, client_of, connect


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(connection, "ANSWERS_WITHIN", 0.5)


@pytest.mark.parametrize("text", ["nowhere://1", "local:0", "local:x", "host", "", "tcp://host"])
def test_texts_that_name_no_cluster(text):
    with pytest.raises(OptionError, match=f"such as tcp://host.* local:N.*{re.escape(text)}"):
        client_of(None, text).__enter__()


def test_one_cluster_at_a_time():
    with pytest.raises(OptionError, match="leave one of them out"):
        client_of("tcp://host:8786", "local:2").__enter__()


@pytest.mark.parametrize("mute", [True, False])
def test_an_address_where_nobody_answers(mute, impatient):
    with socket.socket() as taken:  # a peer that listens and says nothing, or nobody at all
        taken.bind(("127.0.0.1", 0))
        if mute:
            taken.listen()
        with pytest.raises(OptionError, match=r"no Dask scheduler answers at tcp://.* 0\.5 s"):
            connect(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert dask.config.get("scheduler", None) is None


def test_certificates_that_are_missing(impatient):
    with pytest.raises(OptionError, match=r"distributed\.comm\.tls"):
        connect("tls://127.0.0.1:1")


def answer(**versions):
    usual = {"daskfactor": "0.2.0", "python": "3.11.7.final.0", "numpy": "2.0.0", "numba": "0.60.0"}
    return {"packages": usual | {"dask": "1", "distributed": "1"} | versions}


def told(**versions):
    return {"client": answer(), "workers": {"tcp://a:1": answer(), "tcp://b:1": answer(**versions)}}


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"daskfactor": None}, "daskfactor is 0.2.0 here and missing on the worker tcp://b:1"),
        ({"daskfactor": "0.1.0"}, "daskfactor is 0.2.0 here and 0.1.0 on the worker"),
        ({"python": "3.12.1.final.0"}, "python is 3.11 here and 3.12 on the worker"),
    ],
)
def test_workers_that_cannot_do_the_work(versions, sentence):
    with pytest.raises(OptionError, match=sentence):
        check_versions(told(**versions))


def test_workers_that_may_do_it_otherwise():
    check_versions(told(python="3.11.9.final.0"))
    with pytest.warns(SamplingWarning, match="numpy is 2.0.0 here and 2.1.0 on the worker") as seen:
        check_versions(told(numpy="2.1.0", numba="0.61.0"))
    assert len(seen) == 1


@pytest.mark.cluster
def test_a_cluster_that_is_there():
    quiet = {"n_workers": 1, "processes": False, "dashboard_address": ":0", "protocol": "tcp"}
    with LocalCluster(1, **quiet) as own, client_of(own.scheduler_address, None) as client:
        assert client.submit(int, 3).result() == 3


@pytest.mark.cluster
def test_a_cluster_for_the_time_of_the_run():
    with client_of(None, "local:2") as client:
        assert len(client.nthreads()) == 2
        where = client.cluster.scheduler_address
    assert client.status == "closed"
    assert where
