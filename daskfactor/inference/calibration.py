"""Simulation-based calibration: the verb ``calibrate``.

If (W, H) come from the prior and V from the law given them, then (W, H) and draws from the
posterior of V are exchangeable, so the rank of any function of (W, H) among its values at the
draws is uniform. A model, a sampler and the length of a run go wrong together or not at all.

Replications that share no row and no column have independent posteriors in one matrix, whose
other cells are missing. So one run draws for many of them at once.
"""

import json
import math
from typing import Any, Final, Literal, NamedTuple, Unpack

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.checks import is_number, whole_number
from daskfactor.data.sources import as_blocks
from daskfactor.errors import OptionError
from daskfactor.inference.base import Sampler, choose_kernel, requested_sampler
from daskfactor.inference.sampling import sample
from daskfactor.inference.setting import checked_lengths
from daskfactor.models.settings import FactorModel
from daskfactor.options import Running, verb
from daskfactor.progress import RunEvent, progress_bar
from daskfactor.random import Stream, generator, resolve_seed
from daskfactor.results.diagnose import addressed_cells, effective_size
from daskfactor.results.ranks import Uniformity, uniformity
from daskfactor.results.verdict_dataset import VerdictDataset
from daskfactor.runs.schema import BIASED, FEATURES

Array = NDArray[Any]

TOGETHER_BYTES: Final = 2**27
"""Largest size of kept draws of replications in one matrix."""
SLAB: Final = 2**22
"""Means of cells that are worked out at once."""
LEVELS: Final = (63, 31, 15, 7)
"""Draws that a rank may be among."""
APART: Final = 2.0
"""Draws between two that are ranked among, in units of the time they take to be independent."""
FEWEST: Final = 20.0
"""Independent draws below which their number itself is not known well enough."""
SOME: Final = 100
"""Replications that this time is estimated from."""
SIGNIFICANT: Final = 0.01
"""p value, over all quantities together, below which ranks are not uniform."""
SEEN_SHIFT, SEEN_SPREAD = 4.7, 3.7
"""Errors of a mean in sd, and of an sd in shares of it, that √N replications mostly show."""

CAUSES: Final = (
    "If twice the tuning does not help, sampler, prior and law do not go together.",
    "If half the step and twice the tuning do not help, sampler, prior and law do not go together.",
)
"""Likely causes, for a sampler without and with the bias of a finite step."""


class Calibration(VerdictDataset):  # type: ignore[no-untyped-call]
    """Ranks, their tests and a verdict; :func:`calibrate` returns it."""

    __slots__ = ()

    def _table(self) -> str | None:
        columns = ["levels", "ess", *Uniformity._fields]
        if not set(columns) <= set(self.data_vars):
            return None
        table = self[columns].to_dataframe().round(dict.fromkeys(columns, 4) | {"ess": 0})
        return str(table.to_string())


class Task(NamedTuple):
    """A calibration: a model of data of a shape, some of them hidden, at cells.

    ``moments`` are mean and variance that stand for those of the data in priors.
    """

    model: FactorModel
    shape: tuple[int, int]
    moments: tuple[float, float]
    missing: float
    cells: tuple[NDArray[np.int64], NDArray[np.int64]]


@verb
def calibrate(
    model: FactorModel,
    shape: tuple[int, int],
    sampler: Sampler | Literal["auto"] | None = "auto",
    *,
    replications: int = 200,
    draws: int = 500,
    tune: int = 500,
    missing: float = 0.0,
    moments: tuple[float, float] = (1.0, 1.0),
    cells: int = 4,
    together: int | Literal["auto"] = "auto",
    random_seed: int | None = None,
    blocks: int | None = None,
    **options: Unpack[Running],
) -> Calibration:
    """Check by simulation-based calibration that a sampler draws from the posterior of a model.

    Factors are drawn from the prior and data from the law given these, again and again, and
    the posterior of the data is sampled. Ranks of the true factors' functions among those
    of the draws are uniform if everything is right: law, prior, sampler, and the length of the
    run. Among the functions are the likelihood of the data, which sees what single
    cells do not, some cells of W H, the sums of W and of H and the largest entries of the rows
    and columns of these cells, whose scale the priors alone hold in place, and what the model
    learns. Draws are thinned until they are nearly independent.

    Parameters
    ----------
    model
        With a number for a dispersion that would be estimated, which has no prior. What is
        drawn with the factors (dispersions, rates, shapes, precisions, links) is drawn from its
        own prior. Only the level of a :class:`GaussianMF` has none that could be drawn from: it
        is the mean, and ranks under shifts of all data are the same.
    shape
        Rows and columns of the data, (I, J); small ones show most for the time.
    sampler
        As for :func:`sample`.
    replications
        How often data are drawn; with N of them errors of posterior means above 5/√N
        standard deviations mostly show.
    draws, tune
        As for :func:`sample`, of every replication.
    missing
        Share of cells that are hidden, anew in every replication.
    moments
        Mean and variance that priors go by which else go by those of the data, such as
        ``"auto"`` rates: of data from such a prior they would say what they should not know.
    cells
        How many cells of W H to rank; ``w[i]`` and ``h[j]`` are the largest entries, over
        components, of their rows of W and columns of H.
    together
        Replications that one run draws for, as blocks of one matrix without a row or a column
        in common; ``"auto"``: as many as there is memory for, 1 where a model
        has frozen components or learns what all rows and columns share.
    random_seed, blocks, options
        As for :func:`sample`.

    Returns
    -------
    Calibration
        A Dataset, the least uniform first, over ``quantity``: ``p``, by which the verdict
        goes, ``ecdf_p`` (of simultaneous bands around the ranks' distribution function),
        ``chi_square_p``, ``shift`` and ``spread`` (standard normal if all is right; positive
        where draws lie too low, and where they are too narrow), ``levels``, the number of
        draws that are ranked among, and ``ess``, what a replication's draws are worth; and
        ``rank`` (quantity, replication).
        ``print`` shows a table and the verdict, which is also ``.verdict``;
        `daskfactor.plots.calibration_plot` draws it.

    Raises
    ------
    ModelError, OptionError
        If the model has no prior of its own, or an option is not allowed.

    Notes
    -----
    Talts, Betancourt, Simpson, Vehtari and Gelman 2018, "Validating Bayesian inference
    algorithms with simulation-based calibration", algorithms 1 and 2. A step of finite size
    shows, too, with enough replications.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> model = dfac.TweedieNMF(1, rate_w=1.0, rate_h=1.0, dispersion=1.0)
    >>> run = {"draws": 50, "tune": 50, "random_seed": 0, "progressbar": False}
    >>> found = dfac.calibrate(model, (4, 3), dfac.Gibbs(), replications=20, **run)
    >>> found["rank"].dims
    ('quantity', 'replication')
    """
    requested = requested_sampler(model, sampler)
    replications = whole_number("replications", replications, 10)
    lengths = checked_lengths(requested, draws=draws, tune=tune)
    sizes = list(np.atleast_1d(np.asarray(shape, dtype=object)))
    if len(sizes) != 2:
        raise OptionError(f"shape must be two whole numbers, rows and columns, got {shape!r}")
    rows, cols = (whole_number("either number of shape", size, 1) for size in sizes)
    if not is_number(missing) or not 0 <= missing < 1:
        raise OptionError(f"missing must be a share of at least 0 and below 1, got {missing!r}")
    numbers = np.ravel(np.asarray(moments, dtype=object))
    if numbers.size != 2 or not all(map(is_number, numbers)) or not numbers[1] > 0:
        raise OptionError(f"moments must be a mean and a positive variance, got {moments!r}")
    seed = resolve_seed(random_seed)
    chosen = addressed_cells((rows, cols), whole_number("cells", cells, 0), seed)
    model = model.sized((rows, cols))
    with as_blocks(np.full((rows, cols), moments[0])) as like:
        # Where a sampler is requested, replications are the data that it must take.
        kernel = requested.kernel(model) if requested else choose_kernel(None, model, like)
    selected: Sampler = kernel.options
    if selected.dispersion is not None:
        model = model.with_dispersion(selected.dispersion)
    task = Task(model, (rows, cols), moments, missing, chosen)
    each = _together(task, together, replications, draws)
    counts = [each] * (replications // each) + [replications % each] * bool(replications % each)
    results, run = [], {**options, "callback": None, "progressbar": False}
    with progress_bar(options.get("progressbar", True), options.get("callback")) as on_event:
        for number, count in enumerate(counts):
            rng = generator(seed, number, Stream.SIMULATION)
            run |= {"random_seed": int(rng.integers(2**63))}
            run |= {"callback": on_event if len(counts) == 1 else None}
            results.append(_replicate(task, selected, count, blocks, rng, run | lengths))
            on_event(RunEvent("replications", sum(counts[: number + 1]), replications))
    about = {
        "model": json.dumps(model.to_dict()),
        "sampler": json.dumps(selected.to_dict()),
        "missing": missing,
        "random_seed": str(seed),
        BIASED: int(selected.biased),
    }
    values = {name: np.concatenate([one[name] for one in results], axis=1) for name in results[0]}
    return _judge(values, lengths | about)


def _together(task: Task, together: Any, replications: int, draws: int) -> int:
    """Return how many replications share a run."""
    rng = np.random.default_rng(0)
    alone = task.model.draw_prior(rng, task.shape, *task.moments)  # refuses a model without a prior
    # Dispersions of columns have a prior that all of them share; rates of rows have not.
    names = (item.name for item in task.model.learnt if item.dims in (("row",), ("column",)))
    local = {name for name in names if name != "dispersion"}
    joined = local.issuperset(alone.learnt)
    joined &= (*task.model.fixed, *task.model.covariates) == (None,) * 4
    if together != "auto":
        requested = whole_number("together", together, 1)
        if requested > 1 and not joined:
            raise OptionError(
                f"together={requested} puts replications into one matrix, and this model has "
                "hyperparameters or frozen components that all rows share; leave it out"
            )
        return min(requested, replications)
    each = 4 * draws * sum(task.shape) * task.model.width
    return min(replications, max(1, TOGETHER_BYTES // each)) if joined else 1


def _replicate(
    task: Task,
    sampler: Sampler,
    count: int,
    blocks: int | None,
    rng: np.random.Generator,
    run: dict[str, Any],
) -> dict[str, Array]:
    """Return quantities at the draws of one run and, last, at the truth: (draws + 1, count)."""
    rows, cols = task.shape
    true = task.model.draw_prior(rng, (rows * count, cols * count), *task.moments)
    mu = _means(true.W[None], true.H[None], count)[0]
    V = task.model.likelihood.sample(rng, mu, true.dispersion)
    observed = rng.random(V.shape) >= task.missing
    observed[:, 0, 0] |= ~observed.any(axis=(1, 2))  # not all of a replication is hidden
    V = np.where(observed, V, np.nan)
    matrix = V[0] if count == 1 else block_diagonal(V)
    unstored = "missing" if count > 1 else None
    with as_blocks(matrix, blocks, unstored=unstored, allow_empty=True) as data:
        data.mean, data.variance = task.moments
        tree = sample(data, task.model, sampler, keep="draws", **run)
    posterior = tree["posterior"].to_dataset()
    W, H = (
        np.concatenate([posterior[name].values[0], true_factor[None]])
        for name, true_factor in (("W", true.W), ("H", true.H))
    )
    learnt = {
        name: np.concatenate([posterior[name].values[0], np.asarray(value)[None]])
        for name, value in true.learnt.items()
    }
    quantities = _quantities(task, W, H, V, learnt.get("noise", learnt.get("dispersion")))
    links = {variable.name for variable in task.model.learnt if set(variable.dims) & set(FEATURES)}
    for name, values in learnt.items():  # components have no order: the mean over them
        if name in links:  # nor a sign
            values = values**2
        quantities[name] = np.nanmean(values.reshape(len(W), -1, count), axis=1)
    return quantities


def block_diagonal(V: Array) -> Any:
    """Put matrices V (count, I, J), NaN where missing, into a sparse one that stores what is not.

    Row r of each comes before row r + 1 of any, and columns likewise, so that bands cut
    through every one of them as they would through a single one.
    """
    count, rows, cols = V.shape
    each, row, col = np.nonzero(~np.isnan(V))
    where = row * count + each, col * count + each
    stored = V[each, row, col]
    return sparse.coo_array((stored, where), shape=(rows * count, cols * count)).tocsr()


def _means(W: Array, H: Array, count: int) -> Array:
    """Return WH of every replication, (draw, count, I, J)."""
    W = W.reshape(len(W), -1, count, W.shape[-1])
    H = H.reshape(len(H), H.shape[1], -1, count)
    return np.asarray(np.einsum("dick,dkjc->dcij", W, H, optimize=True))


def _fits(task: Task, V: Array, mu: Array, dispersions: Array | None) -> Array:
    """Return log p(V | μ) of every draw and replication; but for a constant if that is one."""
    law = task.model.likelihood
    with np.errstate(all="ignore"):
        if dispersions is None:
            fits = -law.deviance(V, mu)
        else:
            pairs = zip(mu, dispersions, strict=True)
            fits = np.array([law.log_density(V, one, dispersion) for one, dispersion in pairs])
    return np.asarray(np.where(np.isnan(V), 0.0, fits).sum(axis=(2, 3)))


def _quantities(
    task: Task, W: Array, H: Array, V: Array, dispersions: Array | None
) -> dict[str, Array]:
    """Return what is ranked at draws of W (draw, row, k) and of H: (draw, replication) each.

    ``dispersions`` are those of the draws, (draw,) or (draw, column), if they are drawn.
    """
    count, (rows, cols), K = len(V), task.cells, task.model.n_components
    step, parts = max(1, SLAB // V.size), []
    for start in range(0, len(W), step):
        some = slice(start, start + step)
        mu = _means(W[some], H[some], count)
        fits = _fits(task, V, mu, None if dispersions is None else dispersions[some])
        parts.append(np.concatenate([fits[..., None], mu[:, :, rows, cols]], axis=2))
    cells = [f"mu[{i},{j}]" for i, j in zip(rows, cols, strict=True)]
    values = np.moveaxis(np.concatenate(parts), 2, 0)
    quantities = dict(zip(("log_likelihood", *cells), values, strict=True))
    for name, factor, at in ("w", W[..., :K], rows), ("h", np.swapaxes(H[:, :K], 1, 2), cols):
        sizes = np.abs(factor).reshape(len(W), -1, count, K)
        quantities[f"{name}_sum"] = sizes.sum(axis=(1, 3))
        quantities |= {f"{name}[{i}]": sizes[:, i].max(axis=2) for i in np.unique(at)}
    return quantities


def _judge(values: dict[str, Array], attrs: dict[str, Any]) -> Calibration:
    """Rank, test, sort and put into words."""
    rows, ranks = [], []
    for one in values.values():
        drawn, true = one[:-1], one[-1]
        # The mean over replications of the time that draws take to be independent.
        some = drawn.T[:: math.ceil(len(true) / SOME)]
        ess = 1 / float(np.mean([1 / effective_size(series[None]) for series in some]))
        levels = next(n for n in LEVELS if APART * n <= ess) if ess >= FEWEST else 0
        at = np.arange(1, levels + 1) * len(drawn) // max(levels, 1) - 1
        ranks.append((drawn[at] < true).sum(axis=0))
        tested = uniformity(ranks[-1], levels) if levels else [math.nan] * len(Uniformity._fields)
        rows.append((levels, ess, *tested))
    columns = ("levels", "ess", *Uniformity._fields)
    table = dict(zip(columns, np.array(rows).T, strict=True))
    order = np.argsort(table["p"], kind="stable")  # NaN last
    made: dict[str, Any] = {name: ("quantity", column[order]) for name, column in table.items()}
    made["rank"] = (("quantity", "replication"), np.array(ranks)[order])
    result = Calibration(made, {"quantity": np.array(list(values))[order]}, attrs)
    result["levels"] = result["levels"].astype(np.int64)
    result.attrs["replications"] = result.sizes["replication"]
    p = result["p"].dropna("quantity").values
    result.attrs["calibrated"] = int(p.size > 0 and p.min() * p.size >= SIGNIFICANT)
    result.attrs["verdict"] = " ".join(_sentences(result))
    return result


def _sentences(result: Calibration) -> list[str]:
    tested, count = result.dropna("quantity", subset=["p"]), result.attrs["replications"]
    slow = [str(name) for name in result["quantity"].values if name not in tested["quantity"]]
    sentences = []
    if tested.sizes["quantity"]:
        worst = tested.isel(quantity=0)
        name, p = str(worst["quantity"].values), float(worst["p"])
        if result.attrs["calibrated"]:
            sentences.append(
                f"CALIBRATED as far as {count} replications tell: ranks are as uniform as chance "
                f"leaves them (smallest p {p:.2g}, of {name}, among {tested.sizes['quantity']} "
                "quantities). Posterior means that are wrong by "
                f"{SEEN_SHIFT / math.sqrt(count):.2g} standard deviations, or standard deviations "
                f"wrong by {SEEN_SPREAD / math.sqrt(count):.0%}, would mostly have shown."
            )
        else:
            sentences.append(
                f"NOT CALIBRATED: the ranks of {name} are not uniform (p {p:.2g}, "
                f"{tested.sizes['quantity']} quantities tested): its draws {_how(worst)}. "
                f"{CAUSES[result.attrs[BIASED]]}"
            )
    if slow:
        sentences.append(
            f"Nothing can be said of {', '.join(slow)}: the draws of a replication are worth "
            f"fewer than {FEWEST:.0f} independent ones; draw more."
        )
    return sentences


def _how(worst: xr.Dataset) -> str:
    """Describe how the draws are wrong."""
    shift, spread = float(worst["shift"]), float(worst["spread"])
    lies = f"lie too {'low' if shift > 0 else 'high'}"
    wide = f"are too {'narrow' if spread > 0 else 'wide'}"
    if min(abs(shift), abs(spread)) > 3:
        return f"{lies} and {wide}"
    return lies if abs(shift) > abs(spread) else wide
