"""The public verb ``stein_posterior``: a few weighted factorizations in place of many draws."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from os import fspath
from typing import Any, Final, NamedTuple, Unpack

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import truth, warn, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataError, OptionError, SamplingWarning
from daskfactor.executors import Executor
from daskfactor.inference.base import algorithm_from_dict, known
from daskfactor.inference.options import in_callers_order
from daskfactor.inference.sampling import PathText, described
from daskfactor.inference.session import (
    Options,
    Session,
    as_begun,
    session,
    session_again,
    verb,
)
from daskfactor.machine import memory_budget
from daskfactor.models import model_from_dict
from daskfactor.progress import OnEvent, Phase, RunEvent
from daskfactor.results.align import Law, match, reference_from
from daskfactor.results.schema import OBJECTIVE, PARTICLES, RATES, THRESHOLD, RunSpec
from daskfactor.results.sink import MemorySink, Sink
from daskfactor.results.store import RunStore, claim, local_path
from daskfactor.stein.ensemble import Ensemble, Particle, ParticleMethod
from daskfactor.stein.kernel import IMQ, discrepancy, stein_weights
from daskfactor.stein.measure import checked_kernel
from daskfactor.stein.particles import Pair, Particles, Posterior, factors_of, read
from daskfactor.stein.starts import PILOTS

Array = NDArray[Any]

FEW: Final = 0.5
"""Share of particles within the threshold below which a warning tells so."""


@verb
def stein_posterior(
    V: Any,
    model: Any,
    method: ParticleMethod | None = None,
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
    kernel = checked_kernel(model, tangent, kernel)
    if model.fixed != (None, None):  # no optimiser here would leave constants alone
        raise OptionError(
            "particles are made of components that are all free, and the model fixes some with "
            "fixed_w or fixed_h; use sample() for it"
        )
    chosen: Any = Ensemble() if method is None else method
    if not isinstance(chosen, ParticleMethod):
        names = ", ".join(f"{name}()" for name in known(ParticleMethod))
        raise OptionError(
            f"method must be one of {names}, got {method!r}; leave it out for Ensemble()"
        )
    settings: dict[str, Any] = {
        "particles": whole_number("particles", particles, 1),
        "pilot": whole_number("pilot", pilot, 1),
        "kernel": asdict(kernel),
        "tangent": truth("tangent", tangent),
        "align": truth("align", align),
    }
    chosen.check_count(settings["particles"])
    with session(
        V,
        model,
        blocks,
        unstored,
        random_seed=random_seed,
        progressbar=progressbar,
        client=client,
        executor=executor,
        callback=callback,
    ) as opened:
        data = opened.data
        if not data.maximum > 0:
            raise DataError(
                f"no entry is positive, they go up to {data.maximum:g}, so that non-negative "
                "factors can only be zero; check the data"
            )
        _check_room(data, model, settings["particles"], store, overwrite)
        options = ParticleOptions(**settings, seed=opened.seed, dtype=str(data.dtype))
        job = ParticleRun.of(opened, model, chosen, options)
        spec = job.spec(store is not None)
        sink: Sink = MemorySink(spec)
        if store is not None:
            state: tuple[Any, Any] = {}, {"draws": 0}
            sink = RunStore.create(fspath(store), spec, overwrite=overwrite, state=state)
        return job.go(sink)


def go_on(
    held: RunStore,
    described: dict[str, Any],
    V: Any,
    memory_limit: int | str | None,
    **options: Unpack[Options],
) -> None:
    """Make the particles that a store lacks, and weigh them; what `daskfactor.resume` calls."""
    _, meta = held.load_checkpoint()
    seconds = float(meta.get("seconds", 0.0))
    if "stein" in held.tree().children:
        known = held.attrs.get("sampling_time", 0.0)  # not there, if it was killed just then
        held.finish({"sampling_time": max(known, seconds)})
        return
    with as_begun(held):
        planned = ParticleOptions(**described["options"])
        model = model_from_dict(described["model"])
        method = algorithm_from_dict(
            ParticleMethod, described["sampler"], "the particles were made by a method"
        )
    with session_again(held, V, model, memory_limit, **options) as opened:
        ParticleRun.of(opened, model, method, planned).go(held, int(meta["draws"]), seconds)


def _check_room(
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


class ParticleOptions(NamedTuple):
    """What was asked for; plain values, written into the results."""

    particles: int
    pilot: int
    kernel: dict[str, Any]
    tangent: bool
    align: bool
    seed: int
    dtype: str


@dataclass(frozen=True)
class ParticleRun:
    """A set of particles on its way: what they are made for, how, and who is told."""

    posterior: Posterior
    method: ParticleMethod
    options: ParticleOptions
    on_event: OnEvent

    @classmethod
    def of(
        cls,
        opened: Session[BlockedData],
        model: Any,
        method: ParticleMethod,
        options: ParticleOptions,
    ) -> "ParticleRun":
        """Decide what is left ``"auto"``: threshold or dispersion and rates, the optimiser."""
        kernel, data = IMQ(**options.kernel), opened.data
        where = opened.executor, data, model, kernel, options.tangent, options.seed
        posterior = Posterior.of(*where)
        method = method.for_data(data, posterior.model.for_optimizers())
        job = cls(posterior, method, options, opened.on_event)
        if model.has_threshold and model.threshold == "auto":
            resolved = model.resolve(list(job._pilot()))
            return replace(job, posterior=replace(posterior, model=resolved))
        return job

    def _pilot(self) -> Iterator[float]:
        """Objectives of runs from random starts at default settings, which set a threshold.

        Source: Masood and Doshi-Velez, section 6.1.
        """
        count = self.options.pilot
        method = Ensemble(start="random", optimizer=getattr(self.method, "optimizer", "auto"))
        for one in self._particles(method, range(PILOTS, PILOTS + count), "pilot"):
            yield float(self._objective(one.W, one.H)[0])
            self.on_event(RunEvent("pilot", one.number - PILOTS + 1, count))

    def _particles(
        self, method: ParticleMethod, numbers: range, phase: Phase
    ) -> Iterator[Particle]:
        offset, count = PILOTS if phase == "pilot" else 0, numbers.stop

        def tell(done: float) -> None:
            self.on_event(RunEvent(phase, done - offset, count - offset))

        return method.particles(self.posterior, numbers, self.options.seed, tell)

    def _objective(self, W: Array, H: Array) -> Array:
        """The objective (1,) of one particle."""
        particles = self.posterior.particles(W[None], H[None])
        return self.posterior.objectives(self.posterior.divergences(particles))

    def spec(self, stored: bool) -> RunSpec:
        """Plan what the results will hold."""
        data, model, options = self.posterior.data, self.posterior.model, self.options
        parts = model.to_dict(), self.method.to_dict(), options._asdict()
        decided: dict[str, Any] = {name: float(getattr(model, name)) for name in model.from_data}
        decided["particles"] = options.particles
        return RunSpec(
            shape=(*data.shape, model.n_components),
            chains=1,
            draws=options.particles,
            statistics=(*PARTICLES, OBJECTIVE) if model.has_threshold else PARTICLES,
            constants=THRESHOLD if model.has_threshold else RATES,
            **described(data, *parts, self.posterior.executor, stored, **decided),
        )

    def go(self, sink: Sink, done: int = 0, earlier: float = 0.0) -> xr.DataTree:
        """Make particles, weigh all of them, and give the results.

        ``done``: particles that the sink has already, and ``earlier`` the seconds they took.
        """
        begun, count = time.perf_counter() - earlier, self.options.particles
        with sink:
            if done < count:
                self.on_event(RunEvent("particles", done, count))
                first = self._first_factors(sink) if done else None
                for one in self._particles(self.method, range(done, count), "particles"):
                    first = first or (one.W, one.H)
                    self._write(sink, _like(first, one) if self.options.align else one)
                    done = one.number + 1
                    meta = {"draws": done, "seconds": time.perf_counter() - begun}
                    sink.checkpoint({}, meta)
                    self.on_event(RunEvent("particles", done, count))
            self.on_event(RunEvent("weights", 0, 1))
            self._weigh(sink)
            self.on_event(RunEvent("weights", 1, 1))
            sink.finish({"sampling_time": time.perf_counter() - begun})
        return sink.tree()

    def _write(self, sink: Sink, one: Particle) -> None:
        """One particle, in the caller's order of rows and columns."""
        data, W, H = self.posterior.data, one.W, one.H
        stats: dict[str, Array] = {
            "seconds": np.array([one.seconds]),
            "n_iter": np.array([one.n_iter], np.int64),
        }
        if self.posterior.model.has_threshold:
            stats["objective"] = self._objective(W, H)
            W, H = on_simplex(W, H)
        W = in_callers_order(data, "rows", W.astype(self.options.dtype))
        Ht = in_callers_order(data, "columns", H.T.astype(self.options.dtype))
        sink.write_draws(0, one.number, W[None], np.ascontiguousarray(Ht)[None])
        sink.write_stats(0, one.number, stats)

    def _first_factors(self, sink: Sink) -> Pair:
        """W and H of the first particle that a sink holds, in the order of the grid."""
        W, H = (read(factor, (0, 0)) for factor in factors_of(sink.tree()))
        rows, columns = self.posterior.data.row_order, self.posterior.data.col_order
        return W if rows is None else W[rows], H if columns is None else H[:, columns]

    def _weigh(self, sink: Sink) -> None:
        """Stein matrix and weights of all particles, read from where they were put."""
        posterior = self.posterior
        W, H = factors_of(sink.tree())
        particles = Particles.of(W[0], H[0], posterior.data).loaded()
        particles = particles.checked(posterior.executor, posterior.model.simplex)
        found = posterior.stein_matrix(particles)
        if posterior.model.has_threshold:
            _tell_of_poor_ones(posterior.model, posterior.objectives(found.divergence))
        weight = stein_weights(found.matrix)
        sink.write_weights(
            weight=weight,
            lp=found.log_density,
            stein_matrix=found.matrix,
            discrepancy=discrepancy(found.matrix, weight),
            discrepancy_equal=discrepancy(found.matrix),
            attrs={**asdict(found.kernel), "tangent": int(posterior.tangent)},
        )


def _like(first: Pair, one: Particle) -> Particle:
    """The particle with its components in the order of the first one's, by angles of W."""
    count = one.W.shape[1]
    law = Law(np.arange(count), False, count)
    order = match(one.W, one.H, reference_from(*first), law, 0.0, by="w").permutation
    return one._replace(W=one.W[:, order], H=one.H[order])


def _tell_of_poor_ones(model: Any, objective: NDArray[np.float64]) -> None:
    """Warn if few particles are as good as the threshold asks."""
    good = int((objective <= (1.0 + model.smoothness) * model.eps).sum())
    if good < FEW * len(objective):
        warn(
            f"particles with an objective within the threshold of {model.eps:.4g}: only {good} of "
            f"{len(objective)} (the best: {objective.min():.4g}); let them run longer, or pass a "
            "larger threshold",
            SamplingWarning,
        )
    fall = model.sharpness * model.smoothness * model.eps
    if fall < 1.0:
        warn(
            f"sharpness={model.sharpness:g} hardly tells good factorizations from bad ones here: "
            f"at 1.1 times the threshold of {model.eps:.3g} the likelihood has fallen by "
            f"exp(-{fall:.2g}) only; pass a larger sharpness, such as "
            f"{10 / (model.smoothness * model.eps):.2g}, or multiply the data by a number",
            SamplingWarning,
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
