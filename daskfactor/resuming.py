"""Resume a stored run of any kind: the verb ``resume``."""

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, Unpack, cast

import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.evidence.call_store import is_call_store
from daskfactor.inference import sampling
from daskfactor.inference.sampling import PathText
from daskfactor.inference.session import description_of
from daskfactor.options import OnDevice, Running, verb
from daskfactor.runs.opening import open_run
from daskfactor.runs.store import RunStore
from daskfactor.stein import posterior
from daskfactor.urls import locate


@verb
def resume(
    store: PathText,
    draws: int | None = None,
    *,
    V: Any = None,
    memory_limit: int | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[OnDevice],
) -> xr.DataTree:
    """Resume a run from its last checkpoint; the draws equal those of an uninterrupted run.

    Parameters
    ----------
    store
        The directory or URL that ``sample(store=...)`` or ``stein_posterior(store=...)`` wrote.
    draws
        Number of draws to add to those in the store; the planned draws are finished in any
        case. A set of particles is weighted as a whole, so none can be added to it.
    V
        Data of the run, needed if they were neither dense in memory nor read from a path when
        the run began. The same holds for uncertainties and weights, which come with data from
        :func:`as_blocks`: dense ones in memory and those on a path are found again.
    memory_limit
        As for :func:`as_blocks`.
    storage_options
        For data at a URL, as for :func:`as_blocks`: they are not kept with the run.
    options
        Execution, as for :func:`sample`. The ``device`` of the run is not reused: draws from
        another device have the same distribution but other bits, and a warning says so.

    Returns
    -------
    xarray.DataTree
        All draws, stored and new, in the form that :func:`sample` returns.

    Raises
    ------
    StoreError, StoreFormatError
        If the store holds no run, or one that is damaged or of a newer version.
    DataError
        If ``V`` is needed, or differs from the data that the run began with.
    OptionError
        If ``draws`` are passed for a set of particles.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> from tempfile import mkdtemp
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> store = mkdtemp() + "/run.zarr"
    >>> run = {"tune": 10, "random_seed": 0, "progressbar": False}
    >>> short = dfac.sample(V, dfac.TweedieNMF(2), draws=10, store=store, **run)
    >>> dfac.resume(store, draws=20, progressbar=False)["posterior"].sizes["draw"]
    30
    """
    path = _path(store)
    if is_call_store(path):
        raise OptionError(
            f"{path} is no run, but the store of log_evidence or select_rank; make the same call "
            "again with this store to go on"
        )
    with RunStore.open(path) as run_store:
        described = description_of(run_store)
        if storage_options is not None:
            V = locate(described["source"]["location"] if V is None else V, storage_options)
        if "particles" not in run_store.attrs:
            sampling.resume_run(run_store, described, draws, V, memory_limit, **options)
        elif options.get("device") is not None:
            device = options["device"]
            raise OptionError(
                f"particles do not run on a GPU, got device={device!r}; leave device out"
            )
        elif draws is None:
            running = {name: value for name, value in options.items() if name != "device"}
            posterior.resume_run(run_store, described, V, memory_limit, **cast("Running", running))
        else:
            raise OptionError(
                f"the run at {path} is a set of particles, which are weighted together, got "
                f"draws={draws}; leave draws out to finish it, or start a larger set"
            )
    return open_run(path)


def _path(store: object) -> str:
    """Return the path of a store as text."""
    if isinstance(store, str | PathLike):
        return str(fspath(store))
    raise OptionError(
        f"store must be the path of a store that sample(store=...) wrote, got a "
        f"{type(store).__name__}; a run in memory cannot be resumed: pass store= when it starts"
    )
