"""Making particles and weighing them, into memory or a store, from the start or where one was."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from os import fspath
from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.inference.sampling import PathText
from daskfactor.inference.track import in_callers_order
from daskfactor.machine import memory_budget
from daskfactor.progress import RunEvent
from daskfactor.results.matching import Law, Reference, match, reference_from
from daskfactor.results.sink import MemorySink, Sink
from daskfactor.results.store import RunStore, claim, local_path
from daskfactor.stein.ensemble import Particle
from daskfactor.stein.job import Job
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.measure import measure
from daskfactor.stein.particles import Particles, read
from daskfactor.stein.weights import discrepancy, stein_weights

Array = NDArray[Any]

FEW: Final = 0.5
"""Share of particles within the threshold below which a warning tells so."""


def check_room(
    data: BlockedData, model: Any, count: int, store: PathText | None, overwrite: bool
) -> None:
    """Refuse, before anything is computed, a place where the results cannot go.

    Raises
    ------
    OptionError
        If they are to stay in memory and there is not enough of it.
    StoreError
        If something is in the way of a store.
    """
    if store is not None:
        held = claim(local_path(fspath(store)), overwrite)
        if held is not None:
            held.release()
        return
    rows, columns = data.shape
    size = count * (rows + columns) * model.n_components * data.dtype.itemsize
    if size > memory_budget(None):
        raise OptionError(
            f"{count} particles of {rows} x {columns} with {model.n_components} components take "
            f"{size / 2**30:.1f} GiB, more than half of the free memory; pass store= to write them "
            "to disk, or take fewer"
        )


def new_sink(job: Job, store: PathText | None, overwrite: bool) -> Sink:
    """Where the results go."""
    spec = job.spec(store is not None)
    if store is None:
        return MemorySink(spec)
    return RunStore.create(fspath(store), spec, overwrite=overwrite, state=({}, {"draws": 0}))


def run(job: Job, sink: Sink, before: tuple[int, float] | None = None) -> xr.DataTree:
    """Make particles, weigh all of them, and give the results.

    ``before``: particles that the sink has already, and the seconds they took.
    """
    begun, count = time.perf_counter(), job.options.particles
    done, earlier = before or (0, 0.0)
    with sink:
        if done < count:
            job.on_event(RunEvent("particles", done, count))
            first = _reference(*first_factors(job, sink)) if done else None
            for one in job.particles(count, done, "particles"):
                first = first or _reference(one.W, one.H)
                _write(job, sink, _like(first, one) if job.options.align else one)
                done = one.number + 1
                meta = {"draws": done, "seconds": earlier + time.perf_counter() - begun}
                sink.checkpoint({}, meta)
                job.on_event(RunEvent("particles", done, count))
        _weigh(job, sink)
        sink.finish({"sampling_time": earlier + time.perf_counter() - begun})
    return sink.tree()


def _write(job: Job, sink: Sink, one: Particle) -> None:
    """One particle, in the caller's order of rows and columns."""
    W, H = one.W, one.H
    stats: dict[str, Array] = {
        "seconds": np.array([one.seconds]),
        "n_iter": np.array([one.n_iter], np.int64),
    }
    if job.model.has_threshold:
        stats["objective"] = job.model.factor * job.objectives(W[None], H[None]) + 0.0
        W, H = on_simplex(W, H)
    W = in_callers_order(job.data, "rows", W.astype(job.options.dtype))
    Ht = in_callers_order(job.data, "columns", H.T.astype(job.options.dtype))
    sink.write_draws(0, one.number, W[None], np.ascontiguousarray(Ht)[None])
    sink.write_stats(0, one.number, stats)


def first_factors(job: Job, sink: Sink) -> tuple[Array, Array]:
    """W and H of the first particle that a sink holds, in the order of the grid."""
    W, H = (np.asarray(read(factor, 0)) for factor in factors_of(job, sink))
    rows, columns = job.data.row_order, job.data.col_order
    return W if rows is None else W[rows], H if columns is None else H[:, columns]


def _reference(W: Array, H: Array) -> tuple[Reference, Law]:
    """What components are put in the order of."""
    return reference_from(W, H), Law(np.arange(W.shape[1]), False, W.shape[1])


def _like(first: tuple[Reference, Law], one: Particle) -> Particle:
    """The particle with its components in the order of the first one's, by angles of W."""
    order = match(one.W, one.H, *first, 0.0, by="w").permutation
    return one._replace(W=one.W[:, order], H=one.H[order])


def _weigh(job: Job, sink: Sink) -> None:
    """Stein matrix and weights of all particles, read from where they were put."""
    job.on_event(RunEvent("weights", 0, 1))
    W, H = factors_of(job, sink)
    particles = Particles.of(W, H, job.data).loaded()
    kernel = IMQ(**job.options.kernel)
    found = measure(job.runner, job.data, job.model, particles, kernel, job.options.tangent)
    _tell_of_poor_ones(job.model, found.objective)
    matrix = found.stein.matrix
    weight = stein_weights(matrix)
    attrs: Mapping[str, Any] = {**asdict(found.stein.kernel), "tangent": int(job.options.tangent)}
    sink.write_weights(
        weight=weight,
        lp=found.stein.log_density,
        stein_matrix=matrix,
        discrepancy=discrepancy(matrix, weight),
        discrepancy_equal=discrepancy(matrix),
        attrs=attrs,
    )
    job.on_event(RunEvent("weights", 1, 1))


def factors_of(job: Job, sink: Sink) -> tuple[Any, Any]:
    """W (M, I, K) and H (M, K, J) as they were put down: arrays, or lazy ones of a store."""
    group = sink.tree()["posterior"].to_dataset()
    return (
        group["W"].transpose("chain", "draw", ..., "component").data[0],
        group["H"].transpose("chain", "draw", "component", ...).data[0],
    )


def _tell_of_poor_ones(model: Any, objective: NDArray[np.float64] | None) -> None:
    """Warn if few particles are as good as the threshold asks."""
    if objective is None:
        return
    good = int((objective <= (1.0 + model.smoothness) * model.eps).sum())
    if good < FEW * len(objective):
        warnings.warn(
            f"particles with an objective within the threshold of {model.eps:.4g}: only {good} of "
            f"{len(objective)} (the best: {objective.min():.4g}); let them run longer, or pass a "
            "larger threshold",
            SamplingWarning,
            stacklevel=5,
        )
    fall = model.sharpness * model.smoothness * model.eps
    if fall < 1.0:
        warnings.warn(
            f"sharpness={model.sharpness:g} hardly tells good factorizations from bad ones here: "
            f"at 1.1 times the threshold of {model.eps:.3g} the likelihood has fallen by "
            f"exp(-{fall:.2g}) only; pass a larger sharpness, such as "
            f"{10 / (model.smoothness * model.eps):.2g}, or multiply the data by a number",
            SamplingWarning,
            stacklevel=5,
        )


def on_simplex(W: Array, H: Array) -> tuple[Array, Array]:
    """The same product with columns of W that add up to 1.

    A component that is zero in all of W has any column there, and a row of zeros in H.
    """
    sums = W.sum(axis=0, dtype=np.float64)
    dead = ~(sums > 0)
    W, H = W.astype(np.float64), H.astype(np.float64)
    W[:, dead], H[dead], sums[dead] = 1.0, 0.0, len(W)
    return W / sums, H * sums[:, None]
