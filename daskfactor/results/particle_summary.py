"""What a set of weighted particles comes to: no chain, so neither R-hat nor effective draws.

Source: Masood and Doshi-Velez, "A particle-based variational approach to Bayesian
non-negative matrix factorization", sections 4 and 7.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.alignment import align, law_of
from daskfactor.results.functionals import Series, addressed_cells, factor_series
from daskfactor.results.matching import Law, match, reference_from
from daskfactor.results.particle_verdict import particle_verdict
from daskfactor.results.schema import factor_dims
from daskfactor.results.trace import each_draw, each_weighted_draw
from daskfactor.results.weights import draw_weights, effective_number

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
