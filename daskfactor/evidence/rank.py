"""``select_rank``: the evidence of every rank, and the score of cells left out."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Unpack

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.special import logsumexp

from daskfactor.checks import warn, whole_number
from daskfactor.data.holdout import HeldOut, hold_out
from daskfactor.errors import EngineError, OptionError, SamplingWarning
from daskfactor.evidence.base import (
    Evidence,
    EvidenceMethod,
    checked_method,
    estimate_evidence,
    read_options,
)
from daskfactor.evidence.call_store import CallStore, call_store, identity_of
from daskfactor.inference.point import chosen_dispersion
from daskfactor.inference.sampling import PathText, sample
from daskfactor.inference.session import session
from daskfactor.options import OnMatrix, split, verb
from daskfactor.progress import OnEvent, RunEvent, progress_bar
from daskfactor.random import resolve_seed
from daskfactor.results.pointwise import log_likelihood
from daskfactor.results.verdict_dataset import VerdictDataset

Vector = NDArray[np.float64]

SIGNIFICANT = 2.0
"""Standard errors of a difference within which two ranks are not distinguishable."""
COARSE = 1.0
"""Nats of error up to which ranks that are not distinguishable are called a tie."""
EVIDENCES = 3
"""Expected number of evidences where scores come first, for the progress bar."""
NUMBERS = ("value", "standard_error", "discretization_error", "bound")
"""Attributes of an evidence that ranks are compared by."""
DEFAULT_SHARE = 0.1
"""Share of cells that are left out of a factorization by default."""
DRAWS, TUNE, THIN = 100, 150, 1
"""Lengths of the runs that predict the cells left out."""


class RankFit(NamedTuple):
    """Results of one rank; ``scores`` are log predictive densities, cell by cell."""

    evidence: Evidence | None
    seconds: float
    scores: Vector | None


TITLES: Final = {
    "log_evidence": "evidence",
    "standard_error": "± draws",
    "discretization_error": "± ladder",
    "held_out_log_score": "held out",
    "held_out_standard_error": "± cells",
    "held_out_difference_error": "± to best",
}
"""Titles of columns in print."""


class Ranks(VerdictDataset):  # type: ignore[no-untyped-call]
    """Result of :func:`select_rank`: evidence and scores of every rank, and a verdict."""

    __slots__ = ()

    def _table(self) -> str | None:
        if "log_evidence" not in self.data_vars or "verdict" not in self.attrs:
            return None
        table = self.to_dataframe().round(2).rename(columns=TITLES)
        return str(table.to_string())


@verb
def select_rank(
    V: Any,
    model: Any,
    ranks: Iterable[int] = range(1, 11),
    method: EvidenceMethod | None = None,
    held_out: float | Literal["auto"] | None = "auto",
    *,
    random_seed: int | None = 0,
    store: PathText | None = None,
    **options: Unpack[OnMatrix],
) -> Ranks:
    """Estimate the log evidence of every rank, and its predictions of cells left out.

    Parameters
    ----------
    V : array (I, J)
        As for :func:`log_evidence`; cells can be left out of anything that :func:`hold_out` takes.
    model
        Everything but the number of components, which ``ranks`` replaces; an
        :class:`AllocationModel` must have one hidden variable.
    ranks
        Numbers of components to compare.
    method
        Method of the evidence, which is then computed at every rank. None takes
        :class:`ThermodynamicIntegration` (:class:`SequentialMonteCarlo` for an
        :class:`AllocationModel`). Where cells are left out, None computes the evidence only at
        ranks whose scores are not distinguishable, from the smallest up until it falls; the
        others have NaN.
    held_out
        Share of the observed cells that are left out once and predicted at every rank
        (one short run per rank); None or 0 for the evidence alone. ``"auto"`` is 0.1, and
        None for the models without missing cells: :class:`GaussianAdditive` and
        :class:`AllocationModel`.
    random_seed
        Any whole number.
    store
        Directory for scores and evidences as they are computed, and for checkpoints of
        :class:`ThermodynamicIntegration`: after a kill the same call, with the same store, goes on
        from there, to the same result.
    options
        As for :func:`log_evidence`.

    Returns
    -------
    Ranks
        A Dataset along ``rank``: ``log_evidence``, ``standard_error``, ``discretization_error``
        (nats), ``seconds`` (of both), and with cells left out
        ``held_out_log_score`` (mean log predictive density of a cell), its
        ``held_out_standard_error`` and ``held_out_difference_error``, that of the
        difference to the best rank, cell by cell. Attributes: ``best``, by the evidence where it
        was computed (``evidence_at``) and else by the score,
        ``not_distinguishable`` (ranks within two standard errors of the best),
        ``at_edge`` ("largest" or "smallest" if the best is the last rank on that side, or
        ""), ``decides`` (0 if errors are as large as the differences between ranks;
        there is a SamplingWarning then), ``best_held_out`` and
        ``held_out_not_distinguishable``, ``verdict``, a few sentences, and ``bound``
        ("lower") if the method gives lower bounds.
        `daskfactor.plots.plot_ranks` draws it.

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model, ranks or method cannot be used.
    StoreError
        If the store is of another call, or cannot be written.

    Notes
    -----
    Prior rates under ``"auto"`` follow every rank's K, because they keep the prior mean
    of μ at the mean of the data. A dispersion under ``"auto"`` is settled once, 1 for
    counts, else at the largest rank, which leaves the least structure in the residuals;
    under a dispersion of its own every rank would explain the data about equally well.
    Şimşekli et al. 2016, section 4.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (4, 3))
    >>> model = dfac.TweedieNMF(1, dispersion=1)
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> table = dfac.select_rank(V, model, [1, 2], dfac.Chib(500, 200), None, **run)
    >>> table["log_evidence"].dims
    ('rank',)
    """
    everywhere, method = method is not None, checked_method(method, model)
    share = _checked_share(held_out, model)
    numbers = _checked_ranks(ranks)
    execution, reading = split(options)
    running: dict[str, Any] = dict(execution)
    bar = progress_bar(running.pop("progressbar", True), running.get("callback"))
    running["progressbar"] = False
    with bar as on_event, ExitStack() as stack:
        open_store = stack.enter_context(call_store(store))
        seed = resolve_seed(random_seed if open_store is None else open_store.seed(random_seed))
        cells, data, settled = None, None, model
        if model.evidence_data != "matrix":
            data, _ = method.read(V, model, read_options(model, reading))
        else:
            quiet: dict[str, Any] = {"executor": "serial", "progressbar": False}
            run = stack.enter_context(session(V, model, random_seed=seed, **quiet, **reading))
            data, model = run.data, model.placed(run.data.placed)
            largest = model.with_components(max(numbers))
            settled = replace(
                model, dispersion=chosen_dispersion(data, largest, seed, run.executor)
            )
            running |= {"blocks": reading.get("blocks"), "unstored": data.unstored}
            cells = _leave_out(V, share, seed, {**reading, "unstored": data.unstored})
        if open_store is not None:
            call = identity_of(data, model) | {"method": method.to_dict(), "ranks": numbers}
            call |= {"held_out": share, "everywhere": everywhere, "random_seed": seed}
            open_store.begin(function="select_rank", **call)
        search = RankSearch(data, settled, method, seed, running, on_event, open_store)
        fits = search.run(numbers, cells, everywhere)
        on_event(RunEvent("ranks", search.total, search.total))
    return _table(numbers, fits, method)


def _leave_out(V: Any, share: float, seed: int, reading: dict[str, Any]) -> HeldOut | None:
    """Leave a share of the cells out; None for a share of zero."""
    if not share:
        return None
    options = {name: value for name, value in reading.items() if name != "blocks"}
    cells = hold_out(V, share, random_seed=seed, **options)
    if len(cells.values) < 2:
        raise OptionError(
            f"held_out={share:g} leaves {len(cells.values)} cell out, and a score needs "
            "at least two; pass a larger share, or None for the evidence alone"
        )
    return cells


@dataclass
class RankSearch:
    """Evidences and scores of ranks, and their progress."""

    data: Any
    model: Any
    method: EvidenceMethod
    seed: int
    options: dict[str, Any]
    on_event: OnEvent
    store: CallStore | None = None
    done: int = 0
    total: int = 0

    def run(self, ranks: list[int], cells: HeldOut | None, everywhere: bool) -> list[RankFit]:
        """Compute the evidence of every rank, or score all ranks on the cells left out.

        Scored ranks have an evidence only ``everywhere``, or where scores leave a question.
        """
        self.total = len(ranks)
        if cells is None:
            return [self._add_evidence(rank, RankFit(None, 0.0, None)) for rank in ranks]
        self.total += len(ranks) if everywhere else EVIDENCES
        fits = {rank: self._score(rank, cells) for rank in ranks}
        scores = _compare(ranks, list(fits.values()))
        everywhere = everywhere or len(ranks) == 1 or not np.isfinite(scores.means).all()
        if not everywhere:
            ranks = sorted([scores.best, *scores.close]) if scores.close else []
        best: Evidence | None = None
        for rank in ranks:
            fits[rank] = self._add_evidence(rank, fits[rank])
            evidence = fits[rank].evidence
            assert evidence is not None
            if best is None or evidence.value > best.value:
                best = evidence
            # Errors of the ladder are much the same at neighbouring ranks, those of draws are not.
            elif not everywhere and best.value - evidence.value > SIGNIFICANT * np.hypot(
                best.standard_error, evidence.standard_error
            ):
                break
        return list(fits.values())

    def _add_evidence(self, rank: int, fit: RankFit) -> RankFit:
        message, model = f"evidence of rank {rank}", self.model.with_components(rank)

        def compute() -> dict[str, Any]:
            task = self.data, model, self.method, self.seed, self.store, message
            evidence = estimate_evidence(*task, **self.options)
            return {name: getattr(evidence, name) for name in NUMBERS}

        numbers = self._result(message, compute)
        seconds = fit.seconds + numbers.pop("seconds")
        return RankFit(Evidence(**numbers, trace=xr.Dataset()), seconds, fit.scores)

    def _score(self, rank: int, cells: HeldOut) -> RankFit:
        model = self.model.with_components(rank)

        def compute() -> dict[str, Any]:
            return {"scores": _scores(model, cells, self.seed, self.options)}

        result = self._result(f"cells left out, rank {rank}", compute)
        return RankFit(None, result["seconds"], result["scores"])

    def _result(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Compute a result, unless the store has it; add its seconds, and report progress."""
        done = min(self.done, self.total)
        self.on_event(RunEvent("ranks", done, self.total, message=name))
        self.done += 1
        if self.store is not None and name in self.store.finished:
            return dict(self.store.finished[name])
        start = time.perf_counter()
        result = compute()
        result["seconds"] = time.perf_counter() - start
        if self.store is not None:
            self.store.finish(name, result)
        return dict(result)


def _checked_share(held_out: Any, model: Any) -> float:
    """Return the share of cells to leave out, 0 for none."""
    if isinstance(held_out, str) and held_out != "auto":
        raise OptionError(
            f'held_out must be a share of the cells, "auto" or None, got {held_out!r}'
        )
    if model.evidence_data == "matrix":
        return DEFAULT_SHARE if held_out == "auto" else held_out or 0.0
    if held_out != "auto" and held_out:
        name = type(model).__name__
        raise OptionError(
            f"held_out={held_out!r} does not go with {name}, of which no cell can be missing; "
            "leave held_out out"
        )
    return 0.0


def _checked_ranks(ranks: Iterable[int]) -> list[int]:
    if not isinstance(ranks, Iterable):
        raise OptionError(f"ranks must be a list of numbers such as [1, 2, 3], got {ranks!r}")
    numbers = [whole_number("every rank", rank, 1) for rank in ranks]
    if not numbers or len(set(numbers)) < len(numbers):
        raise OptionError(f"ranks must be different numbers, at least one, got {numbers}")
    return sorted(numbers)


def _scores(model: Any, cells: HeldOut, seed: int, options: dict[str, Any]) -> Vector:
    """Return the log of the mean over draws of the density of every cell left out."""
    tree = sample(
        cells.train,
        model,
        draws=DRAWS,
        tune=TUNE,
        thin=THIN,
        random_seed=seed,
        keep="draws",
        **options,
    )
    scores = log_likelihood(tree, cells.cells, cells.values, held_out=True)
    mu = scores["posterior"].to_dataset()["mu"].values[0]
    means = np.maximum(mu, np.finfo(np.float32).tiny)
    densities = model.likelihood.log_density(cells.values, means, float(model.dispersion))
    return np.asarray(logsumexp(densities, axis=0) - np.log(len(means)), dtype=np.float64)


def _table(ranks: list[int], fits: list[RankFit], method: EvidenceMethod) -> Ranks:
    evidences = {n: fit.evidence for n, fit in zip(ranks, fits, strict=True) if fit.evidence}
    for rank, evidence in evidences.items():
        if not np.isfinite(evidence.value):
            raise EngineError(
                f"the evidence of rank {rank} came out as {evidence.value}; check "
                "the data for extreme values and the prior shapes for very small ones"
            )
    columns: dict[str, Any] = {
        name: [getattr(fit.evidence, attribute, np.nan) for fit in fits]
        for name, attribute in (
            ("log_evidence", "value"),
            ("standard_error", "standard_error"),
            ("discretization_error", "discretization_error"),
        )
    }
    columns["seconds"] = [fit.seconds for fit in fits]
    attrs: dict[str, Any] = {"unit": "nats"}
    if evidences:
        tried = list(evidences)
        values, errors = (
            np.array([getattr(evidence, name) for evidence in evidences.values()])
            for name in ("value", "total_error")
        )
        top = int(values.argmax())
        best, close = tried[top], _close(tried, values, np.hypot(errors, errors[top]))
        doubt = _doubt(evidences, close, method, "all" if len(tried) == len(ranks) else "these")
        if any(evidence.bound for evidence in evidences.values()):
            attrs["bound"] = "lower"
    else:
        best, close, doubt = _compare(ranks, fits).best, [], ""
    attrs |= {"best": best, "not_distinguishable": close, "evidence_at": list(evidences)}
    if fits[0].scores is not None:
        scores = _compare(ranks, fits)
        columns |= {
            "held_out_log_score": scores.means,
            "held_out_standard_error": scores.errors,
            "held_out_difference_error": scores.paired_errors,
        }
        attrs |= {"best_held_out": scores.best, "held_out_not_distinguishable": scores.close}
        if len(evidences) < len(ranks) and best == scores.best:
            doubt = ""  # the scores name the same rank
    smallest = "smallest" if best == ranks[0] > 1 else ""
    end = "largest" if best == ranks[-1] else smallest  # the end of the ranks at which it is
    more = f"Rank {best} is the {end} that was tried; {end[:-2]}r ones may do better."
    attrs["at_edge"] = end
    attrs["decides"] = int(not doubt)  # NetCDF files have no booleans
    sentences = [_verdict(attrs, len(evidences) == len(ranks)), more if end else "", doubt]
    attrs["verdict"] = " ".join(filter(None, sentences))
    if doubt:
        warn(doubt, SamplingWarning)
    variables = {
        name: ("rank", np.asarray(column, dtype=float)) for name, column in columns.items()
    }
    return Ranks(variables, coords={"rank": ranks}, attrs=attrs)


class RankScores(NamedTuple):
    """Scores of all ranks: means, their errors, those of differences to the best, close ranks."""

    means: Vector
    errors: Vector
    paired_errors: Vector
    best: int
    close: list[int]


def _compare(ranks: list[int], fits: list[RankFit]) -> RankScores:
    """Compare the scores of ranks, all of which have some."""
    table = np.stack([fit.scores for fit in fits if fit.scores is not None])
    means = table.mean(axis=1)
    leader = int(means.argmax())
    paired = _error(table - table[leader])
    return RankScores(means, _error(table), paired, ranks[leader], _close(ranks, means, paired))


def _close(ranks: list[int], values: Vector, errors: Vector) -> list[int]:
    """Return the ranks whose value is within the error of a difference of the largest one."""
    top = int(values.argmax())
    near = values[top] - values <= SIGNIFICANT * errors
    return [rank for n, rank in enumerate(ranks) if near[n] and n != top]


def _doubt(
    evidences: dict[int, Evidence], close: list[int], method: EvidenceMethod, which: str
) -> str:
    """Return a warning where errors are as large as the differences between ranks, or ""."""
    values = [evidence.value for evidence in evidences.values()]
    span, several = max(values) - min(values), len(values) > 1
    worst = max(evidences.values(), key=lambda evidence: evidence.total_error)
    useless = [
        str(rank)
        for rank, evidence in evidences.items()
        if evidence.total_error > COARSE and SIGNIFICANT * evidence.total_error >= span
    ]
    advice = method.remedy(worst.discretization_error > worst.standard_error)
    size = (
        f"{worst.total_error:,.0f} nats, and the evidences of {which} ranks lie within {span:,.0f}"
    )
    if several and len(close) == len(values) - 1 and worst.total_error > COARSE:
        return (
            f"This does not decide between the ranks: errors are up to {size}. To decide, {advice}."
        )
    if several and useless:
        listed = ", ".join(useless)
        return f"The evidence of rank {listed} cannot be used: its error is up to {size}; {advice}."
    return ""


def _error(table: Vector) -> Vector:
    """Return standard errors of the means of rows, cells taken as independent."""
    return np.asarray(table.std(axis=1, ddof=1) / np.sqrt(table.shape[1]), dtype=np.float64)


def _verdict(attrs: dict[str, Any], everywhere: bool) -> str:
    """Return one sentence, or two where evidence and score disagree."""
    if not attrs["evidence_at"]:
        return (
            f"Cells left out are predicted best at rank {attrs['best']}, and clearly worse at all "
            "others, so no evidence was computed."
        )
    name = "lower bound of the evidence" if attrs.get("bound") else "evidence"
    text = f"The {name} is largest at rank {attrs['best']}"
    if attrs["not_distinguishable"]:
        others = ", ".join(map(str, attrs["not_distinguishable"]))
        text += f", from which its errors do not tell {others}"
    if not everywhere:
        which = ", ".join(map(str, attrs["evidence_at"]))
        text += f"; it was computed at {which} only: scores rule the others out, or it fell first"
    if "best_held_out" not in attrs:
        return text + "."
    leader = attrs["best_held_out"]
    if leader == attrs["best"]:
        return text + "; cells left out are predicted best at the same rank."
    text += f". Cells left out are predicted best at rank {leader}"
    if attrs["best"] in attrs["held_out_not_distinguishable"]:
        return f"{text}, though not clearly better."
    return (
        f"{text}, and clearly better. The evidence judges the model with its prior, the score its "
        "predictions alone: a prior that does not suit the data, or a law too narrow for them, "
        "parts the two."
    )
