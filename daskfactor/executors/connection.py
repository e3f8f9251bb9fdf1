"""Clients of clusters given by the address of a scheduler or as a local cluster."""

import asyncio
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import dask
from distributed import Client, LocalCluster, Security
from distributed.comm.core import connect as comm_connect
from distributed.versions import VersionMismatchWarning

from daskfactor.checks import warn
from daskfactor.errors import DaskfactorError, OptionError, SamplingWarning

ANSWERS_WITHIN: Final = 10
"""Seconds that a scheduler may take to answer."""
LOCAL: Final = re.compile(r"local(?::([1-9]\d*))?")
ADDRESS: Final = re.compile(r"((tcp|tls|ucx|wss?)://)?(?!local:)[^\s/]+:\d+")
REQUIRED_EQUAL: Final = ("daskfactor", "python")
"""Packages whose versions must be equal on client and workers; others only cause a warning."""
VERSIONS: Final = (*REQUIRED_EQUAL, "numpy", "numba", "dask", "distributed")


@contextmanager
def client_of(scheduler: str | None, cluster: str | None) -> Iterator[Client]:
    """Yield a client of a scheduler, or of a local cluster that is closed with it.

    Parameters
    ----------
    scheduler
        Address of a scheduler, such as ``"tcp://host:8786"``.
    cluster
        ``"local:4"`` for four worker processes on this machine, ``"local"`` for Dask's default
        number, or the address of a scheduler.

    Raises
    ------
    OptionError
        If both are passed, one has another form, no scheduler answers, or workers have other
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
        LocalCluster(n_workers=workers, dashboard_address=":0") as local_cluster,  # type: ignore[no-untyped-call]
        Client(local_cluster) as client,  # type: ignore[no-untyped-call]
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
        asyncio.run(_handshake(address))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VersionMismatchWarning)  # see check_versions
            client = Client(address, timeout=f"{ANSWERS_WITHIN}s")  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        # A client that failed to connect would remain dask's default scheduler.
        dask.config.set({"scheduler": before})
        reason = f" ({error})" if str(error) else ""
        raise OptionError(
            f"no Dask scheduler answers at {address} within {ANSWERS_WITHIN} s{reason}; pass the "
            "address that `dask scheduler` prints, such as tcp://host:8786; with TLS it is "
            "tls://host:8786, its certificates from Dask's configuration (distributed.comm.tls)"
        ) from error
    try:
        check_versions(client.get_versions(packages=["daskfactor", "numba"]))  # type: ignore[arg-type]
    except DaskfactorError:
        client.close()  # type: ignore[no-untyped-call]
        raise
    return client


async def _handshake(address: str) -> None:
    """Run Dask's handshake with a timeout; a client would wait forever for a silent peer."""
    certificates = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
    handshake = comm_connect(address, timeout=ANSWERS_WITHIN, **certificates)  # type: ignore[no-untyped-call]
    (await asyncio.wait_for(handshake, ANSWERS_WITHIN)).abort()


def check_versions(versions: Mapping[str, Any]) -> None:
    """Raise for workers with incompatible versions; warn of other differences.

    ``versions`` is the result of `Client.get_versions`.
    """
    mine = _versions(versions["client"])
    for worker, answer in versions["workers"].items():
        theirs = _versions(answer)
        for name in VERSIONS:
            if mine[name] == theirs[name]:
                continue
            text = (
                f"{name} is {mine[name]} here and {theirs[name]} on the worker {worker}; install "
                "the same version everywhere"
            )
            if name in REQUIRED_EQUAL:
                raise OptionError(text)
            warn(text, SamplingWarning)
            return  # one warning is enough


def _versions(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return versions by package name; of Python only major and minor."""
    versions = {name: answer["packages"].get(name) or "missing" for name in VERSIONS}
    return versions | {"python": ".".join(versions["python"].split(".")[:2])}
