"""Clients of clusters that are named by a text: a scheduler's address, or workers of one's own."""

import asyncio
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import dask
from distributed import Client, LocalCluster, Security
from distributed.comm.core import connect as greeted_by
from distributed.versions import VersionMismatchWarning

from daskfactor.checks import warn
from daskfactor.errors import DaskfactorError, OptionError, SamplingWarning

ANSWERS_WITHIN: Final = 10
"""Seconds for a scheduler to answer."""
LOCAL: Final = re.compile(r"local(?::([1-9]\d*))?")
ADDRESS: Final = re.compile(r"((tcp|tls|ucx|wss?)://)?(?!local:)[^\s/]+:\d+")
ALIKE: Final = ("daskfactor", "python")
"""What workers need in the caller's version; other versions of the rest are noted."""
VERSIONS: Final = (*ALIKE, "numpy", "numba", "dask", "distributed")


@contextmanager
def client_of(scheduler: str | None, cluster: str | None) -> Iterator[Client]:
    """Yield a client of a scheduler, or of a cluster of this machine that lives as long.

    Parameters
    ----------
    scheduler
        Its address, such as ``"tcp://host:8786"``.
    cluster
        ``"local:4"``, four worker processes on this machine; ``"local"``, as many as Dask takes.
        Or the address of a scheduler.

    Raises
    ------
    OptionError
        If both are given, one is not of these forms, nobody answers, or workers have other
        versions.
    """
    if scheduler is not None and cluster is not None:
        raise OptionError(
            f"scheduler is {scheduler!r} and cluster is {cluster!r}: leave one of them out"
        )
    local = None if cluster is None else LOCAL.fullmatch(cluster)
    if local is None:
        with connect(scheduler or cluster or "") as client:
            yield client
        return
    workers = None if local[1] is None else int(local[1])
    with (
        LocalCluster(n_workers=workers, dashboard_address=":0") as own,  # type: ignore[no-untyped-call]
        Client(own) as client,  # type: ignore[no-untyped-call]
    ):
        yield client


def connect(address: str) -> Client:
    """Return a client of the scheduler at an address.

    Raises
    ------
    OptionError
        If it is no address, no scheduler answers there, or its workers have other versions.
    """
    if ADDRESS.fullmatch(address) is None:
        raise OptionError(
            "a scheduler has an address such as tcp://host:8786, and a cluster on this machine is "
            f"local:N, with N workers; got {address!r}"
        )
    before = dask.config.get("scheduler", None)
    try:
        asyncio.run(_greet(address))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VersionMismatchWarning)  # told in a sentence below
            client = Client(address, timeout=f"{ANSWERS_WITHIN}s")  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        # A client that never came to be stays dask's default scheduler otherwise.
        dask.config.set({"scheduler": before})
        why = f" ({error})" if str(error) else ""
        raise OptionError(
            f"no Dask scheduler answers at {address} within {ANSWERS_WITHIN} s{why}; pass the "
            "address that `dask scheduler` prints, such as tcp://host:8786; with TLS it is "
            "tls://host:8786, its certificates from Dask's configuration (distributed.comm.tls)"
        ) from error
    try:
        check_versions(client.get_versions(packages=["daskfactor", "numba"]))  # type: ignore[arg-type]
    except DaskfactorError:
        client.close()  # type: ignore[no-untyped-call]
        raise
    return client


async def _greet(address: str) -> None:
    """Exchange Dask's greeting; a client would wait without end for a peer that stays mute."""
    certificates = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
    greeted = greeted_by(address, timeout=ANSWERS_WITHIN, **certificates)  # type: ignore[no-untyped-call]
    (await asyncio.wait_for(greeted, ANSWERS_WITHIN)).abort()


def check_versions(told: Mapping[str, Any]) -> None:
    """Refuse workers that cannot do a client's work; note those that may do it otherwise.

    ``told`` is what `Client.get_versions` returns.
    """
    mine = _versions(told["client"])
    for worker, answer in told["workers"].items():
        theirs = _versions(answer)
        for name in VERSIONS:
            if mine[name] == theirs[name]:
                continue
            text = (
                f"{name} is {mine[name]} here and {theirs[name]} on the worker {worker}; install "
                "the same version everywhere"
            )
            if name in ALIKE:
                raise OptionError(text)
            warn(text, SamplingWarning)
            return  # one sentence is enough


def _versions(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return versions by name, of Python the major and minor one."""
    found = {name: answer["packages"].get(name) or "missing" for name in VERSIONS}
    return found | {"python": ".".join(found["python"].split(".")[:2])}
