"""What the diagnostics of a run come to: a table of numbers, and four lights over it."""

import math
import re
from os import PathLike
from typing import Any, Final

import dask
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor import markup
from daskfactor.checks import whole_number
from daskfactor.errors import OptionError
from daskfactor.models.settings import EFFECTIVE
from daskfactor.results.diagnose import (
    all_series,
    convergence,
    rhat_beyond_autocorrelation,
    trend,
)
from daskfactor.results.judged import INDENT, Judged
from daskfactor.results.particle_summary import particle_lights, particle_lines, particle_series
from daskfactor.results.predict import observed_law
from daskfactor.results.schema import BIASED, COARSE, MONITOR
from daskfactor.results.series import TITLES, Series, balanced_density
from daskfactor.results.summary_cache import CachedSummary, cached_at, cached_in
from daskfactor.results.trace import Run, Trace, as_tree, reads_here
from daskfactor.results.uncertainty import has_uncertainty, knows_variances, variances
from daskfactor.results.verdict import (
    BAD_RHAT,
    LIGHTS,
    RARE,
    Component,
    Facts,
    Light,
    Unsettled,
    error_of,
    lights_in,
    of_components,
    of_density,
    of_moments,
    of_observations,
    of_predictions,
    pooled_rhat,
    unsettled,
    with_unsettled,
)

Array = NDArray[np.float64]

SHOWN: Final = {
    "component": "sizes of components",
    "aligned": "sizes of components",
    "scale": "sizes of W and of H",
    "part": "sizes of W and of H",
    "learnt": "sampled hyperparameters",
    "density": "the log density",
    "balanced": "the log density",
}
"""Kinds of variables that the light over components goes by, too, in words."""
SCALED: Final = ("scale", "part", "density", "balanced")
"""Those that change with the scale of W and H, which `align` takes away."""
PRECISE: Final = ("scale", "part", "learnt")
"""Those whose Monte Carlo error counts; that of components is judged with them."""


NO_DRAWS: Final = Light("none", ("The run kept no draws.",), 'Keep draws: keep="draws".')


def _sentences(light: Light) -> list[str]:
    """What is said of a light, the advice last."""
    return [*light.reasons, *([f"→ {light.advice}"] if light.advice else [])]


class Summary(Judged):  # type: ignore[no-untyped-call]
    """What :func:`summarize` returns: four lights, and the numbers that they go by.

    Attributes
    ----------
    predictions
        Whether means and intervals of WH may be relied on, at the cells that the run monitored
        or at some others.
    observations
        Reliability of predicted observations, which are WH plus noise.
    components
        Whether single components are the same in all chains.
    log_density
        Whether the log density is at one level.
    """

    __slots__ = ()

    @property
    def predictions(self) -> Light:
        return self.lights["predictions"]

    @property
    def observations(self) -> Light:
        return self.lights["observations"]

    @property
    def components(self) -> Light:
        return self.lights["components"]

    @property
    def log_density(self) -> Light:
        return self.lights["log_density"]

    @property
    def lights(self) -> dict[str, Light]:
        """All four, by name."""
        return lights_in(self.attrs)

    @property
    def notes(self) -> list[str]:
        """What else is to be known."""
        return [line for line in self.attrs["notes"].split("\n") if line]

    @property
    def verdict(self) -> str:
        """The lights in words, each with what to do about it, and the notes."""
        lines = []
        for name, light in self.lights.items():
            first, *rest = _sentences(light)
            lines += [f"{LIGHTS[name]:<12} {light.status.upper():<6} {first}"]
            lines += [" " * INDENT + line for line in rest]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        table = self._table()
        if table is None:
            return super()._repr_html_()
        rows = [
            (title, markup.light(light.status), markup.Markup(markup.paragraphs(_sentences(light))))
            for (name, title), light in zip(LIGHTS.items(), self.lights.values(), strict=True)
        ]
        numbers = markup.collapsible("numbers", markup.verbatim(table))
        notes = markup.paragraphs(self.notes)
        return markup.titled("Summary", markup.table(rows), notes, numbers)

    def _table(self) -> str | None:
        if "notes" not in self.attrs:
            return None
        for name, others, lines in (
            ("mean", {"sd", "one_particle", "kind"}, particle_lines),
            ("rhat", {"ess_bulk", "ess_tail", "kind"}, _chain_lines),
        ):
            whole = {name, *others} <= set(self.variables)
            if whole and self[name].dims == ("functional",):
                return "\n".join(lines(self))
        return None


CELL: Final = re.compile(r"mu\[(\d+),(\d+)\]")
SURE: Final = 2.0
"""Standard errors of an R-hat that are taken for chance."""
CELLS: Final = 32
SEED: Final = 0


@reads_here
def summarize(trace: Trace, *, cells: int = CELLS, random_seed: int = SEED) -> Summary:
    r"""Judge a run: what of predictions, components and log density to rely on, and what to do.

    .. math:: \hat R = \sqrt{\frac{N-1}{N} + \frac{B}{W}}, \qquad
        {\rm ESS} = \frac{MN}{1 + 2 \sum_t \hat\rho_t}

    with within- and between-chain variances W and B of rank-normalised draws of split
    chains, so that one chain is enough. They are taken of numbers that mean the same in
    every draw: the log density, and of WH the mean, the norm, the largest singular
    values and some cells; the sums of W and H, whose scale the priors alone hold in
    place; hyperparameters that are drawn; and the size of each component (its mean
    contribution to WH), both in the order in which it was drawn and in that of :func:`align`.
    The verdict is one of the run as it was drawn: an aligned copy has the same.

    Of particles neither R-hat nor effective draws mean anything: told are their weighted
    mean and spread, how many carry weight, and whether they are one mode.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store; draws are read a few at a time.
        Without draws, monitored cells are judged by the means of chains, and the log density.
        A run that wrote a store was judged when it ended, and says what it said then as long as
        all of its draws are what they were.
    cells
        How many cells of WH to follow, drawn at random; among those monitored, if there are any.
    random_seed
        Seed of that choice: the same cells for the same seed.

    Returns
    -------
    Summary
        ``.predictions``, ``.observations``, ``.components`` and ``.log_density`` are lights:
        ``.status`` is "green", "amber", "red" or "none" (nothing to judge, or no way to), with
        ``.reasons``,
        ``.advice``, ``.numbers`` and ``.as_dict()``; ``.lights`` has them by name, ``.notes``
        what else is to be known, ``.verdict`` all in words, which ``print`` shows under the
        worst of each kind of number. It is a Dataset over ``functional`` with ``kind``, ``mean``,
        ``sd``, ``rhat``, ``ess_bulk``, ``ess_tail`` and, for aligned components, ``share``, of
        the draws in which the component appears, ``least_share``, of those of the chain that has
        it in the fewest, ``chains_with``, chains that have it in most, and ``agreement``, the
        least cosine of its means in the halves of all chains. Of particles:
        ``mean`` and ``sd`` by weight, ``one_particle``, the largest share of the variance
        that a single one makes, and ``share``; the attributes ``particles``,
        ``with_weight``, ``effective`` (1 / sum of squared weights), ``largest_weight``,
        ``alike`` (mass of particles with the same components), ``discrepancy`` and
        ``discrepancy_equal``, ``objective_min`` and ``objective_max``.

    Raises
    ------
    OptionError
        If the run has no draws at all.

    Notes
    -----
    Predictions are green if means of WH (at monitored cells, or at ``cells`` others) have a Monte
    Carlo error of 0.1 posterior standard deviations, root mean square, and R-hat is at most 1.01
    over all of them; red above 0.3 or 1.1 (Vehtari et al. 2021; Gelman and Rubin 1992). Lights
    over draws go by an R-hat of which the draws' own autocorrelation has been taken off; the table
    has the usual one. Observations are green if these means, by the distances of chains, are off
    by at most 0.07 standard deviations of an observation as :func:`predict` gives them, which
    pools the chains, also those that have settled apart; red above 0.3. One chain cannot show
    that others would end elsewhere: it is amber at best, unless the fit leaves no more of the data
    than noise (Poisson counts whose dispersion was left to the data, and is 1), which a chain in a
    worse mode does not. Components
    are red that a chain lacks, or that are not alike to a cosine of 0.8 in the halves of all
    chains; green from 0.95, if their sizes have an error up to 0.3. They are amber at best if
    sizes of components, of W or of H, a hyperparameter, or the log density because of them have
    not settled: R-hat of a variable above 1.05 (root mean square over its entries), or of one
    entry above 1.1. The log density is green up to an R-hat of 1.05, red above 1.1 or with a
    trend; sizes of W and H, which WH does not depend on, take no part in it where the model can
    tell. None of this sees the bias of a finite step, on
    which chains agree. Particles: Masood and Doshi-Velez, sections 4 and 7.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), chains=2, **run)
    >>> found = dfac.summarize(trace)
    >>> found.predictions.status in ("green", "amber", "red")
    True
    """
    whole_number("cells", cells, 0)
    if (cells, random_seed) != (CELLS, SEED):
        return compute_summary(as_tree(trace), cells, random_seed)
    if isinstance(trace, str | PathLike) and (found := cached_at(trace)) and found[1].summary:
        return Summary.from_dict(found[1].summary)
    tree = as_tree(trace)
    return cached_summary(cached_in(tree), tree)


def cached_summary(
    cache: CachedSummary | None, tree: xr.DataTree, aligned: xr.DataTree | None = None
) -> Summary:
    """Return the summary that a run has cached, or a new one; ``aligned``: the tree, if known."""
    if cache is not None and cache.summary is not None:
        return Summary.from_dict(cache.summary)
    return compute_summary(tree, aligned=aligned)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # draws may be anything
def compute_summary(
    tree: xr.DataTree,
    cells: int = CELLS,
    random_seed: int = SEED,
    aligned: xr.DataTree | None = None,
) -> Summary:
    """Return what `summarize` does, from the draws; ``aligned``: the tree, if known."""
    run = Run(tree)
    if run.is_particles:
        run = Run.of(tree, "a summary")
        series, columns, attrs = particle_series(run, cells, random_seed)
        return _told(series, columns, attrs, *particle_lights(columns, attrs))
    series, moved = all_series(tree, cells, random_seed, None, aligned)
    if not series:
        raise OptionError("this run has no draws yet, and a summary needs some; resume it first")
    found = np.array([convergence(one.values) for one in series])
    beyond = found.copy()
    # Of WH the mean square of many counts, to which chance adds little; others count by themselves.
    beyond[:, 0] = [
        rhat_beyond_autocorrelation(one.values, 0.0 if one.kind == "product" else SURE)
        for one in series
    ]
    columns = {
        "mean": [float(one.values.mean()) for one in series],
        "sd": [float(one.values.std()) for one in series],
        **dict(zip(("rhat", "ess_bulk", "ess_tail"), found.T, strict=True)),
        **{name: [getattr(one, name) for one in series] for name in OF_COMPONENTS},
    }
    facts = _facts(run, series[-1].values.shape)
    lights = _lights(run, series, beyond, facts)
    attrs = {"chains": facts.chains, "draws": facts.draws}
    return _told(series, columns, attrs, lights, _notes(run, series, facts, moved))


OF_COMPONENTS: Final = ("share", "least_share", "chains_with", "agreement")
"""Columns that only aligned components have."""


def _told(
    series: list[Series],
    columns: dict[str, Any],
    attrs: dict[str, Any],
    lights: dict[str, Light],
    notes: list[str],
) -> Summary:
    """A summary of one row for every functional, with lights over it."""
    judged = {
        f"{name}_{key}": value
        for name, light in lights.items()
        for key, value in light.as_dict().items()
    }
    return Summary(
        {name: ("functional", values) for name, values in columns.items()},
        coords={
            "functional": [one.name for one in series],
            "kind": ("functional", [one.kind for one in series]),
        },
        attrs=attrs | judged | {"notes": "\n".join(notes)},
    )


def _facts(run: Run, shape: tuple[int, ...]) -> Facts:
    """What of a run bears on what to do about it."""
    stats = run.stats
    return Facts(
        chains=int(shape[0]),
        draws=int(shape[1]),
        tune=int(run.attrs.get("tune") or 0),
        diverging=float(stats["diverging"].mean()) if "diverging" in stats else 0.0,
        by_hand=is_biased(run) and run.document("sampler").get("step", "auto") != "auto",
        asked_for=run.attrs.get("sampler_reason") == "as asked for",
        explained=_explained(run),
        starts=_starts(run),
    )


def _starts(run: Run) -> int | None:
    """Of how many starts each chain began with the best; None where there is no choice."""
    init = run.document("init")
    chosen = init.get("kind", "auto") in ("auto", "multiplicative")
    if not chosen or "multiplicative" not in getattr(run.model, "inits", ()):
        return None
    return int(init.get("starts", 1))


def _explained(run: Run) -> bool:
    """Whether counts were found to vary about the fit no more than Poisson's, having been asked.

    A dispersion that is left to the data is 1 then, and for no other reason.
    """
    return getattr(run.model, "dispersion", None) == "auto" and run.attrs.get("dispersion") == 1.0


def _lights(run: Run, series: list[Series], found: Array, facts: Facts) -> dict[str, Light]:
    """Judge the sides of a run of chains; ``found`` are R-hat and sizes of all series."""
    moving = told_trend(run.tree)
    kinds = [one.kind for one in series]
    at = kinds.index("balanced" if "balanced" in kinds else "density")
    log_density = of_density(
        float(found[at, 0]), moving, facts, within=lambda: _within([series[at].values])
    )
    # Chains that stand still have no trend, and have not come to rest.
    rising = moving is not None or math.isinf(found[at, 0])
    known = [n for n in _of_kind(series, "product") if not np.isnan(found[n]).any()]
    if run.has_draws:
        predictions = of_predictions(
            found[known, 0],
            found[known, 1:].min(axis=1),
            facts,
            rising=rising,
            within=lambda: _within([series[n].values for n in known]),
        )
    else:
        predictions = _of_monitored(run, facts)
    observations = _of_observations(run, series, found, facts, rising=rising)
    sound = predictions.status in ("green", "none") or predictions.alone
    components = with_unsettled(
        _of_components(run, series, found, facts, sound=sound),
        _unsettled(run, series, found, judged={at, *known}),
        facts,
        sound=sound,
    )
    return {
        "predictions": predictions,
        "observations": observations,
        "components": components,
        "log_density": log_density,
    }


def _of_observations(
    run: Run, series: list[Series], found: Array, facts: Facts, *, rising: bool
) -> Light:
    """Judge new observations of the cells that are followed."""
    places = {n: at for n, one in enumerate(series) if (at := CELL.fullmatch(one.name))}
    known = [n for n in places if not np.isnan(found[n]).any()]
    if not run.has_draws:
        return NO_DRAWS
    if run.model is not None and run.model.joins:
        return Light("none", ("Each of the matrices has a law of its own.",))
    if not places or not knows_variances(run, None):
        missing = "the uncertainties of cells" if places else "single cells"
        return Light("none", (f"Nothing is known of {missing}.",))
    if run.model is None or "dispersion" not in run.attrs:
        return Light("none", ("The run does not say its model.",))
    if not known:
        nothing = np.empty(0)
        return of_observations(nothing, nothing, nothing, facts, rising=rising)
    model, dispersion = observed_law(run)
    rows, columns = np.array([places[n].groups() for n in known], int).reshape(-1, 2).T
    drawn = np.array([series[n].values for n in known]).reshape(len(known), *series[0].values.shape)
    mean, variance = drawn.mean(axis=(1, 2)), drawn.var(axis=(1, 2))
    if has_uncertainty(run):
        cells = xr.DataArray(rows, dims="cell"), xr.DataArray(columns, dims="cell")
        dispersion = dispersion * variances(run, cells, None, mean).compute()
    elif np.ndim(dispersion):
        dispersion = dispersion[columns]
    sd = np.sqrt(model.likelihood.observation_variance(mean, variance, dispersion))
    error = np.sqrt(variance / np.maximum(found[known, 1:].min(axis=1), 1.0))
    half = drawn.shape[2] // 2
    halves = np.stack([drawn[:, 0, :half], drawn[:, 0, -half:]], axis=1)
    parts = halves if facts.chains == 1 else drawn
    sure = np.isfinite(sd) & (sd > 0)  # a cell of weight 0 was not observed
    if not sure.any():
        return Light("none", ("No cell that is followed has a finite uncertainty.",))
    means = parts[sure].mean(axis=2).T
    return of_observations(means, error[sure], sd[sure], facts, rising=rising)


def _of_kind(series: list[Series], *kinds: str) -> list[int]:
    """Positions of the series of some kinds; components as drawn stand for aligned ones."""
    left_out = _replaced({one.kind for one in series})
    return [n for n, one in enumerate(series) if one.kind in kinds and one.kind not in left_out]


def _replaced(kinds: set[str]) -> set[str]:
    """Kinds of numbers that nobody is to go by where there are others: components may move."""
    return {"component"} if "aligned" in kinds else set()


def _unsettled(run: Run, series: list[Series], found: Array, judged: set[int]) -> list[Unsettled]:
    """Find variables that have not settled, among those that no other light goes by."""
    scaled = () if run.model is not None and run.model.rotates else SCALED
    variables: dict[tuple[str, str], list[int]] = {}
    for n in set(_of_kind(series, *SHOWN)) - judged:
        variables.setdefault((series[n].kind, series[n].name.partition("[")[0]), []).append(n)
    each = []
    for (kind, _), at in sorted(variables.items()):
        ess = found[at, 1:].min(axis=1)
        error = error_of(ess[~np.isnan(ess)]) if kind in PRECISE else 0.0
        names = [series[n].name for n in at]
        each.append(unsettled(SHOWN[kind], names, found[at, 0], error, drawn=kind in scaled))
    return [one for one in each if one is not None]


def _within(values: list[Array]) -> float:
    """Pooled R-hat of the halves of single chains."""
    return pooled_rhat(
        np.array([rhat_beyond_autocorrelation(one[None]) for own in values for one in own])
    )


def _of_monitored(run: Run, facts: Facts) -> Light:
    if MONITOR not in run:
        said = "The run kept no draws and monitored no cells."
        return Light("none", (said,), 'Keep draws, keep="draws", or name cells with monitor=.')
    group = run.group(MONITOR)
    mean, var = (group[name].transpose("chain", "cell").values for name in ("mean", "var"))
    return of_moments(mean.astype(float), var.astype(float), group["count"].values, facts)


def _of_components(
    run: Run, series: list[Series], found: Array, facts: Facts, *, sound: bool
) -> Light:
    if run.model is not None and run.model.rotates:
        said = (
            f"Components of a {type(run.model).__name__} can be turned into each other without WH "
            "changing: single ones mean nothing, and are not judged."
        )
        return Light("none", (said,))
    known = [
        Component(
            series[n].name.removeprefix(series[n].kind)[1:-1],
            1.0 if math.isnan(series[n].share) else series[n].share,
            int(series[n].chains_with),
            series[n].agreement,
            float(np.sqrt(1.0 / max(found[n, 1:].min(), 1.0))),
        )
        for n in _of_kind(series, "component", "aligned")
    ]
    if not known:
        return NO_DRAWS
    return of_components(known, facts, sound=sound)


def _notes(run: Run, series: list[Series], facts: Facts, moved: bool) -> list[str]:
    """What else is to be known of a run of chains."""
    told = []
    if moved:
        told.append(
            "Read W and H through align(): as drawn, components change places, which WH does not "
            "depend on."
        )
    told += [
        _of_number(one.values, run.posterior.sizes.get("component"))
        for one in series
        if one.name == EFFECTIVE.name
    ]
    if facts.chains == 1:
        told.append("One chain cannot show that another would end elsewhere: four chains can.")
    if is_biased(run):
        told.append(
            "The bias of a finite step is not seen here: discretization_bias() estimates it."
        )
    if COARSE in run:
        told.append(
            "Draws are those of the fine chain, which has this bias; expectation() takes its first "
            "order off means with the coarse chain."
        )
    return told


def is_biased(run: Run) -> bool:
    """Whether the draws are off by what no diagnostic of convergence sees: a finite step."""
    if COARSE in run:  # the fine chain, whatever older runs say of themselves
        return True
    if BIASED in run.attrs:
        return bool(run.attrs[BIASED])
    # Runs of 0.1.0 do not say so; those without bias had acceptance or step 1.
    if "acceptance_rate" in run.stats or "step_size" not in run.stats:
        return False
    return bool((run.stats["step_size"] != 1.0).any())


def told_trend(tree: xr.DataTree) -> str | None:
    """Put a trend of the log density over the draws into words; None if there is none.

    One that sizes of W and H make, which WH does not depend on, is none.
    """
    run, spread = Run(tree), math.inf
    if "lp" not in run.stats:
        return None
    if run.model is not None and run.data:
        spread = run.model.density_spread(tuple(run.data["shape"]))
    with dask.config.set(scheduler="threads"):  # a client that is about may have no workers
        found = trend(run.stats["lp"].transpose("chain", "draw").values, spread)
        if found is not None and (balanced := balanced_density(tree)) is not None:
            found = trend(balanced, spread)
    if found is None:
        return None
    verb, size = "rose" if found.change > 0 else "fell", abs(found.change)
    return (
        f"the log density still {verb} by {size:.4g}, {size / found.sd:.1f} standard deviations, "
        "from the first to the last quarter of the draws"
    )


def sections_of(summary: xr.Dataset) -> pd.DataFrame:
    """The worst of each kind of functional, in the order in which the kinds come.

    Components as drawn, which may change places, are left out where there are aligned ones.

    Returns
    -------
    DataFrame
        With ``kind``; ``total``, how many there are; the largest ``rhat``, the smallest
        ``ess_bulk``, ``ess_tail`` and ``ess`` of both, NaN if nothing can be said of any;
        ``worst`` and ``slowest``, names of the one with the largest R-hat and of the one with
        the smallest size; ``apart``, of how many R-hat is above the bad one; ``rare``, how many
        components appear in fewer than half of the draws of some chain.
    """
    table = summary.to_dataframe()
    table = table[~table["kind"].isin(_replaced(set(table["kind"])))]
    table = table.assign(ess=table[["ess_bulk", "ess_tail"]].min(axis=1))
    table["apart"], table["rare"] = table["rhat"] > BAD_RHAT, table["least_share"] < RARE
    largest, smallest, counts = ["rhat"], ["ess_bulk", "ess_tail", "ess"], ["apart", "rare"]
    kinds = table.groupby("kind", sort=False)
    known = table[table["ess"].notna()].groupby("kind")
    names = {"worst": known["rhat"].idxmax(), "slowest": known["ess"].idxmin()}
    columns = [kinds[largest].max(), kinds[smallest].min(), kinds[counts].sum()]
    found = pd.concat([kinds.size().rename("total"), *columns], axis=1).assign(**names)
    return found.fillna({"worst": "-", "slowest": "-"}).reset_index()


def _chain_lines(summary: xr.Dataset) -> list[str]:
    """The print of a summary of chains: the worst of each kind of number."""
    chains, draws = summary.attrs["chains"], summary.attrs["draws"]
    rows = [
        f"{TITLES[str(part.kind)]:23}{part.rhat:7.3f}{part.ess_bulk:10.0f}{part.ess_tail:10.0f}"
        f"   {part.slowest}, {part.total}"
        for part in sections_of(summary).itertuples()
    ]
    head = f"{'':23}{'R-hat':>7}{'ESS bulk':>10}{'ESS tail':>10}   slowest of"
    return [f"{chains} chain{'s' if chains > 1 else ''} of {draws} draws", "", head, *rows]


def _of_number(values: Array, planned: int | None) -> str:
    """How many components the data support, draw by draw."""
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    among = (
        f"{middle:g}" if low == high else f"{middle:g} (in 90% of the draws {low:g} to {high:g})"
    )
    said = f"Components that the data support: {among}."
    if planned is not None and middle >= planned - 0.5:
        said += " That is all there are: more may be better."
    return said
