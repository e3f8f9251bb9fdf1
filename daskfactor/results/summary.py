"""Whether a run has converged: R-hat and effective sample sizes of what can be compared.

Particles have no chain that could converge; what they come to is in ``particle_summary``.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.errors import OptionError
from daskfactor.results.align import Law, align, law_of, match, reference_from
from daskfactor.results.diagnose import (
    Series,
    addressed_cells,
    aligned_series,
    convergence,
    factor_series,
    shares_of,
)
from daskfactor.results.schema import BIASED, COARSE, factor_dims
from daskfactor.results.trace import (
    Trace,
    as_tree,
    draw_weights,
    each_draw,
    each_weighted_draw,
    effective_number,
    is_particles,
    require_draws,
)
from daskfactor.results.verdict import (
    Section,
    Seen,
    particle_lines,
    particle_verdict,
    sections_of,
    verdict_of,
)

TITLES: Final = {
    "density": "log density",
    "product": "W H",
    "scale": "size of W and of H",
    "component": "components, as drawn",
    "aligned": "components, aligned",
}
DENSITIES: Final = ("lp", "log_likelihood")


class Summary(xr.Dataset):  # type: ignore[no-untyped-call]
    """What :func:`summarize` returns: a Dataset whose print is a verdict and a table."""

    __slots__ = ()

    @property
    def verdict(self) -> str:
        """What has converged, what has not, what to do."""
        return str(self.attrs["verdict"])

    def __repr__(self) -> str:
        of_particles = {"mean", "sd", "one_particle", "kind"} <= set(self.variables)
        if of_particles and "verdict" in self.attrs and self["mean"].dims == ("functional",):
            return "\n".join([*particle_lines(self), "", *self.verdict.split("\n")])
        whole = {"rhat", "ess_bulk", "ess_tail", "kind"} <= set(self.variables)
        if not whole or "verdict" not in self.attrs or self["rhat"].dims != ("functional",):
            return super().__repr__()
        head = f"{'':23}{'R-hat':>7}{'ESS bulk':>10}{'ESS tail':>10}   slowest of"
        lines = [_line(section) for section in sections_of(self)]
        chains, draws = self.attrs["chains"], self.attrs["draws"]
        title = f"{chains} chain{'s' if chains > 1 else ''} of {draws} draws"
        return "\n".join([title, "", head, *lines, "", *self.verdict.split("\n")])


def _line(section: Section) -> str:
    numbers = f"{section.rhat:7.3f}{section.ess_bulk:10.0f}{section.ess_tail:10.0f}"
    return f"{TITLES[section.kind]:23}{numbers}   {section.slowest}, {section.total}"


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
        tree = require_draws(tree, "a summary")
        found_of = particle_summary(tree, cells, random_seed)
        return Summary(found_of.data_vars, found_of.coords, found_of.attrs)
    series = _density_series(tree)
    moved = False
    if "posterior" in tree.children and tree["posterior"].sizes["draw"] > 0:
        found, moved = _posterior_series(tree, cells, random_seed)
        series += found
    if not series or series[0].values.size == 0:
        raise OptionError("this run has no draws yet, and a summary needs some; resume it first")
    drift = next((_drift(one) for one in series if one.name == "lp"), 0.0)
    return _summary(series, Seen(drift, moved, _biased(tree)))


def _density_series(tree: xr.DataTree) -> list[Series]:
    found = []
    for group in ("sample_stats", "log_likelihood"):
        if group not in tree.children:
            continue
        for name, values in tree[group].to_dataset().data_vars.items():
            if name in DENSITIES and set(values.dims) == {"chain", "draw"}:
                drawn = values.transpose("chain", "draw").values.astype(np.float64)
                found.append(Series(str(name), "density", drawn))
    return [one for one in found if one.values.size]


def _posterior_series(tree: xr.DataTree, cells: int, seed: int) -> tuple[list[Series], bool]:
    """Series of the draws, and whether components change places between them."""
    group = tree["posterior"].to_dataset()
    row, column = factor_dims(tree)
    law = law_of(tree)
    chosen = addressed_cells((group.sizes[row], group.sizes[column]), cells, seed)
    series = factor_series(group, law, chosen)
    if "alignment" in tree.children:
        shares, least = shares_of(tree["alignment"].to_dataset())
        others = [one for one in series if one.kind != "component"]
        own = [one for one in series if one.kind == "component"]
        return others + [
            Series(f"aligned[{k}]", "aligned", one.values, float(shares[k]), float(least[k]))
            for k, one in enumerate(own)
        ], False
    if law.free.size < 2:
        return series, False
    aligned = align(tree)["alignment"].to_dataset()
    order = (
        aligned["permutation"]
        .transpose(..., "component")
        .values.reshape(-1, tree["posterior"].sizes["component"])
    )
    moved = bool((order != order[0]).any())
    return series + aligned_series(series, aligned, law), moved


def _biased(tree: xr.DataTree) -> bool:
    """Whether the draws are off by what no diagnostic of convergence sees: a finite step."""
    if BIASED in tree.attrs:
        return bool(tree.attrs[BIASED])
    # Runs of 0.1.0 do not say so; those without bias had a second chain, acceptance or step 1.
    stats = tree["sample_stats"].to_dataset() if "sample_stats" in tree.children else {}
    if COARSE in tree.children or "acceptance_rate" in stats or "step_size" not in stats:
        return False
    return bool((stats["step_size"] != 1.0).any())


def _summary(series: list[Series], seen: Seen) -> Summary:
    found = np.array([convergence(one.values) for one in series])
    chains, draws = series[-1].values.shape
    summary = Summary(
        {
            "mean": ("functional", [float(one.values.mean()) for one in series]),
            "sd": ("functional", [float(one.values.std()) for one in series]),
            "rhat": ("functional", found[:, 0]),
            "ess_bulk": ("functional", found[:, 1]),
            "ess_tail": ("functional", found[:, 2]),
            "share": ("functional", [one.share for one in series]),
            "least_share": ("functional", [one.least_share for one in series]),
        },
        coords={
            "functional": [one.name for one in series],
            "kind": ("functional", [one.kind for one in series]),
        },
        attrs={"chains": int(chains), "draws": int(draws)},
    )
    summary.attrs["verdict"] = "\n".join(verdict_of(sections_of(summary), chains, draws, seen))
    return summary


def _drift(lp: Series) -> float:
    """Rise of the log density from the first to the second half, in standard deviations."""
    half = lp.values.shape[1] // 2
    spread = float(lp.values.std())
    if not half or not spread > 0:
        return 0.0
    return float(lp.values[:, half:].mean() - lp.values[:, :half].mean()) / spread


Array = NDArray[np.float64]

NEAR: Final = 0.8
"""Cosine in W and in H from which on two components are taken to be the same."""


class Cloud(NamedTuple):
    """Particles that have mass, and what is known of all of them.

    Attributes
    ----------
    kept
        Which have mass, (chain, draw).
    masses
        Of these, (M',), adding up to 1.
    weighted
        Whether they have weights yet; else all count alike.
    alike
        Mass of those whose components all are those of the one of most mass. (A mean of
        two modes may be near both.) NaN if there is nothing to put in order.
    """

    kept: NDArray[np.bool_]
    masses: Array
    weighted: bool
    alike: float = float("nan")


def particle_summary(tree: xr.DataTree, cells: int, seed: int) -> xr.Dataset:
    r"""Weighted mean and spread of what can be compared between particles.

    .. math:: \bar x = \sum_m w_m x_m, \qquad s^2 = \sum_m w_m (x_m - \bar x)^2

    Parameters
    ----------
    tree
        A trace of particles with at least one.
    cells, seed
        How many cells of WH to follow, and the seed of that choice.

    Returns
    -------
    Dataset
        Over ``functional``: ``mean``, ``sd``, ``one_particle`` (largest share of the
        variance that a single particle makes) and ``share`` (mass in which an aligned
        component appears); counts, discrepancies and the verdict as attributes.

    References
    ----------
    Masood and Doshi-Velez, sections 4 and 7.
    """
    shape = tree["posterior"].sizes["chain"], tree["posterior"].sizes["draw"]
    weights = draw_weights(tree)
    masses = np.full(shape, 1.0 / (shape[0] * shape[1])) if weights is None else weights
    cloud = Cloud(masses > 0, masses[masses > 0], weights is not None)
    if law_of(tree).free.size > 1:
        cloud = cloud._replace(alike=_mass_alike(tree, masses))
    series = _series(tree, cloud, cells, seed)
    found = [_moments(one.values, cloud.masses) for one in series]
    summary = xr.Dataset(
        {
            "mean": ("functional", [one[0] for one in found]),
            "sd": ("functional", [one[1] for one in found]),
            "one_particle": ("functional", [one[2] for one in found]),
            "share": ("functional", [one.share for one in series]),
        },
        coords={
            "functional": [one.name for one in series],
            "kind": ("functional", [one.kind for one in series]),
        },
        attrs=_attrs(tree, cloud),
    )
    summary.attrs["verdict"] = "\n".join(particle_verdict(summary))
    return summary


def _series(tree: xr.DataTree, cloud: Cloud, cells: int, seed: int) -> list[Series]:
    """Functionals (M',) of particles with mass, components in the order of an alignment."""
    stats = tree["sample_stats"].to_dataset()
    series = [
        Series(name, "density", stats[name].transpose("chain", "draw").values[cloud.kept])
        for name in ("lp", "objective")
        if name in stats
    ]
    group, law = tree["posterior"].to_dataset(), law_of(tree)
    row, column = factor_dims(tree)
    chosen = addressed_cells((group.sizes[row], group.sizes[column]), cells, seed)
    parts = [
        factor_series(group.isel(chain=[at], draw=np.flatnonzero(own)), law, chosen)
        for at, own in enumerate(cloud.kept)
        if own.any()
    ]
    drawn = [
        one[0]._replace(values=np.concatenate([piece.values[0] for piece in one]))
        for one in zip(*parts, strict=True)
    ]
    if law.free.size < 2:
        return series + drawn
    already = "alignment" in tree.children
    aligned = (tree if already else align(tree))["alignment"].to_dataset()
    return series + _with_components(drawn, aligned, law, cloud, already)


def _with_components(
    drawn: list[Series], aligned: xr.Dataset, law: Law, cloud: Cloud, already: bool
) -> list[Series]:
    """The series of components in the order of the alignment; the others as they are."""
    others = [one for one in drawn if one.kind != "component"]
    sizes = np.stack([one.values for one in drawn if one.kind == "component"], axis=-1)
    if not already:
        order = aligned["permutation"].transpose("chain", "draw", "component").values
        chosen = order[cloud.kept][:, : law.components]
        sizes = np.take_along_axis(sizes, chosen, axis=1)
    shares = aligned["share"].values
    return others + [
        Series(f"aligned[{k}]", "aligned", sizes[:, k], float(shares[k]))
        for k in range(law.components)
    ]


def _mass_alike(tree: xr.DataTree, masses: Array) -> float:
    """Mass of particles whose components that may move are all those of the heaviest one."""
    group, law = tree["posterior"].to_dataset(), law_of(tree)
    chain, draw = np.unravel_index(int(masses.argmax()), masses.shape)
    label = group["chain"].values.tolist()[int(chain)]
    reference = reference_from(*next(each_draw(group.isel(draw=[int(draw)]), label)))
    alike = total = 0.0
    for (W, H), mass in each_weighted_draw(group, None, masses):
        total += mass
        if match(W, H, reference, law, NEAR).matched[law.free].all():
            alike += mass
    return alike / total


def _moments(values: Array, masses: Array) -> tuple[float, float, float]:
    """Weighted mean and sd, and the largest share of the variance that one particle makes."""
    mean = float(masses @ values)
    parts = masses * (values - mean) ** 2
    total = float(parts.sum())
    # What rounding alone has left over is no spread.
    none = not total > (1e-12 * float(np.abs(values).max(initial=0.0))) ** 2
    return mean, 0.0 if none else total**0.5, float("nan") if none else float(parts.max()) / total


def _attrs(tree: xr.DataTree, cloud: Cloud) -> dict[str, Any]:
    heaviest = np.argwhere(cloud.kept)[int(cloud.masses.argmax())]
    label = tree["posterior"].to_dataset()["draw"].values[heaviest[1]]
    attrs: dict[str, Any] = {
        "particles": int(cloud.kept.size),
        "with_weight": len(cloud.masses),
        "weighted": int(cloud.weighted),
        "effective": effective_number(cloud.masses),
        "heaviest": label.item(),
        "largest_weight": float(cloud.masses.max()),
        "alike": cloud.alike,
    }
    if "stein" in tree.children:
        stein = tree["stein"].to_dataset()
        attrs |= {str(name): float(one) for name, one in stein.data_vars.items() if one.ndim == 0}
    stats = tree["sample_stats"].to_dataset()
    if "objective" in stats:
        objective = stats["objective"].transpose("chain", "draw").values
        attrs |= {"objective_min": float(objective.min()), "objective_max": float(objective.max())}
        attrs |= _above(objective, tree, cloud)
    return attrs


def _above(objective: Array, tree: xr.DataTree, cloud: Cloud) -> dict[str, Any]:
    """The threshold, and how many particles, with how much mass, have an objective above it."""
    constants = tree["constant_data"].to_dataset() if "constant_data" in tree.children else {}
    level = float(constants["threshold"]) if "threshold" in constants else float("nan")
    if not np.isfinite(level):
        return {}
    return {
        "threshold": level,
        "above_threshold": int((objective > level).sum()),
        "mass_above_threshold": float(cloud.masses[objective[cloud.kept] > level].sum()),
    }
