"""Go on with a run of any kind where its store stopped: the verb ``resume``."""

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, Unpack, cast

import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.inference import sampling
from daskfactor.inference.sampling import PathText
from daskfactor.inference.session import description_of
from daskfactor.options import OnDevice, Running, verb
from daskfactor.results.opening import open_run
from daskfactor.results.store import RunStore
from daskfactor.stein import posterior
from daskfactor.urls import as_url


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
    """Go on with a run where its store stopped: the same draws as an unbroken run.

    Parameters
    ----------
    store
        The directory or URL that ``sample(store=...)`` or ``stein_posterior(store=...)`` wrote.
    draws
        Draws to add to those the store holds; left out, what was planned is finished, as it is in
        any case. Of particles, whose weights are those of
        a whole set, only those that were planned can be had.
    V
        The data again, needed if they were neither dense in memory nor read from a
        path when the run began. So are their uncertainties or weights, which come with
        data from :func:`as_blocks`: dense ones in memory and those on a path are found again.
    memory_limit
        As for :func:`as_blocks`.
    storage_options
        For data at a URL, as for :func:`as_blocks`: they are not kept with the run.
    options
        Where it runs, as for :func:`sample`. A ``device`` is not taken over from the run: draws
        that come from another one have the same law and other bits, and a warning says so.

    Returns
    -------
    xarray.DataTree
        All draws, those that the store held and the new ones; as :func:`sample` gives them.

    Raises
    ------
    StoreError, StoreFormatError
        If there is no run there, or it is damaged or of a newer version.
    DataError
        If ``V`` is needed, or is not the data that the run began with.
    OptionError
        If ``draws`` are asked for of a set of particles.

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
    with RunStore.open(path) as held:
        described = description_of(held)
        if storage_options is not None:
            V = as_url(described["source"]["location"] if V is None else V, storage_options)
        if "particles" not in held.attrs:
            sampling.resume_run(held, described, draws, V, memory_limit, **options)
        elif options.get("device") is not None:
            raise OptionError("particles do not run on a GPU; leave device out")
        elif draws is None:
            running = cast("Running", {k: own for k, own in options.items() if k != "device"})
            posterior.resume_run(held, described, V, memory_limit, **running)
        else:
            raise OptionError(
                f"the run at {path} is a set of particles that are weighted together, got "
                f"draws={draws}; leave draws out to finish it, or make a larger set anew"
            )
    return open_run(path)


def _path(store: object) -> str:
    """Give the path of a store, or one of the objects that stand for one."""
    if isinstance(store, str | PathLike):
        return str(fspath(store))
    raise OptionError(
        f"resume takes the path of the store that sample(store=...) wrote, got a "
        f"{type(store).__name__}; a result that was kept in memory cannot go on: pass store= when "
        "the run begins"
    )
