"""Whole runs at URLs: the draws of a local run, killed or not, and the commands on them."""

import os
import signal

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import StoreError
from daskfactor.runs import files
from daskfactor.runs.repository import RepositoryBackend
from tests.cli.shell import fails, succeed
from tests.results.writer import start

pytest.importorskip("icechunk", reason="runs at URLs need the extra cloud")

V = np.random.default_rng(0).poisson(3.0, (12, 9)).astype(np.float32)
SETTINGS = {"draws": 60, "tune": 40, "random_seed": 3, "progressbar": False}


def begin(store=None, **options):
    """A short run of several segments."""
    given = V, dfac.TweedieNMF(2), dfac.PSGLD(warm_start=5)
    return in_segments(dfac.sample, *given, store=store, **SETTINGS | options)


def go_on(store, **options):
    return in_segments(dfac.resume, store, progressbar=False, **options)


def in_segments(verb, *given, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskfactor.inference.setting.LONGEST_SEGMENT", 10)
        return verb(*given, **options)


def bits(tree):
    pairs = [(group, name) for group, node in tree.children.items() for name in node.data_vars]
    kept = (pair for pair in pairs if pair[0] != "observed_data")
    return {f"{group}/{name}": tree[group][name].values.tobytes() for group, name in kept}


def begin_and_die(url, pipe):
    """Commit after each segment, and be killed in the middle of the draws."""
    RepositoryBackend.checkpoint_interval, files.MAX_COST_SHARE = 1e-9, 1e9

    def die(event):
        if event.phase == "draw" and event.done > 35:
            os.kill(os.getpid(), signal.SIGKILL)

    begin(url, callback=die, executor="serial")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return bits(begin(tmp_path_factory.mktemp("local") / "run.zarr"))


def test_a_client_that_was_killed_is_resumed_to_the_same_bits(s3, tmp_path, whole):
    url = s3.url(tmp_path.name)
    process, _ = start(begin_and_die, url)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert 0 < dfac.open_run(url)["posterior"].sizes["draw"] < 60
    assert bits(go_on(url)) == whole
    assert bits(go_on(url, draws=10))["posterior/W"] == bits(begin(draws=70))["posterior/W"]


def test_commands_take_urls(s3, tmp_path):
    np.save(tmp_path / "V.npy", V)
    url = s3.url(tmp_path.name)
    fit = ["fit", tmp_path / "V.npy", "--store", url, "-k", "2", "--draws", "20", "-q"]
    succeed(*fit, "--tune", "20", "--sampler", "psgld")
    assert url in succeed("info", url)
    succeed("resume", url, "--draws", "5", "-q")
    assert dfac.open_run(url)["posterior"].sizes["draw"] == 25
    succeed("plot", url, "-o", tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 5000
    fails(4, "exists and holds a run (draws per chain: 25 of 25)", *fit)


@pytest.mark.full
def test_a_run_waits_for_a_server_and_stops_without_credentials(s3, tmp_path, whole, monkeypatch):
    monkeypatch.setattr(RepositoryBackend, "checkpoint_interval", 1e-9)
    monkeypatch.setattr(files, "MAX_COST_SHARE", 1e9)
    url, away = s3.url(tmp_path.name), []

    def trouble(event):
        if event.phase == "draw" and event.done >= 20 and not away:
            away.append(s3.away(1.0))
        if event.phase == "draw" and event.done >= 40:
            s3.fault = lambda environ: (400, "ExpiredToken")

    try:
        with pytest.raises(StoreError, match=r"have expired; renew them and resume the run; the"):
            begin(url, callback=trouble, executor="serial")
    finally:
        s3.fault = None
    away[0].join()
    kept = dfac.open_run(url)["posterior"].sizes["draw"]
    assert 20 <= kept < 60
    assert bits(go_on(url)) == whole
