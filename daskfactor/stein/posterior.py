"""The verbs ``stein_posterior`` and ``stein_discrepancy``."""

import json
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, Unpack

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import one_of, refuse_unknown, truth, warn, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataError, OptionError, SamplingWarning
from daskfactor.inference.registry import algorithm_from_dict, requested_algorithm
from daskfactor.inference.run_loop import RunLoop, Values, join_values, split_values
from daskfactor.inference.sampling import PathText, described
from daskfactor.inference.session import Session, session, session_again, version_errors
from daskfactor.inference.setting import in_callers_order
from daskfactor.inference.singular import PILOTS, Pair
from daskfactor.machine import memory_budget
from daskfactor.models import model_from_dict
from daskfactor.options import OnMatrix, Running, verb
from daskfactor.progress import OnEvent, RunEvent
from daskfactor.random import resolve_seed
from daskfactor.results.align import match, reference_from
from daskfactor.results.files import Checkpoints, Late
from daskfactor.results.finalize import close_run
from daskfactor.results.run_writer import Sink, reserved, sink_of
from daskfactor.results.schema import OBJECTIVE, PARTICLES, RATES, THRESHOLD, RunSpec
from daskfactor.results.trace import Run, Symmetries, Trace
from daskfactor.stein.ensemble import Ensemble, Particle, ParticleMethod
from daskfactor.stein.kernel import IMQ, checked_weights, discrepancy, stein_weights
from daskfactor.stein.particles import Particles, Posterior, factors_of, on_simplex, read

if TYPE_CHECKING:
    from daskfactor.results.store import RunStore

Array = NDArray[Any]

NOT_STARTED: Final[dict[str, Any]] = {"draws": 0, "seconds": 0.0}
"""Checkpoint of a run before its first step."""
SEGMENT: Final = 1.0
"""Seconds without a new particle after which a checkpoint may be due."""
FEW: Final = 0.5
"""Share of particles within the threshold below which a warning is given."""


def checked_kernel(model: Any, tangent: bool, kernel: object) -> IMQ:
    """Return the kernel, or the model's default; refuse models and kernels before data are read."""
    if not getattr(model, "has_scores", False):
        raise OptionError(
            "model must be a SILFNMF(n_components=...) or a TweedieNMF(n_components=...), got "
            f"{model!r}, which has no scores for a Stein discrepancy"
        )
    model.check_settled("a Stein discrepancy")
    if tangent and not model.simplex:
        raise OptionError(
            "tangent=True takes scores along the simplex that the columns of W of a SILFNMF lie "
            "on; those of a TweedieNMF are free, so leave it out"
        )
    if kernel is None:
        return IMQ() if "threshold" in model.from_data else IMQ("median", "median")
    if not isinstance(kernel, IMQ):
        raise OptionError(f"kernel must be IMQ(...), got {kernel!r}; leave it out for the default")
    return kernel


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
    **options: Unpack[OnMatrix],
) -> xr.DataTree:
    r"""Approximate a posterior by a few factorizations with probability masses.

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
        Method that makes particles; by default ``Ensemble()``: optimisation from Q-Transform
        starts. :class:`SimplexHMC`, :class:`SVGD` and :class:`SteinDescent` are for comparison.
    particles
        Number M of particles.
    pilot
        Number of pilot runs from random starts; the worst of their objectives is the threshold
        if that is ``"auto"`` (the paper uses 50).
    kernel, tangent
        As for :func:`stein_discrepancy`.
    align
        Give the components of every particle the order of the first one's before weighing,
        by the angles between columns of W. The posterior does not change with the order, but
        the kernel, a matter of distances, takes one factorization in two orders for two
        modes. False leaves them as they are.
    random_seed
        The same seed, from 0 to 2⁶⁴ - 1, gives the same particles on every executor.
    store
        Directory to write particles to as they are finished, from the end of the pilot runs
        on; :func:`resume` goes on with what was cut short, and :func:`open_run` reads it.
    overwrite, options
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

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), **run)
    >>> round(float(modes["sample_stats"]["weight"].sum()), 6)
    1.0
    """
    kernel = checked_kernel(model, tangent, kernel)
    if model.fixed != (None, None):  # no optimiser here would leave constants alone
        raise OptionError(
            "particles are made of components that are all free, and the model fixes some with "
            "fixed_w or fixed_h; use sample() for it"
        )
    method = requested_algorithm(ParticleMethod, method, "Ensemble", "method")
    settings: dict[str, Any] = {
        "particles": whole_number("particles", particles, 1),
        "pilot": whole_number("pilot", pilot, 1),
        "kernel": asdict(kernel),
        "tangent": truth("tangent", tangent),
        "align": truth("align", align),
    }
    method.check_count(settings["particles"])
    with (
        reserved(store, overwrite) as name,
        session(V, model, random_seed=random_seed, **options) as opened,
    ):
        data = opened.data
        if not data.maximum > 0:
            raise DataError(
                f"no entry is positive, they go up to {data.maximum:g}, so that non-negative "
                "factors can only be zero; check the data"
            )
        if store is None:
            _check_room(data, model, settings["particles"])
        planned = ParticleOptions(**settings, seed=opened.seed, dtype=str(data.dtype))
        job = ParticleJob.of(opened, model, method, planned)
        spec = job.spec(store is not None)
        return job.go(sink_of(spec, name, ({}, NOT_STARTED)), {}, NOT_STARTED)


def resume_run(
    run: "RunStore",
    described: dict[str, Any],
    V: Any,
    memory_limit: int | str | None,
    **options: Unpack[Running],
) -> None:
    """Make the particles that a store lacks, and weigh them, for `daskfactor.resume`."""
    arrays, meta = run.load_checkpoint()
    if "stein" in run.tree().children:
        earlier = run.attrs.get("sampling_time", 0.0)  # missing, if it was killed just then
        close_run(run, {"sampling_time": max(earlier, float(meta.get("seconds", 0.0)))})
        return
    with version_errors(run):
        planned = ParticleOptions.from_dict(described["options"])
        model = model_from_dict(described["model"])
        run.check_plan(1, planned.dtype, model.n_components, np.arange(planned.particles))
        method = algorithm_from_dict(
            ParticleMethod, described["sampler"], "the particles were made by a method"
        )
    with session_again(run, V, model, memory_limit, **options) as opened:
        ParticleJob.of(opened, model, method, planned).go(run, arrays, meta)


def _check_room(data: BlockedData, model: Any, count: int) -> None:
    """Refuse, before anything is computed, results for which there is not enough memory.

    Raises
    ------
    OptionError
        If there is not.
    """
    rows, columns = data.shape
    size = count * (rows + columns) * model.n_components * data.dtype.itemsize
    if size > memory_budget(None):
        raise OptionError(
            f"{count} particles of {rows} x {columns} with {model.n_components} components take "
            f"{size / 2**30:.1f} GiB, more than half of the free memory; pass store= to write them "
            "to disk, or take fewer"
        )


class ParticleOptions(NamedTuple):
    """Options of a set of particles; plain values, written into the results."""

    particles: int
    pilot: int
    kernel: dict[str, Any]
    tangent: bool
    align: bool
    seed: int
    dtype: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read the options of a stored run.

        Raises
        ------
        StoreFormatError, OptionError
            If there are options that this version does not support, or invalid ones.
        """
        refuse_unknown("the stored run", values, cls._fields)
        options = cls(**values)
        refuse_unknown("the stored kernel", options.kernel, [field.name for field in fields(IMQ)])
        IMQ(**options.kernel)
        for name in ("particles", "pilot"):
            whole_number(name, values[name], 1)
        for name in ("tangent", "align"):
            truth(name, values[name])
        resolve_seed(whole_number("seed", options.seed, 0))
        one_of("dtype", options.dtype, ("float32", "float64"))
        return options


@dataclass(frozen=True)
class ParticleJob:
    """Posterior, method, options and callback of a set of particles."""

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
    ) -> "ParticleJob":
        """Choose a value for every ``"auto"``: threshold or dispersion and rates, the optimiser."""
        kernel, data = IMQ(**options.kernel), opened.data
        posterior = Posterior(opened.executor, data, model, kernel, options.tangent)
        posterior = posterior.resolve(options.seed)
        method = method.for_data(data, posterior.model.for_optimizers())
        job = cls(posterior, method, options, opened.on_event)
        if "threshold" in model.from_data and model.threshold == "auto":
            # Runs from random starts at default settings: Masood and Doshi-Velez, section 6.1.
            pilot = Ensemble(start="random", optimizer=getattr(method, "optimizer", "auto"))
            numbers, objectives = range(PILOTS, PILOTS + options.pilot), list[float]()

            def report(done: float) -> None:
                opened.on_event(RunEvent("pilot", done - PILOTS, options.pilot))

            for one in pilot.particles(posterior, numbers, options.seed, report):
                objectives.append(float(job.objective(one.W, one.H)[0]))
                report(one.number + 1)
            return replace(job, posterior=replace(posterior, model=model.resolve(objectives)))
        return job

    def objective(self, W: Array, H: Array) -> Array:
        """Return the objective (1,) of one particle."""
        particles = self.posterior.particles(W[None], H[None])
        return self.posterior.objectives(self.posterior.divergences(particles))

    def spec(self, stored: bool) -> RunSpec:
        """Plan the contents of the results."""
        data, model, options = self.posterior.data, self.posterior.model, self.options
        parts = model.to_dict(), self.method.to_dict(), options._asdict()
        numbers: dict[str, Any] = {name: float(getattr(model, name)) for name in model.from_data}
        numbers["particles"] = options.particles
        threshold = "threshold" in model.from_data
        return RunSpec(
            shape=(*data.shape, model.n_components),
            chains=1,
            draws=options.particles,
            statistics=(*PARTICLES, OBJECTIVE) if threshold else PARTICLES,
            constants=THRESHOLD if threshold else RATES,
            **described(data, *parts, self.posterior.executor, stored, **numbers),
        )

    def go(self, sink: Sink, arrays: Mapping[str, Any], meta: dict[str, Any]) -> xr.DataTree:
        """Make the particles that are left, weigh all of them, and return the results.

        ``arrays`` and ``meta`` are the last checkpoint of the sink.
        """
        with sink, closing(ParticleRun(self, sink)) as run:
            run.restore(arrays, meta)
            run.go()
            self.on_event(RunEvent("weights", 0, 1))
            self._weigh(sink)
            self.on_event(RunEvent("weights", 1, 1))
            close_run(sink, {"sampling_time": run.elapsed})
        return sink.tree()

    def _weigh(self, sink: Sink) -> None:
        """Compute and write the Stein matrix and weights of all particles of a sink."""
        posterior = self.posterior
        W, H = factors_of(sink.tree())
        particles = Particles.of(W[0], H[0], posterior.data).loaded()
        particles = particles.checked(posterior.executor, posterior.model.simplex)
        stein = posterior.stein_matrix(particles)
        if "threshold" in posterior.model.from_data:
            _warn_of_threshold(posterior.model, posterior.objectives(stein.divergence))
        weight = stein_weights(stein.matrix)
        sink.write_weights(
            weight=weight,
            lp=stein.log_density,
            stein_matrix=stein.matrix,
            discrepancy=discrepancy(stein.matrix, weight),
            discrepancy_equal=discrepancy(stein.matrix),
            attrs={**asdict(stein.kernel), "tangent": int(posterior.tangent)},
        )


class ParticleRun(RunLoop):
    """The particles of a job as they are made and written.

    Attributes
    ----------
    done
        Number of particles that are written.
    state
        State of the method after its last step.
    """

    def __init__(self, job: ParticleJob, sink: Sink) -> None:
        super().__init__(job.posterior.executor, None if sink.checkpoints is None else sink)
        self.job, self.sink, self.count = job, sink, job.options.particles
        self.done, self.state = 0, Values()
        self._first: Pair | None = None

    @property
    def finished(self) -> bool:
        return self.done >= self.count

    def load(self, arrays: Mapping[str, Any], meta: dict[str, Any]) -> None:
        job, self.done = self.job, int(meta["draws"])
        self.state = join_values(arrays, meta.get("state", {}))
        self._first = self._first_factors() if 0 < self.done < self.count else None
        left, seed = range(self.done, self.count), job.options.seed
        self._steps = job.method.run(job.posterior, left, seed, self._report, self.state)
        if left:
            self._report(self.done)

    def advance(self) -> None:
        """Run the method until it has finished a particle, or for some time."""
        start = time.perf_counter()
        for made, state in self._steps:
            self.state = state or {}
            for one in made:
                self._write(one)
            if made or time.perf_counter() - start >= SEGMENT:
                break
        if self.finished:
            list(self._steps)  # the method may warn at its end

    def snapshot(self, checkpoints: Checkpoints) -> tuple[Late, dict[str, Any]]:
        del checkpoints
        arrays, state = split_values(self.state, "state")
        return arrays, {"draws": self.done, "state": state}

    def _segment(self) -> None:
        before = self.done
        super()._segment()
        if self.done > before:
            self._report(self.done)

    def _report(self, done: float) -> None:
        self.job.on_event(RunEvent("particles", done, self.count))

    def _first_factors(self) -> Pair:
        """Return W and H of the first particle of the sink, in the order of the grid."""
        W, H = (read(factor, (0, 0)) for factor in factors_of(self.sink.tree()))
        order = self.job.posterior.data.order
        return W[order(0)], H[:, order(1)]

    def _write(self, one: Particle) -> None:
        """Write one particle, in the caller's order of rows and columns."""
        posterior, options = self.job.posterior, self.job.options
        self._first = self._first or (one.W, one.H)
        one = _like(self._first, one) if options.align else one
        data, W, H = posterior.data, one.W, one.H
        stats: dict[str, Array] = {
            "seconds": np.array([one.seconds]),
            "n_iter": np.array([one.n_iter], np.int64),
        }
        if "threshold" in posterior.model.from_data:
            stats["objective"] = self.job.objective(W, H)
            W, H = on_simplex(W, H)
        W = in_callers_order(data, "rows", W.astype(options.dtype))
        Ht = in_callers_order(data, "columns", H.T.astype(options.dtype))
        self.sink.write_draws(0, one.number, W[None], np.ascontiguousarray(Ht)[None])
        self.sink.write_stats(0, one.number, stats)
        self.done = one.number + 1


def _like(first: Pair, one: Particle) -> Particle:
    """Order the components of a particle like those of the first one, by angles of W."""
    count = one.W.shape[1]
    symmetries = Symmetries(np.arange(count), False, count)
    order = match(one.W, one.H, reference_from(*first), symmetries, 0.0, by="w").permutation
    return one._replace(W=one.W[:, order], H=one.H[order])


def _warn_of_threshold(model: Any, objective: NDArray[np.float64]) -> None:
    """Warn if few particles are within the threshold, or the likelihood hardly falls beyond it."""
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


@verb
def stein_discrepancy(
    particles: Trace | Pair,
    V: Any,
    model: Any,
    *,
    weights: ArrayLike | None = None,
    tangent: bool = False,
    kernel: IMQ | None = None,
    most: int = 200,
    **options: Unpack[OnMatrix],
) -> xr.Dataset:
    r"""Return the kernelised Stein discrepancy of some factorizations from a posterior.

    .. math:: \mathrm{KSD} = \sqrt{w^\top K w}, \quad K_{mn} = k\, s_m^\top s_n
        + s_m^\top \nabla_{\theta_n} k + s_n^\top \nabla_{\theta_m} k
        + \mathrm{tr}\, \nabla_{\theta_m} \nabla_{\theta_n}^\top k

    with scores :math:`s = \nabla \log p(W, H | V)` and the kernel k of :class:`IMQ`. No
    normalising constant is needed, and nothing but the factorizations themselves: it also
    tells draws that a step has biased, which chains agree on, from better ones.

    Parameters
    ----------
    particles
        Result of :func:`sample` or the path of its store (its draws, chains one after the
        other), or a pair of arrays W (M, I, K) and H (M, K, J): NumPy, memory-mapped, zarr,
        dask or xarray. Non-negative.
    V : array (I, J)
        The data, as for :func:`sample`.
    model
        The posterior: a :class:`SILFNMF` with a threshold, or a :class:`TweedieNMF`. Settings
        that are ``"auto"`` are those of the run if particles are a run; else a `TweedieNMF` has
        them chosen as for :func:`log_evidence`. Under a `SILFNMF` columns of W are first
        divided by their sums and rows of H multiplied with them, which leaves WH as it is.
    weights
        Probability masses (M,) of the particles; left out, all are equal.
    tangent
        Take the score in W along the simplex only (`SILFNMF`): its column means are
        subtracted, and a column of W counts for I - 1 dimensions. The default, as in
        the paper, is the score in all of space.
    kernel
        Left out: ``IMQ()``, the paper's, for a `SILFNMF`, and median distances for a
        `TweedieNMF`.
    most
        Largest number of draws of a run to use: of more, one in two, in three
        and so on is used. Time grows with their number, a matrix with its square.
    options
        Where it runs, and how V is read, as for :func:`sample`.

    Returns
    -------
    Dataset
        ``discrepancy`` under ``weights``, ``discrepancy_equal`` and
        ``discrepancy_optimal``; ``weight`` (particle), the masses of the last, see
        :func:`daskfactor.stein.stein_weights`; ``stein_matrix`` (particle,
        other_particle); ``log_density`` (particle), up to a constant; ``objective``
        (particle) for a `SILFNMF`. The attributes ``scale_w`` and ``scale_h`` are the
        kernel's.

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model or particles cannot be used.

    Notes
    -----
    Values rank sets of particles under one posterior and one kernel, and say nothing by
    themselves: the discrepancy of the posterior from itself is not zero here, for two
    reasons. Where its density is positive at the boundary of what is allowed, at W = 0 or
    H = 0, partial integration leaves a term there; so it is with exponential and Dirichlet
    priors, unless the likelihood vanishes at the boundary. And a score in all of space does
    not know that W cannot leave the simplex, which ``tangent=True`` puts right. Even without
    either, M independent draws would be at about :math:`\sqrt{\sum_m K_{mm}} / M`, and
    draws that hang together further off. So compare sets of equally many particles, and
    fix the kernel, for instance at ``IMQ(first.scale_w, first.scale_h)``.

    Masood and Doshi-Velez, equations 3, 4 and 7 and algorithm 5.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), **run)
    >>> result = dfac.stein_discrepancy(modes, V, dfac.SILFNMF(2), progressbar=False)
    >>> bool(result["discrepancy"] >= 0)
    True
    """
    kernel = checked_kernel(model, tangent, kernel)
    whole_number("most", most, 1)
    (W, H), coords, constants = _read_particles(particles, most, weights)
    model = _with_constants(model, constants)
    dtype = "float64" if np.dtype(W.dtype) == np.float64 else "float32"
    with session(V, model, reading={"dtype": dtype}, **options) as run:
        ours = Particles.of(W, H, run.data).loaded()
        if ours.width != model.n_components:
            raise OptionError(
                f"the particles have {ours.width} components, the model {model.n_components}; "
                "pass the model that they are factors of"
            )
        if weights is not None:
            weights = checked_weights(weights, ours.count)
        ours = ours.checked(run.executor, model.simplex)
        posterior = Posterior(run.executor, run.data, model, kernel, tangent).resolve()
        stein = posterior.stein_matrix(ours)
    best = stein_weights(stein.matrix)
    variables: dict[str, Any] = {
        "discrepancy": discrepancy(stein.matrix, weights),
        "discrepancy_equal": discrepancy(stein.matrix),
        "discrepancy_optimal": discrepancy(stein.matrix, best),
        "weight": ("particle", best),
        "stein_matrix": (("particle", "other_particle"), stein.matrix),
        "log_density": ("particle", stein.log_density),
    }
    if "threshold" in model.from_data:
        variables["objective"] = ("particle", posterior.objectives(stein.divergence))
    attrs = {
        **asdict(stein.kernel),
        "tangent": int(tangent),
        "model": json.dumps(model.to_dict()),
        "inference_library": "daskfactor",
    }
    return xr.Dataset(variables, coords=coords, attrs=attrs)


def _read_particles(
    particles: Trace | Pair, most: int, weights: object
) -> tuple[Pair, dict[str, Any], dict[str, float]]:
    """Return factors (M, I, K) and (M, K, J), their coordinates, and constants of their run.

    Of more than ``most`` draws, every n-th is used.
    """
    if isinstance(particles, tuple | list):
        if len(particles) != 2:
            raise OptionError(
                f"particles must be a run or a pair (W, H) of arrays, got {len(particles)} of them"
            )
        W, H = (one if hasattr(one, "dtype") else np.asarray(one) for one in particles)
        return (W, H), {}, {}
    tree = Run.of(particles, "a Stein discrepancy").tree
    W, H = factors_of(tree)
    total = W.shape[0] * W.shape[1]
    step = -(-total // most)
    if step > 1 and weights is not None:
        raise OptionError(
            f"weights are for all {total} draws, and most={most} uses only some of them; "
            f"pass most={total} as well"
        )
    if step > 1:
        warn(
            f"of the {total} draws one in {step} is used; pass most={total} for all of them",
            SamplingWarning,
        )
    group = tree["posterior"].to_dataset()
    chains, draws = group["chain"].values, group["draw"].values
    coords = {
        "chain": ("particle", np.repeat(chains, len(draws))[::step]),
        "draw": ("particle", np.tile(draws, len(chains))[::step]),
    }
    constants = {}
    if "constant_data" in tree.children:
        variables = tree["constant_data"].to_dataset().data_vars
        constants = {str(name): float(value) for name, value in variables.items()}
    W, H = (one.reshape(total, *one.shape[2:])[::step] for one in (W, H))
    return (W, H), coords, constants


def _with_constants(model: Any, constants: dict[str, float]) -> Any:
    """Return the model with a run's numbers for its ``"auto"`` settings."""
    open_ = [name for name in model.from_data if getattr(model, name) == "auto"]
    model = replace(model, **{name: constants[name] for name in open_ if name in constants})
    if "threshold" in model.from_data:
        assert model.eps > 0  # raises if it is still "auto"
    return model
