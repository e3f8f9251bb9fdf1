"""The public verb ``stein_posterior``: a few weighted factorizations in place of many draws."""

from dataclasses import asdict
from typing import Any, Unpack

import xarray as xr

from daskfactor.checks import truth, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataError, OptionError
from daskfactor.executors import Executor
from daskfactor.inference.sampling import PathText
from daskfactor.inference.session import Options, as_begun, session, session_again, verb
from daskfactor.models.registry import model_from_dict
from daskfactor.progress import OnEvent
from daskfactor.results.store import RunStore
from daskfactor.stein.job import (
    Job,
    Method,
    Settings,
    check_count,
    checked_method,
    method_from_dict,
)
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.measure import check_model, checked_kernel, law_of_data
from daskfactor.stein.run import check_room, new_sink, run


@verb
def stein_posterior(
    V: Any,
    model: Any,
    method: Method | None = None,
    particles: int = 50,
    *,
    pilot: int = 10,
    kernel: IMQ | None = None,
    tangent: bool = False,
    align: bool = True,
    random_seed: int | None = None,
    store: PathText | None = None,
    overwrite: bool = False,
    progressbar: bool = True,
    client: Any = None,
    blocks: int | None = None,
    unstored: str | None = None,
    executor: str | Executor = "auto",
    callback: OnEvent | None = None,
) -> xr.DataTree:
    r"""A posterior made of a few factorizations with probability masses.

    .. math:: p(W, H | V) \approx \sum_m w_m \delta_{(W_m, H_m)}, \quad
        w = \arg\min_{w \ge 0,\, 1^\top w = 1} w^\top K w

    The factorizations are ends of optimisations from diverse starts; K is their Stein
    matrix, see :func:`stein_discrepancy`.

    Parameters
    ----------
    V : array (I, J)
        The data, as for :func:`sample`, some of them positive.
    model
        The posterior: a :class:`SILFNMF`, under which all factorizations that are good
        enough are equally likely, or a :class:`TweedieNMF`.
    method
        How particles are made; left out, ``Ensemble()``: optimisation from Q-Transform
        starts. :class:`SimplexHMC`, :class:`SVGD` and :class:`SteinDescent` are there to be
        compared with.
    particles
        How many, M.
    pilot
        Runs from random starts whose worst objective sets the threshold of a `SILFNMF`
        that leaves it ``"auto"``; the paper takes 50.
    kernel, tangent
        As for :func:`stein_discrepancy`.
    align
        Give the components of every particle the order of the first one's before weighing,
        by the angles between columns of W. The posterior does not change with the order, but
        the kernel, a matter of distances, takes one factorization in two orders for two
        modes. False leaves them as they were found.
    random_seed
        The same seed, from 0 to 2⁶⁴ - 1, gives the same particles on every executor.
    store
        Directory to write particles to as they are finished, from the end of the pilot runs
        on; :func:`resume` goes on with what was cut short, and :func:`open_run` reads it.
    overwrite, progressbar, client, blocks, unstored, executor, callback
        As for :func:`sample`.

    Returns
    -------
    DataTree
        What :func:`sample` returns, with a particle for a draw: ``posterior/W`` and
        ``posterior/H``; ``sample_stats/weight``, their masses, ``lp``, ``objective`` (of a
        `SILFNMF`), ``seconds`` and ``n_iter``; and ``stein`` with the Stein matrix and the
        discrepancy under these weights and under equal ones. :func:`predict`,
        :func:`align`, :func:`expectation` and the plots go by the weights. Under a
        `SILFNMF` columns of W add up to 1.

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model or options cannot be used, before anything is written.
    StoreError
        If the store exists already or cannot be written.

    Notes
    -----
    The weights make the best of the particles that there are, and cannot make up for modes
    that none of them has found: more particles, or other starts, can only bring the
    discrepancy down. It is one number for the whole; where its kernel is flat (distances
    far below its scales) or spent (far above), it tells good from bad but not near from
    far. The defaults of a `SILFNMF` and of its kernel are the paper's, and in the unit of
    the data: they suit objectives far above 1. For data between 0 and 1 the likelihood may
    hardly fall beyond the threshold, which is warned of.

    Masood and Doshi-Velez, algorithm 1 and equation 4.
    """
    check_model(model)
    check_free(model)
    method = checked_method(method)
    kernel = checked_kernel(model, tangent, kernel)
    settings: dict[str, Any] = {
        "particles": whole_number("particles", particles, 1),
        "pilot": whole_number("pilot", pilot, 1),
        "kernel": asdict(kernel),
        "tangent": truth("tangent", tangent),
        "align": truth("align", align),
    }
    check_count(method, settings["particles"])
    law = law_of_data(model)
    with session(
        V,
        law,
        blocks,
        unstored,
        random_seed=random_seed,
        progressbar=progressbar,
        client=client,
        executor=executor,
        callback=callback,
    ) as opened:
        data = opened.data
        check_positive(data)
        model.check_shape(data.shape)
        check_room(data, model, settings["particles"], store, overwrite)
        options = Settings(**settings, seed=opened.seed, dtype=str(data.dtype))
        job = Job.of(data, model, method, options, opened.executor, opened.on_event)
        return run(job, new_sink(job, store, overwrite))


def check_free(model: Any) -> None:
    """Refuse components that are constants: no optimiser here would leave them alone."""
    if model.fixed != (None, None):
        raise OptionError(
            "particles are made of components that are all free, and the model fixes some with "
            "fixed_w or fixed_h; use sample() for it"
        )


def check_positive(data: BlockedData) -> None:
    """Refuse data of which every factorization is zero."""
    if not data.maximum > 0:
        raise DataError(
            f"no entry is positive, they go up to {data.maximum:g}, so that non-negative factors "
            "can only be zero; check the data"
        )


def go_on(
    held: RunStore,
    described: dict[str, Any],
    V: Any,
    memory_limit: int | str | None,
    **options: Unpack[Options],
) -> None:
    """Make the particles that a store lacks, and weigh them; what `daskfactor.resume` calls."""
    _, meta = held.load_checkpoint()
    if "stein" in held.tree().children:
        known = held.attrs.get("sampling_time", 0.0)  # not there, if it was killed just then
        held.finish({"sampling_time": max(known, float(meta.get("seconds", 0.0)))})
        return
    with as_begun(held):
        settings = Settings(**described["options"])
        model = model_from_dict(described["model"])
        method = method_from_dict(described["sampler"])
    law = law_of_data(model)
    with session_again(held, V, law, memory_limit, **options) as opened:
        job = Job.of(opened.data, model, method, settings, opened.executor, opened.on_event)
        run(job, held, (int(meta["draws"]), float(meta.get("seconds", 0.0))))
