"""The public verb ``resume``: go on with a run of any kind where its store stopped."""

from os import fspath
from typing import Any

import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.executors import Executor
from daskfactor.inference.sampling import resume as resume_chains
from daskfactor.inference.setup import PathText
from daskfactor.progress import OnEvent
from daskfactor.stein.posterior import is_particle_store, resume_particles


def resume(
    store: PathText,
    draws: int | None = None,
    *,
    V: Any = None,
    progressbar: bool = True,
    client: Any = None,
    executor: str | Executor = "auto",
    memory_limit: int | str | None = None,
    callback: OnEvent | None = None,
) -> xr.DataTree:
    """Go on with a run where its store stopped: the same draws as an unbroken run.

    Parameters
    ----------
    store
        The directory that ``sample(store=...)`` or ``stein_posterior(store=...)`` wrote.
    draws
        Draws to add to those the store holds; None finishes what was planned, and
        what was planned is finished in any case. Of particles, whose weights are those of
        a whole set, only those that were planned can be had.
    V
        The data again, needed if they were neither in memory nor read from a
        path when the run began.
    progressbar, client, executor, memory_limit, callback
        As for :func:`sample`.

    Raises
    ------
    StoreError, StoreFormatError
        If there is no run there, or it is damaged or of a newer version.
    DataError
        If ``V`` is needed, or is not the data that the run began with.
    OptionError
        If ``draws`` are asked for of a set of particles.
    """
    options: dict[str, Any] = {
        "V": V,
        "progressbar": progressbar,
        "client": client,
        "executor": executor,
        "memory_limit": memory_limit,
        "callback": callback,
    }
    if not is_particle_store(store):
        return resume_chains(store, draws, **options)
    if draws is not None:
        raise OptionError(
            f"the run at {fspath(store)} is a set of particles that are weighted together, got "
            f"draws={draws}; leave draws out to finish it, or make a larger set anew"
        )
    return resume_particles(store, **options)
