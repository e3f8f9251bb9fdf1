"""What the diagnostics of a run come to: numbers, and sentences on what has converged.

Particles have no chain that could converge: told are their weighted mean and spread, how many
carry weight, and whether they are one mode.
"""

import json
import math
from typing import Any, Final, Literal

import dask
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.errors import OptionError
from daskfactor.models.settings import EFFECTIVE
from daskfactor.results.align import law_of, match, reference_from, stored_model
from daskfactor.results.diagnose import LEAST_DRAWS, Series, all_series, convergence, trend
from daskfactor.results.schema import BIASED, COARSE, STEIN
from daskfactor.results.trace import (
    Trace,
    Weights,
    as_tree,
    draw_masses,
    draw_weights,
    each_draw,
    each_weighted_draw,
    effective_number,
    is_particles,
    reads_here,
    require_draws,
)

Array = NDArray[np.float64]

TITLES: Final = {
    "density": "log density",
    "learnt": "sampled hyperparameters",
    "product": "W H",
    "scale": "size of W and of H",
    "component": "components, as drawn",
    "aligned": "components, aligned",
}
PARTICLE_TITLES: Final = TITLES | {
    "density": "log density, objective",
    "component": "components, as found",
}
NEAR: Final = 0.8
"""Cosine in W and in H from which on two components are taken to be the same."""
GOOD_RHAT: Final = 1.01
BAD_RHAT: Final = 1.05
ESS_PER_CHAIN: Final = 100
"""Of Vehtari et al. 2021, sections 4 and 5: 50 for each half of a chain."""
RARE: Final = 0.5
"""Share of a chain's draws below which a component is not one of the whole posterior."""

POINT: Final = 0.9
"""Mass of one particle from which on the set is as good as a point estimate."""
FEW: Final = 5.0
"""Effective number of particles below which a spread is rough."""
ONE_MODE: Final = 0.95
"""Mass that has to be alike for all particles to be called one mode."""
MOSTLY: Final = 0.5
"""Share of a variance from which on it is mostly one particle's."""

State = Literal["good", "few", "apart"]


class Judged(xr.Dataset):  # type: ignore[no-untyped-call]
    """A Dataset whose print is a table and a verdict, as long as it has what the table shows."""

    __slots__ = ()

    @property
    def verdict(self) -> str:
        """What the numbers mean, and what to do."""
        return str(self.attrs["verdict"])

    def _table(self) -> str | None:
        """Return what is printed above the verdict; None if variables for it are missing."""
        return None

    def __repr__(self) -> str:
        table = self._table() if "verdict" in self.attrs else None
        return super().__repr__() if table is None else f"{table}\n\n{self.verdict}"


class Summary(Judged):  # type: ignore[no-untyped-call]
    """What :func:`summarize` returns: what has converged, what has not, what to do."""

    __slots__ = ()

    def _table(self) -> str | None:
        for name, others, lines in (
            ("mean", {"sd", "one_particle", "kind"}, _particle_lines),
            ("rhat", {"ess_bulk", "ess_tail", "kind"}, _chain_lines),
        ):
            whole = {name, *others} <= set(self.variables)
            if whole and self[name].dims == ("functional",):
                return "\n".join(lines(self))
        return None


@reads_here
def summarize(trace: Trace, *, cells: int = 32, random_seed: int = 0) -> Summary:
    r"""R-hat and effective sample sizes of a run, and what follows from them.

    .. math:: \hat R = \sqrt{\frac{N-1}{N} + \frac{B}{W}}, \qquad
        {\rm ESS} = \frac{MN}{1 + 2 \sum_t \hat\rho_t}

    with within- and between-chain variances W and B of rank-normalised draws of split
    chains, so that one chain is enough. They are taken of numbers that mean the same in
    every draw: the log density, and of WH the mean, the norm, the largest singular
    values and some cells; the sums of W and H, whose scale the priors alone hold in
    place; and the size of each component (its mean contribution to WH), both in the
    order in which it was drawn and in that of :func:`align`.

    Of particles neither R-hat nor effective draws mean anything: told are their weighted
    mean and spread, how many carry weight, and whether they are one mode.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store; draws are read a few at a time.
        Without draws, the log density alone is judged.
    cells
        How many cells of WH to follow, drawn at random.
    random_seed
        Seed of that choice: the same cells for the same seed.

    Returns
    -------
    Summary
        A Dataset over ``functional`` with ``kind``, ``mean``, ``sd``, ``rhat``,
        ``ess_bulk``, ``ess_tail`` and, for aligned components, ``share``, of the draws in
        which the component appears, and ``least_share``, of those of the chain that has it in
        the fewest. ``.to_dataframe()`` makes it a table, ``print`` shows
        the worst of each kind and the verdict, which is also ``.verdict``. Of particles:
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
    Vehtari et al. 2021. R-hat of at most 1.01, and an ESS of 100 for each chain, count
    as converged. None of this sees the bias of a finite step: chains agree on it.
    Particles: Masood and Doshi-Velez, sections 4 and 7.
    """
    whole_number("cells", cells, 0)
    tree = as_tree(trace)
    if is_particles(tree):
        return _of_particles(require_draws(tree, "a summary"), cells, random_seed)
    series, moved = all_series(tree, cells, random_seed, None)
    if not series:
        raise OptionError("this run has no draws yet, and a summary needs some; resume it first")
    found = np.array([convergence(one.values) for one in series])
    chains, draws = series[-1].values.shape
    columns = {
        "mean": [float(one.values.mean()) for one in series],
        "sd": [float(one.values.std()) for one in series],
        **dict(zip(("rhat", "ess_bulk", "ess_tail"), found.T, strict=True)),
        "share": [one.share for one in series],
        "least_share": [one.least_share for one in series],
    }
    summary = _table(series, columns, {"chains": int(chains), "draws": int(draws)})
    known = sections_of(summary).dropna()
    of = dict(zip(known["kind"], known.itertuples(), strict=True))
    nothing = (
        f"Nothing can be said yet of {draws} draws: at least {LEAST_DRAWS} that are finite "
        "and differ are needed, and hundreds are wanted; go on with resume()."
    )
    told = _verdict(of, chains, told_trend(tree), moved, is_biased(tree)) if of else [nothing]
    told += [
        _of_number(one.values, tree["posterior"].sizes.get("component"))
        for one in series
        if one.name == EFFECTIVE.name
    ]
    summary.attrs["verdict"] = "\n".join(told)
    return summary


def _table(series: list[Series], columns: dict[str, Any], attrs: dict[str, Any]) -> Summary:
    """A summary of one row for every functional."""
    return Summary(
        {name: ("functional", values) for name, values in columns.items()},
        coords={
            "functional": [one.name for one in series],
            "kind": ("functional", [one.kind for one in series]),
        },
        attrs=attrs,
    )


def is_biased(tree: xr.DataTree) -> bool:
    """Whether the draws are off by what no diagnostic of convergence sees: a finite step."""
    if BIASED in tree.attrs:
        return bool(tree.attrs[BIASED])
    # Runs of 0.1.0 do not say so; those without bias had a second chain, acceptance or step 1.
    stats = tree["sample_stats"].to_dataset() if "sample_stats" in tree.children else {}
    if COARSE in tree.children or "acceptance_rate" in stats or "step_size" not in stats:
        return False
    return bool((stats["step_size"] != 1.0).any())


def told_trend(tree: xr.DataTree) -> str | None:
    """Put a trend of the log density over the draws into words; None if there is none."""
    stats = tree["sample_stats"].to_dataset() if "sample_stats" in tree.children else {}
    if "lp" not in stats:
        return None
    spread, model = math.inf, stored_model(tree)
    if model is not None and "data" in tree.attrs:
        spread = model.density_spread(tuple(json.loads(tree.attrs["data"])["shape"]))
    with dask.config.set(scheduler="threads"):  # a client that is about may have no workers
        found = trend(stats["lp"].transpose("chain", "draw").values, spread)
    if found is None:
        return None
    verb, size = "rose" if found.change > 0 else "fell", abs(found.change)
    return (
        f"the log density still {verb} by {size:.4g}, {size / found.sd:.1f} standard deviations, "
        "from the first to the last quarter of the draws: tune longer"
    )


def state(rhat: float, ess: float, chains: int) -> State:
    """Converged; the draws agree but are few; or they do not agree."""
    if rhat > BAD_RHAT:
        return "apart"
    return "good" if rhat <= GOOD_RHAT and ess >= ESS_PER_CHAIN * chains else "few"


def sections_of(summary: xr.Dataset) -> pd.DataFrame:
    """The worst of each kind of functional, in the order in which the kinds come.

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
    table["ess"] = table[["ess_bulk", "ess_tail"]].min(axis=1)
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


def _verdict(
    of: dict[str, Any], chains: int, moving: str | None, moved: bool, biased: bool
) -> list[str]:
    """Sentences, the most important first.

    Parameters
    ----------
    of
        Rows of `sections_of` of which something is known, by kind.
    chains
        How many there are.
    moving
        What `told_trend` says.
    moved
        Whether components change places between draws.
    biased
        Whether the sampler has a step whose bias no such diagnostic sees.
    """
    said = [_of_product(of, chains)]
    if moving is not None:
        said.append(f"{moving[0].upper()}{moving[1:]}.")
    if "product" not in of:
        said.append("The run kept no draws: of W H and of components nothing can be said.")
    if "aligned" in of:
        said += _of_components(of["aligned"], moved)
    if "scale" in of and of["scale"].rhat > BAD_RHAT:
        said.append(
            f"The sizes of W and of H have not settled (R-hat {of['scale'].rhat:.3f}): only the "
            "priors hold them, and W H does not depend on them."
        )
    if chains == 1:
        said.append("One chain cannot show that another would end elsewhere: four chains can.")
    if biased:
        said.append(
            "The bias of a finite step is not seen here: discretization_bias() estimates it."
        )
    return said


def _of_product(of: dict[str, Any], chains: int) -> str:
    """On the log density and WH together: they are what predictions rest on."""
    both = [of[kind] for kind in ("density", "product") if kind in of]
    states = [state(section.rhat, section.ess, chains) for section in both]
    worst = max(both, key=lambda section: section.rhat)
    slowest = min(both, key=lambda section: section.ess)
    what = " and ".join(TITLES[section.kind] for section in both)
    if "apart" in states:
        return (
            f"NOT CONVERGED: {worst.worst} has R-hat {worst.rhat:.3f}. "
            f"{'Halves of the chain' if chains == 1 else 'Chains'} disagree on it: tune longer "
            "and draw more."
        )
    if "few" in states:
        wanted = ESS_PER_CHAIN * chains
        if slowest.ess >= wanted:
            return (
                f"TOO FEW DRAWS to be sure: no disagreement is plain in {what}, but {worst.worst} "
                f"has R-hat {worst.rhat:.3f}: about twice as many draws would do."
            )
        times = max(2, math.ceil(wanted / max(slowest.ess, 1.0)))
        return (
            f"TOO FEW DRAWS to be sure: no disagreement is plain in {what} (R-hat at most "
            f"{worst.rhat:.3f}), but the draws of {slowest.slowest} are worth {slowest.ess:.0f} "
            f"independent ones of {wanted} wanted: about {times} times as many draws would do."
        )
    return (
        f"CONVERGED: {what} have R-hat at most {worst.rhat:.3f}, and their draws are worth "
        f"{slowest.ess:.0f} independent ones or more."
    )


def _of_components(aligned: Any, moved: bool) -> list[str]:
    said = []
    if moved:
        said.append(
            "Components change places between draws or chains: read W and H through align() only."
        )
    if aligned.rare:
        said.append(
            f"{aligned.rare} of {aligned.total} components appear in fewer than half of the "
            "draws of some chain: chains found different ones, or they are too weak to tell "
            "apart. Do not "
            "interpret these; W H may be trusted as far as it has converged."
        )
    elif aligned.apart:
        said.append(
            f"All {aligned.total} components appear in most draws, but the sizes of {aligned.apart}"
            f" have not settled (R-hat up to {aligned.rhat:.3f}, {aligned.worst}): draw more "
            "before their sizes are compared."
        )
    else:
        said.append(f"All {aligned.total} components appear in most draws, once aligned.")
    return said


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


def _of_particles(tree: xr.DataTree, cells: int, seed: int) -> Summary:
    r"""Weighted mean and spread of what can be compared between particles.

    .. math:: \bar x = \sum_m w_m x_m, \qquad s^2 = \sum_m w_m (x_m - \bar x)^2

    References
    ----------
    Masood and Doshi-Velez, sections 4 and 7.
    """
    weights = draw_masses(tree).values  # those that have none yet count alike
    series, _ = all_series(tree, cells, seed, weights)
    masses = weights[weights > 0]
    spreads = np.array([_spread(one.values, masses) for one in series])
    columns = dict(zip(("mean", "sd", "one_particle"), spreads.T, strict=True))
    columns["share"] = np.array([one.share for one in series])
    attrs = _particle_attrs(tree, weights)
    summary = _table(series, columns, attrs)
    said = [_of_weights(attrs)]
    number, mass = attrs.get("above_threshold", 0), attrs.get("mass_above_threshold", 0.0)
    if number:
        said.append(
            f"{number} of the particles, with {mass:.0%} of the mass, have an objective above the "
            "threshold: the model takes these for worse than good enough."
        )
    if np.isfinite(attrs["alike"]) and attrs["with_weight"] > 1:
        said.append(_of_modes(attrs["alike"]))
    mostly = int(np.sum(columns["one_particle"] > MOSTLY))
    if mostly and attrs["effective"] >= FEW:
        said.append(
            f"More than half of the variance of {mostly} of the {len(series)} numbers is a single "
            "particle's."
        )
    if "discrepancy" in attrs:
        said.append(
            "Discrepancies compare sets of equally many particles under one kernel; by themselves "
            "they say nothing."
        )
    summary.attrs["verdict"] = "\n".join(said)
    return summary


def _mass_alike(tree: xr.DataTree, masses: Weights) -> float:
    """Mass of particles whose components that may move are all those of the heaviest one.

    (A mean of two modes may be near both.) NaN if there is nothing to put in order.
    """
    group, law = tree["posterior"].to_dataset(), law_of(tree)
    if law.free.size < 2:
        return math.nan
    chain, draw = np.unravel_index(int(masses.argmax()), masses.shape)
    label = group["chain"].values.tolist()[int(chain)]
    reference = reference_from(*next(each_draw(group.isel(draw=[int(draw)]), label)))
    alike = total = 0.0
    for (W, H), mass in each_weighted_draw(group, None, masses):
        total += mass
        if match(W, H, reference, law, NEAR).matched[law.free].all():
            alike += mass
    return alike / total


def _spread(values: Array, masses: Array) -> tuple[float, float, float]:
    """Weighted mean and sd, and the largest share of the variance that one particle makes."""
    mean = float(masses @ values)
    parts = masses * (values - mean) ** 2
    total = float(parts.sum())
    # What rounding alone has left over is no spread.
    none = not total > (1e-12 * float(np.abs(values).max(initial=0.0))) ** 2
    return mean, 0.0 if none else total**0.5, float("nan") if none else float(parts.max()) / total


def _particle_attrs(tree: xr.DataTree, weights: Weights) -> dict[str, Any]:
    """Counts, discrepancies, and how many objectives are above the threshold."""
    kept, masses = weights > 0, weights[weights > 0]
    heaviest = np.unravel_index(int(weights.argmax()), weights.shape)[1]
    attrs: dict[str, Any] = {
        "particles": int(kept.size),
        "with_weight": len(masses),
        "weighted": int(draw_weights(tree) is not None),
        "effective": effective_number(masses),
        "heaviest": tree["posterior"].to_dataset()["draw"].values[heaviest].item(),
        "largest_weight": float(masses.max()),
        "alike": _mass_alike(tree, weights),
    }
    if STEIN in tree.children:
        stein = tree[STEIN].data_vars.items()
        attrs |= {str(name): float(one) for name, one in stein if one.ndim == 0}
    if "objective" not in tree["sample_stats"].data_vars:
        return attrs
    objective = tree["sample_stats"]["objective"].transpose("chain", "draw").values
    attrs |= {"objective_min": float(objective.min()), "objective_max": float(objective.max())}
    constants = tree["constant_data"].data_vars if "constant_data" in tree.children else {}
    level = float(constants["threshold"]) if "threshold" in constants else math.nan
    if np.isfinite(level):
        attrs["threshold"] = level
        attrs["above_threshold"] = int((objective > level).sum())
        attrs["mass_above_threshold"] = float(masses[objective[kept] > level].sum())
    return attrs


def _of_weights(attrs: dict[str, Any]) -> str:
    count, effective = attrs["with_weight"], attrs["effective"]
    if not attrs["weighted"]:
        return (
            f"NOT WEIGHTED YET: {count} particles are there, and before all of them are they "
            "count alike."
        )
    if attrs["largest_weight"] >= POINT:
        return (
            f"ONE PARTICLE: number {attrs['heaviest']} carries {attrs['largest_weight']:.0%} of "
            "the mass, so this is little more than a point estimate; take spreads and intervals "
            "as too narrow, and try more particles or other starts."
        )
    if effective < FEW:
        return (
            f"FEW PARTICLES: {count} carry weight, worth {effective:.1f} of equal weight: spreads "
            "are rough and tails unknown; more particles may help."
        )
    return f"{count} particles carry weight, worth {effective:.1f} of equal weight."


def _of_modes(alike: float) -> str:
    if alike >= ONE_MODE:
        return (
            f"One mode: once aligned, particles with {alike:.0%} of the mass have the same "
            "components, and their means may be read."
        )
    return (
        "Several modes, or components too weak to tell apart: once aligned, particles with "
        f"{alike:.0%} of the mass have all components of the heaviest one. Do not read "
        "means of W and H; W H may be averaged, and particles looked at one by one."
    )


def _particle_lines(summary: xr.Dataset) -> list[str]:
    """The print of a summary of particles: counts, and the widest of each kind of number."""
    attrs = summary.attrs
    worth = f", {attrs['with_weight']} with weight, worth {attrs['effective']:.1f} of equal weight"
    lines = [f"{attrs['particles']} particles" + (worth if attrs["weighted"] else "")]
    if "discrepancy" in attrs:
        equal = attrs["discrepancy_equal"]
        lines.append(
            f"Stein discrepancy {attrs['discrepancy']:.4g}, under equal weights {equal:.4g}"
        )
    if "objective_min" in attrs:
        limit = f", threshold {attrs['threshold']:.4g}" if "threshold" in attrs else ""
        lines.append(
            f"objective {attrs['objective_min']:.4g} to {attrs['objective_max']:.4g}{limit}"
        )
    head = f"{'':24}{'mean':>11}{'sd':>11}{'one particle':>14}   widest of"
    rows = []
    for kind, part in summary.to_dataframe().groupby("kind", sort=False):
        # The number of a kind that is widest for its mean.
        widest = int((part["sd"] / part["mean"].abs().replace(0.0, 1.0)).to_numpy().argmax())
        mean, sd, one = part[["mean", "sd", "one_particle"]].to_numpy()[widest]
        told = f"{one:.0%}" if np.isfinite(one) else "-"
        name = f"{part.index[widest]}, {len(part)}"
        rows.append(f"{PARTICLE_TITLES[str(kind)]:24}{mean:11.4g}{sd:11.3g}{told:>14}   {name}")
    return [*lines, "", head, *rows]
