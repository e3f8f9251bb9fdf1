"""Summary of a run: a table of diagnostics and four lights that judge them."""

import math
import re
from importlib import import_module
from os import PathLike
from typing import Any, Final, NamedTuple

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
    Convergence,
    all_series,
    convergence,
    rhat_beyond_autocorrelation,
    trend,
)
from daskfactor.results.series import TITLES, Series, balanced_density
from daskfactor.results.summary_cache import CachedSummary, cached_at, cached_in
from daskfactor.results.uncertainty import has_uncertainty, knows_variances, variances
from daskfactor.results.verdict import (
    BAD_RHAT,
    LIGHTS,
    MIN_SHARE,
    Component,
    Facts,
    Light,
    Unconverged,
    check_convergence,
    components_light,
    density_light,
    error_of,
    lights_in,
    moments_light,
    observations_light,
    pooled_rhat,
    predictions_light,
    with_unconverged,
)
from daskfactor.results.verdict_dataset import INDENT, VerdictDataset
from daskfactor.runs.schema import BIASED, COARSE, MONITOR
from daskfactor.runs.trace import Run, Trace, as_tree, reads_in_threads

Array = NDArray[np.float64]

VARIABLES: Final = {
    "component": "sizes of components",
    "aligned": "sizes of components",
    "scale": "sizes of W and of H",
    "part": "sizes of W and of H",
    "learnt": "sampled hyperparameters",
    "density": "the log density",
    "balanced": "the log density",
}
"""Kinds of variables whose convergence the light of components includes, in words."""
SCALED: Final = ("scale", "part", "density", "balanced")
"""Kinds that change with the scale of W and H, which `align` removes."""
PRECISE: Final = ("scale", "part", "learnt")
"""Kinds whose Monte Carlo error counts; that of components has its own criterion."""

NO_DRAWS: Final = Light("none", ("The run stored no draws.",), 'Store draws: keep="draws".')


def _light_of(name: str) -> Any:
    return property(lambda summary: summary.lights[name], doc=f"Light of the {LIGHTS[name]}.")


class Summary(VerdictDataset):  # type: ignore[no-untyped-call]
    """Result of :func:`summarize`: four lights and the diagnostics that determine them.

    Attributes
    ----------
    predictions
        Reliability of means and intervals of WH, at monitored cells or at cells drawn at random.
    observations
        Reliability of predicted observations, which are WH plus noise.
    components
        Agreement of single components between chains.
    log_density
        Stationarity of the log density.
    """

    __slots__ = ()

    predictions = _light_of("predictions")
    observations = _light_of("observations")
    components = _light_of("components")
    log_density = _light_of("log_density")

    @property
    def lights(self) -> dict[str, Light]:
        """All four lights, by name."""
        return lights_in(self.attrs)

    @property
    def notes(self) -> list[str]:
        """Further sentences on the run."""
        return [line for line in self.attrs["notes"].split("\n") if line]

    @property
    def verdict(self) -> str:
        """Lights with their reasons and advice, and the notes, as text."""
        lines = []
        for name, light in self.lights.items():
            first, *rest = light.sentences()
            lines += [f"{LIGHTS[name]:<12} {light.status.upper():<6} {first}"]
            lines += [" " * INDENT + line for line in rest]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        table = self._table()
        if table is None:
            return super()._repr_html_()
        rows = [
            (title, markup.light(light.status), markup.Markup(markup.paragraphs(light.sentences())))
            for (name, title), light in zip(LIGHTS.items(), self.lights.values(), strict=True)
        ]
        numbers = markup.collapsible("numbers", markup.verbatim(table))
        notes = markup.paragraphs(self.notes)
        return markup.titled("Summary", markup.table(rows), notes, numbers)

    def _table(self) -> str | None:
        is_particles = "one_particle" in self.variables
        names = ("mean", "sd", "one_particle") if is_particles else ("rhat", "ess_bulk", "ess_tail")
        complete = {*names, "kind"} <= set(self.variables) and "notes" in self.attrs
        if not complete or self[names[0]].dims != ("functional",):
            return None
        lines = of_particles().particle_lines if is_particles else _chain_lines
        return "\n".join(lines(self))


CELL: Final = re.compile(r"mu\[(\d+),(\d+)\]")
CHANCE_ERRORS: Final = 2.0
"""Standard errors of an R-hat that may be chance."""
CELLS: Final = 32
SEED: Final = 0


def of_particles() -> Any:
    """Return the module that summarizes particles, which the core imports only for these."""
    return import_module("daskfactor.stein.particle_summary")


@reads_in_threads
def summarize(trace: Trace, *, cells: int = CELLS, random_seed: int = SEED) -> Summary:
    r"""Judge whether predictions, components and log density of a run are reliable.

    .. math:: \hat R = \sqrt{\frac{N-1}{N} + \frac{B}{W}}, \qquad
        {\rm ESS} = \frac{MN}{1 + 2 \sum_t \hat\rho_t}

    with within- and between-chain variances W and B of rank-normalised draws of split
    chains, so that one chain is enough. They are computed for the log density; the mean, the
    norm, the largest singular values and some cells of WH; the sums of W and H, whose scale
    only the priors determine; sampled hyperparameters; and the size of each component (its mean
    contribution to WH), both in the order of the draws and in that of :func:`align`.
    An aligned copy of a run has the same verdict.

    R-hat and effective sample size do not apply to particles: their summary has the weighted mean
    and standard deviation, the number of particles with weight, and whether they are in one mode.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store; draws are read a few at a time.
        Without draws, the log density and the means of monitored cells are judged.
        A store has the summary of the finished run, which is returned as long as the draws
        have not changed.
    cells
        Number of cells of WH to include, drawn at random from the monitored cells, or from all.
    random_seed
        Seed of the choice of cells.

    Returns
    -------
    Summary
        ``.predictions``, ``.observations``, ``.components`` and ``.log_density`` are lights:
        ``.status`` is "green", "amber", "red" or "none" (not judged), with ``.reasons``,
        ``.advice``, ``.numbers`` and ``.as_dict()``; ``.lights`` has them by name, ``.notes``
        further sentences, ``.verdict`` the full text, which ``print`` shows below the worst
        diagnostics of each kind. It is a Dataset over ``functional`` with ``kind``, ``mean``,
        ``sd``, ``rhat``, ``ess_bulk``, ``ess_tail`` and, for aligned components, ``share`` (of
        the draws in which the component appears), ``least_share`` (the smallest such share of
        any chain), ``chains_with`` (number of chains that have it in half of their draws or
        more) and ``agreement`` (least cosine similarity of its means in the halves of all
        chains). For particles: weighted ``mean`` and ``sd``, ``one_particle`` (largest share
        of the variance that is due to one particle) and ``share``; and the attributes
        ``particles``, ``with_weight``, ``effective`` (1 / sum of squared weights),
        ``largest_weight``, ``alike`` (mass of particles with the same components),
        ``discrepancy``, ``discrepancy_equal``, ``objective_min`` and ``objective_max``.

    Raises
    ------
    OptionError
        If the run has no draws.

    Notes
    -----
    Predictions: green if the root mean square Monte Carlo error of means of WH is at most 0.1
    posterior standard deviations and their pooled R-hat at most 1.01; red above 0.3 or 1.1
    (Vehtari et al. 2021; Gelman and Rubin 1992). The lights use an R-hat that is corrected for
    the autocorrelation of the draws; the table has the usual one.

    Observations: green if the error of these means, by the differences between chains, is at
    most 0.07 standard deviations of an observation, as :func:`predict` computes them from all
    chains; red above 0.3.

    Components: red if a chain lacks one, or if the cosine similarity of its means in the halves
    of all chains is below 0.8; green from 0.95, if the error of their sizes is at most 0.3. They
    are at best amber if a variable has not converged (sizes of components, of W or of H,
    hyperparameters, or the log density because of these): R-hat above 1.05 (root mean square
    over its entries), or above 1.1 for one entry.

    Log density: green up to an R-hat of 1.05; red above 1.1 or with a trend. The scale of W and
    H, on which WH does not depend, is excluded if the model allows it.

    One chain cannot show whether others would reach another mode. It is at best amber, unless
    the residuals are no larger than Poisson noise (counts with an estimated dispersion of 1),
    which a chain in an inferior mode does not achieve. These diagnostics do not show the bias of
    a finite step, which all chains share. Particles: Masood and Doshi-Velez, sections 4 and 7.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), chains=2, **run)
    >>> summary = dfac.summarize(trace)
    >>> summary.predictions.status in ("green", "amber", "red")
    True
    """
    whole_number("cells", cells, 0)
    if (cells, random_seed) != (CELLS, SEED):
        return compute_summary(as_tree(trace), cells, random_seed)
    if isinstance(trace, str | PathLike) and (hit := cached_at(trace)) and hit[1].summary:
        return Summary.from_dict(hit[1].summary)
    tree = as_tree(trace)
    return cached_summary(cached_in(tree), tree)


def cached_summary(
    cache: CachedSummary | None, tree: xr.DataTree, aligned: xr.DataTree | None = None
) -> Summary:
    """Return the cached summary of a run, or a new one; ``aligned`` is the aligned tree, if any."""
    if cache is not None and cache.summary is not None:
        return Summary.from_dict(cache.summary)
    return compute_summary(tree, aligned=aligned)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # draws may have any values
def compute_summary(
    tree: xr.DataTree,
    cells: int = CELLS,
    random_seed: int = SEED,
    aligned: xr.DataTree | None = None,
) -> Summary:
    """Return the summary of the draws of a run; ``aligned`` is the aligned tree, if any."""
    run = Run(tree)
    if run.is_particles:
        run = Run.of(tree, "a summary")
        series, columns, attrs = of_particles().particle_series(run, cells, random_seed)
        return _assemble(series, columns, attrs, *of_particles().particle_lights(columns, attrs))
    series, moved = all_series(tree, cells, random_seed, None, aligned)
    if not series:
        raise OptionError("the run has no draws yet; resume it before summarize")
    diagnostics = [convergence(one.values) for one in series]
    columns = {
        "mean": [float(one.values.mean()) for one in series],
        "sd": [float(one.values.std()) for one in series],
        **dict(zip(Convergence._fields, np.transpose(diagnostics), strict=True)),
        **{name: [getattr(one, name) for one in series] for name in COMPONENT_COLUMNS},
    }
    quantities = [Quantity.of(*pair) for pair in zip(series, diagnostics, strict=True)]
    facts = _facts(run, series[-1].values.shape)
    lights = _lights(run, _without_replaced(quantities), facts)
    attrs = {"chains": facts.chains, "draws": facts.draws}
    return _assemble(series, columns, attrs, lights, _notes(run, series, facts, moved))


class Quantity(NamedTuple):
    """Series with the diagnostics that the lights use.

    Attributes
    ----------
    series
        The series.
    rhat
        R-hat beyond autocorrelation.
    ess
        Smaller one of the effective sample sizes of centre and tails.
    """

    series: Series
    rhat: float
    ess: float

    @classmethod
    def of(cls, series: Series, diagnostics: Convergence) -> "Quantity":
        """Return a series with its diagnostics."""
        # R-hat of WH is pooled over many entries, so that chance adds little; others count singly.
        errors = 0.0 if series.kind == "product" else CHANCE_ERRORS
        rhat = rhat_beyond_autocorrelation(series.values, errors)
        return cls(series, rhat, float(np.min(diagnostics[1:])))

    @property
    def is_valid(self) -> bool:
        """True if the draws can be judged."""
        return not (math.isnan(self.rhat) or math.isnan(self.ess))


COMPONENT_COLUMNS: Final = ("share", "least_share", "chains_with", "agreement")
"""Columns of aligned components only."""


def _assemble(
    series: list[Series],
    columns: dict[str, Any],
    attrs: dict[str, Any],
    lights: dict[str, Light],
    notes: list[str],
) -> Summary:
    """Return a summary with a row for each functional, the lights and the notes."""
    light_attrs = {
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
        attrs=attrs | light_attrs | {"notes": "\n".join(notes)},
    )


def _facts(run: Run, shape: tuple[int, ...]) -> Facts:
    """Return the properties of a run that determine the advice."""
    stats = run.stats
    return Facts(
        chains=int(shape[0]),
        draws=int(shape[1]),
        tune=int(run.attrs.get("tune") or 0),
        diverging=float(stats["diverging"].mean()) if "diverging" in stats else 0.0,
        fixed_step=is_biased(run) and run.document("sampler").get("step", "auto") != "auto",
        fixed_sampler=run.attrs.get("sampler_reason") == "as asked for",
        explained=_explained(run),
        starts=_starts(run),
    )


def _starts(run: Run) -> int | None:
    """Return the number of starts of each chain; None if it cannot be chosen."""
    init = run.document("init")
    chosen = init.get("kind", "auto") in ("auto", "multiplicative")
    if not chosen or "multiplicative" not in getattr(run.model, "inits", ()):
        return None
    return int(init.get("starts", 1))


def _explained(run: Run) -> bool:
    """Return True if the residuals of counts are no larger than Poisson noise, as estimated.

    An estimated dispersion is exactly 1 only in this case.
    """
    return getattr(run.model, "dispersion", None) == "auto" and run.attrs.get("dispersion") == 1.0


def _lights(run: Run, quantities: list[Quantity], facts: Facts) -> dict[str, Light]:
    """Return the lights of chains."""
    moving = describe_trend(run.tree)
    density = _of_kind(quantities, "balanced") or _of_kind(quantities, "density")
    log_density = density_light(density[0].rhat, moving, facts, within=lambda: _within(density[:1]))
    # Constant chains have no trend, but have not converged either.
    rising = moving is not None or math.isinf(density[0].rhat)
    valid = [one for one in _of_kind(quantities, "product") if one.is_valid]
    if run.has_draws:
        predictions = predictions_light(
            np.array([one.rhat for one in valid]),
            np.array([one.ess for one in valid]),
            facts,
            rising=rising,
            within=lambda: _within(valid),
        )
    else:
        predictions = _monitored_light(run, facts)
    sound = predictions.status in ("green", "none") or predictions.alone
    components = with_unconverged(
        _components_light(run, quantities, facts, sound=sound),
        _unconverged(run, [one for one in quantities if one is not density[0]]),
        facts,
        sound=sound,
    )
    observations = _observations_light(run, quantities, facts, rising=rising)
    lights = predictions, observations, components, log_density
    return dict(zip(LIGHTS, lights, strict=True))


def _observations_light(
    run: Run, quantities: list[Quantity], facts: Facts, *, rising: bool
) -> Light:
    """Return the light of predicted observations at the cells of the summary."""
    cells = [(one, at) for one in quantities if (at := CELL.fullmatch(one.series.name))]
    valid = [(one, at.groups()) for one, at in cells if one.is_valid]
    if not run.has_draws:
        return NO_DRAWS
    if run.model is not None and run.model.joins:
        return Light("none", ("Not judged for several matrices: each has its own likelihood.",))
    if not cells or not knows_variances(run, None):
        missing = "uncertainties of the cells" if cells else "single cells"
        return Light("none", (f"The run has no {missing}.",))
    if run.model is None or "dispersion" not in run.attrs:
        return Light("none", ("The run does not record its model.",))
    if not valid:
        nothing = np.empty(0)
        return observations_light(nothing, nothing, nothing, facts, rising=rising)
    model, dispersion = run.law
    rows, columns = np.array([place for _, place in valid], int).T
    drawn = np.array([one.series.values for one, _ in valid])
    mean, variance = drawn.mean(axis=(1, 2)), drawn.var(axis=(1, 2))
    if has_uncertainty(run):
        places = xr.DataArray(rows, dims="cell"), xr.DataArray(columns, dims="cell")
        dispersion = dispersion * variances(run, places, None, mean).compute()
    elif np.ndim(dispersion):
        dispersion = dispersion[columns]
    sd = np.sqrt(model.likelihood.observation_variance(mean, variance, dispersion))
    error = np.sqrt(variance / np.maximum([one.ess for one, _ in valid], 1.0))
    half = drawn.shape[2] // 2
    halves = np.stack([drawn[:, 0, :half], drawn[:, 0, -half:]], axis=1)
    parts = halves if facts.chains == 1 else drawn
    sure = np.isfinite(sd) & (sd > 0)  # sd is infinite at weight 0: not observed
    if not sure.any():
        return Light("none", ("No cell of the summary has a finite uncertainty.",))
    means = parts[sure].mean(axis=2).T
    return observations_light(means, error[sure], sd[sure], facts, rising=rising)


def _of_kind(quantities: list[Quantity], *kinds: str) -> list[Quantity]:
    return [one for one in quantities if one.series.kind in kinds]


def _without_replaced(quantities: list[Quantity]) -> list[Quantity]:
    """Leave out series that others replace."""
    replaced = _replaced({one.series.kind for one in quantities})
    return [one for one in quantities if one.series.kind not in replaced]


def _replaced(kinds: set[str]) -> set[str]:
    """Return kinds that others replace: unaligned components may swap between draws."""
    return {"component"} if "aligned" in kinds else set()


def _unconverged(run: Run, quantities: list[Quantity]) -> list[Unconverged]:
    """Return variables that have not converged."""
    scaled = () if run.model is not None and run.model.rotates else SCALED
    variables: dict[tuple[str, str], list[Quantity]] = {}
    for one in _of_kind(quantities, *VARIABLES):
        variables.setdefault((one.series.kind, one.series.name.partition("[")[0]), []).append(one)
    each = []
    for (kind, _), entries in sorted(variables.items()):
        ess = np.array([one.ess for one in entries])
        error = error_of(ess[~np.isnan(ess)]) if kind in PRECISE else 0.0
        names, rhat = [one.series.name for one in entries], np.array([one.rhat for one in entries])
        each.append(check_convergence(VARIABLES[kind], names, rhat, error, drawn=kind in scaled))
    return [one for one in each if one is not None]


def _within(quantities: list[Quantity]) -> float:
    """Return the pooled R-hat of the halves of single chains."""
    chains = [chain[None] for one in quantities for chain in one.series.values]
    return pooled_rhat(np.array([rhat_beyond_autocorrelation(chain) for chain in chains]))


def _monitored_light(run: Run, facts: Facts) -> Light:
    if MONITOR not in run:
        reason = "The run stored no draws and monitored no cells."
        return Light("none", (reason,), 'Store draws, keep="draws", or name cells with monitor=.')
    group = run.group(MONITOR)
    mean, var = (group[name].transpose("chain", "cell").values for name in ("mean", "var"))
    return moments_light(mean.astype(float), var.astype(float), group["count"].values, facts)


def _components_light(run: Run, quantities: list[Quantity], facts: Facts, *, sound: bool) -> Light:
    if run.model is not None and run.model.rotates:
        reason = (
            f"Components of {type(run.model).__name__} are not identified: a rotation leaves WH "
            "unchanged, so that single components have no meaning."
        )
        return Light("none", (reason,))
    components = [
        Component(
            series.name.removeprefix(series.kind)[1:-1],
            1.0 if math.isnan(series.share) else series.share,
            int(series.chains_with),
            series.agreement,
            float(np.sqrt(1.0 / max(ess, 1.0))),
        )
        for series, _, ess in _of_kind(quantities, "component", "aligned")
    ]
    if not components:
        return NO_DRAWS
    return components_light(components, facts, sound=sound)


def _notes(run: Run, series: list[Series], facts: Facts, moved: bool) -> list[str]:
    """Return further sentences on a run of chains."""
    notes = []
    if moved:
        notes.append(
            "Read W and H through align(): components swap places between draws, which does not "
            "affect WH."
        )
    notes += [
        _supported_components(one.values, run.posterior.sizes.get("component"))
        for one in series
        if one.name == EFFECTIVE.name
    ]
    if facts.chains == 1:
        notes.append("One chain cannot show whether others would reach another mode; run four.")
    if is_biased(run):
        notes.append(
            "These diagnostics do not show the bias of a finite step: discretization_bias() "
            "estimates it."
        )
    if COARSE in run:
        notes.append(
            "The draws are those of the fine chain, which has this bias; expectation() removes its "
            "first order from means with the coarse chain."
        )
    return notes


def is_biased(run: Run) -> bool:
    """Return True if a finite step biases the draws, which convergence diagnostics do not show."""
    if COARSE in run:  # the fine chain is biased, also if an old run says otherwise
        return True
    if BIASED in run.attrs:
        return bool(run.attrs[BIASED])
    # Runs of 0.1.0 do not record it; unbiased ones have an acceptance rate or step 1.
    if "acceptance_rate" in run.stats or "step_size" not in run.stats:
        return False
    return bool((run.stats["step_size"] != 1.0).any())


def describe_trend(tree: xr.DataTree) -> str | None:
    """Return a description of the trend of the log density; None if there is none.

    A trend that is due to the scale of W and H is ignored, since WH does not depend on it.
    """
    run, spread = Run(tree), math.inf
    if "lp" not in run.stats:
        return None
    if run.model is not None and run.data:
        spread = run.model.density_spread(tuple(run.data["shape"]))
    with dask.config.set(scheduler="threads"):  # a Dask client may have no workers
        drift = trend(run.stats["lp"].transpose("chain", "draw").values, spread)
        if drift is not None and (balanced := balanced_density(tree)) is not None:
            drift = trend(balanced, spread)
    if drift is None:
        return None
    verb, size = "rose" if drift.change > 0 else "fell", abs(drift.change)
    return (
        f"the log density still {verb} by {size:.4g}, {size / drift.sd:.1f} standard deviations, "
        "from the first to the last quarter of the draws"
    )


def sections_of(summary: xr.Dataset) -> pd.DataFrame:
    """Return the worst diagnostics of each kind of functional, in the order of the kinds.

    Unaligned components, which may swap places, are omitted if there are aligned ones.

    Returns
    -------
    DataFrame
        With ``kind``; ``total``, the number of functionals; the largest ``rhat``; the smallest
        ``ess_bulk``, ``ess_tail`` and ``ess`` of both, NaN if there is none; ``worst`` and
        ``slowest``, the names of the functional with the largest R-hat and of the one with the
        smallest effective sample size; ``apart``, the number of functionals with a bad R-hat;
        ``rare``, the number of components in fewer than half of the draws of some chain.
    """
    table = summary.to_dataframe()
    table = table[~table["kind"].isin(_replaced(set(table["kind"])))]
    table = table.assign(ess=table[["ess_bulk", "ess_tail"]].min(axis=1))
    table["apart"], table["rare"] = table["rhat"] > BAD_RHAT, table["least_share"] < MIN_SHARE
    largest, smallest, counts = ["rhat"], ["ess_bulk", "ess_tail", "ess"], ["apart", "rare"]
    kinds = table.groupby("kind", sort=False)
    valid = table[table["ess"].notna()].groupby("kind")
    names = {"worst": valid["rhat"].idxmax(), "slowest": valid["ess"].idxmin()}
    columns = [kinds[largest].max(), kinds[smallest].min(), kinds[counts].sum()]
    worst = pd.concat([kinds.size().rename("total"), *columns], axis=1).assign(**names)
    return worst.fillna({"worst": "-", "slowest": "-"}).reset_index()


def _chain_lines(summary: xr.Dataset) -> list[str]:
    """Return the printed table of chains: the worst diagnostics of each kind."""
    chains, draws = summary.attrs["chains"], summary.attrs["draws"]
    rows = [
        f"{TITLES[str(part.kind)]:23}{part.rhat:7.3f}{part.ess_bulk:10.0f}{part.ess_tail:10.0f}"
        f"   {part.slowest}, {part.total}"
        for part in sections_of(summary).itertuples()
    ]
    head = f"{'':23}{'R-hat':>7}{'ESS bulk':>10}{'ESS tail':>10}   slowest of"
    return [f"{chains} chain{'s' if chains > 1 else ''} of {draws} draws", "", head, *rows]


def _supported_components(values: Array, planned: int | None) -> str:
    """Return a sentence on the number of components that the data support."""
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    among = (
        f"{middle:g}" if low == high else f"{middle:g} (in 90% of the draws {low:g} to {high:g})"
    )
    sentence = f"Number of components that the data support: {among}."
    if planned is not None and middle >= planned - 0.5:
        sentence += " All components are in use: more may be better."
    return sentence
