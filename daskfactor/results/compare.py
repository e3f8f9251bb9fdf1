"""Comparisons of particles: components, distances, largest entries, scores.

Masses are those of `daskfactor.runs.trace.Run.masses`. The paper's letters are A for W
and W for H.

Source: Masood and Doshi-Velez, "A particle-based variational approach to Bayesian non-negative
matrix factorization", sections 7.2 and 7.3, footnote 5 and figures 10, 16 and 17.
"""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import one_of, whole_number
from daskfactor.data.labels import FACTOR, SIDES
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.results.align import (
    aligned_run,
    best_order,
    component_positions,
    mean_and_sd,
    sizes,
    unit_length,
    unit_size,
)
from daskfactor.results.tensors import axis_spans
from daskfactor.runs.trace import Run, Symmetries, Trace, each_draw, reads_in_threads

Array = NDArray[np.float64]
Side = Literal["W", "H"]

APPEARS: Final = 0.8
"""Least cosine similarity of a component, if the alignment does not record its threshold."""
BLOCK_BYTES: Final = 2**26
"""Bytes of particles, or of a table of angles between their components, at a time."""


@reads_in_threads
def component_variability(trace: Trace) -> xr.Dataset:
    r"""Measure how much each component varies between particles.

    .. math:: \bar a_k \propto \sum_m p_m\, w^{(m)}_k / \|w^{(m)}_k\|, \qquad
        \bar\alpha_k = \sum_m p_m \angle(w^{(m)}_k, \bar a_k), \qquad
        s_k = \frac{\sum_{ij} w_{ik} h_{kj}}{\sum_{ijk'} w_{ik'} h_{k'j}}

    The mean direction :math:`\bar a_k` is that of the particles in which the component appears
    according to the alignment, and so of one mode; angles from it are averaged over all
    particles. Rows of H are treated likewise. For real-valued factors, s is the share of the
    sum of squares.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store, read a few draws at a
        time; aligned if it is not.

    Returns
    -------
    Dataset
        Over ``component``: ``angle_w`` and ``angle_h`` (degrees) with ``angle_w_sd`` and
        ``angle_h_sd``; ``share`` of the particles in which both angles are within the
        threshold of the alignment; ``intensity`` and ``intensity_sd``, s above. Means and
        standard deviations are those of the weighted particles, not of an estimate.

    Raises
    ------
    OptionError
        If the run kept no draws.

    References
    ----------
    Masood and Doshi-Velez, sections 7.2 and 7.3 and figure 10.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> sorted(dfac.component_variability(trace))
    ['angle_h', 'angle_h_sd', 'angle_w', 'angle_w_sd', 'intensity', 'intensity_sd', 'share']
    """
    run = aligned_run(trace, "the spread of components")
    group, alignment = run.posterior, run.group("alignment")
    threshold = float(alignment.attrs.get("threshold", APPEARS))
    weight = run.masses.values.reshape(-1)
    similarity = alignment["similarity"].transpose("chain", "draw", "component").values
    counted = similarity.reshape(weight.size, -1) >= threshold**2
    counted |= ~(counted & (weight > 0)[:, None]).any(axis=0)
    mean_w, mean_h = (np.zeros(()) for _ in range(2))
    for mass, appears, (W, H, _) in zip(weight, counted, each_draw(group), strict=True):
        mean_w = mean_w + mass * appears[:, None] * unit_length(W.T)
        mean_h = mean_h + mass * appears[:, None] * unit_length(H)
    angles = np.empty((2, *counted.shape))
    intensity, spans = np.empty(counted.shape), axis_spans(run, group)
    for number, (W, H, _) in enumerate(each_draw(group)):
        angles[0, number] = angle_between(W.T, mean_w)
        angles[1, number] = angle_between(H, mean_h)
        intensity[number] = intensity_shares(W, H, run.symmetries.signed, spans)
    limit = np.degrees(np.arccos(threshold))
    variables = {"share": weight @ (angles <= limit + 1e-6).all(axis=0)}
    for name, values in (("angle_w", angles[0]), ("angle_h", angles[1]), ("intensity", intensity)):
        variables[name], variables[f"{name}_sd"] = mean_and_sd(values, weight)
    return xr.Dataset(
        {
            name: ("component", values, {"units": "degree"} if "angle" in name else {})
            for name, values in variables.items()
        },
        coords={"component": group["component"].values},
        attrs={"threshold": threshold},
    )


@reads_in_threads
def pairwise_distances(
    trace: Trace,
    of: Literal["W", "H", "both"] = "W",
    aligned: bool = True,
    *,
    metric: Literal["angle", "euclidean"] = "angle",
    most: int = 200,
) -> xr.DataArray:
    r"""Compute the distances between all pairs of particles: the diversity of a posterior.

    .. math:: d(x, y) = \min_\pi \frac1K \sum_k \angle(w^x_k, w^y_{\pi(k)}), \qquad
        d(x, y) = \Big( \min_\pi \sum_k \|w^x_k - w^y_{\pi(k)}\|^2 \Big)^{1/2}

    the second for ``metric="euclidean"``, where columns of W are first scaled to sum 1 (to
    length 1 if factors are real-valued) and rows of H are multiplied with the divisor. So the
    order, scale and sign of components do not matter. Frozen components keep their position and
    scale. Each pair of particles is matched directly, without a reference.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store, read a block of draws at
        a time; it need not be aligned.
    of
        ``"W"``, ``"H"``, or ``"both"``: the angle of a component is then the mean of both, with
        one order for both.
    aligned
        Find the best order and sign of each pair; False uses those of the trace.
    metric
        ``"angle"``, in degrees, or ``"euclidean"``, without unit of W and in the unit of the
        data of H; the two have no sum.
    most
        Largest number of draws to compare; of more draws, every second, third and so on is
        used. Time grows with the square of this number.

    Returns
    -------
    DataArray
        (draw, other_draw), symmetric, 0 on the diagonal; draws of several chains one chain
        after the other, with coordinates ``chain`` and ``other_chain``.

    Raises
    ------
    OptionError
        If the run kept no draws, or an argument is not allowed.

    References
    ----------
    Masood and Doshi-Velez, footnote 5 and figures 16 and 17.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> distances = dfac.pairwise_distances(trace)
    >>> distances.shape
    (20, 20)
    """
    whole_number("most", most, 1)
    sides: dict[str, tuple[Side, ...]] = {"W": ("W",), "H": ("H",), "both": ("W", "H")}
    one_of("of", of, [*sides])
    one_of("metric", metric, ("angle", "euclidean"))
    angle = metric == "angle"
    if of == "both" and not angle:
        raise OptionError(
            'W and H have different units, so that euclidean distances have no sum; pass of="W" '
            'or of="H", or metric="angle"'
        )
    run = Run.of(trace, "distances between draws")
    group, symmetries = run.posterior, run.symmetries
    total = group.sizes["chain"] * group.sizes["draw"]
    step = -(-total // most)
    if step > 1:
        warnings.warn(
            f"only one in {step} of {total} draws is compared; pass most={total} for all of them",
            SamplingWarning,
            stacklevel=3,
        )
    chosen = np.arange(0, total, step)
    table = np.zeros((chosen.size, chosen.size))
    movable = np.isin(np.arange(symmetries.components), symmetries.free) & (
        symmetries.signed and aligned
    )
    either = movable[:, None] & movable  # pairs of components without a fixed sign
    parts = _blocks(group, symmetries, chosen.size)
    for number, x in enumerate(parts):
        mine = _read(group, symmetries, sides[of], angle, chosen[x])
        for y in parts[number:]:
            theirs = mine if y == x else _read(group, symmetries, sides[of], angle, chosen[y])
            pairs = zip(mine, theirs, strict=True)
            costs = np.mean([_table(one, other, angle, either) for one, other in pairs], axis=0)
            if angle:  # one sign for W and H
                costs = np.where(either, np.minimum(costs, 180.0 - costs), costs)
            table[x, y] = [
                [_least(cost, symmetries, angle, aligned) for cost in row] for row in costs
            ]
            table[y, x] = table[x, y].T
    np.fill_diagonal(table, 0.0)
    chain, draw = np.divmod(chosen, group.sizes["draw"])
    labels = {"chain": group["chain"].values[chain], "draw": group["draw"].values[draw]}
    coords = {name: ("draw", one) for name, one in labels.items()}
    coords |= {f"other_{name}": ("other_draw", one) for name, one in labels.items()}
    units = {"angle": "degree", "euclidean": "1" if of == "W" else "of the data"}[metric]
    attrs = {"of": of, "metric": metric, "aligned": int(aligned), "units": units}
    return xr.DataArray(table, coords, ("draw", "other_draw"), name="distance", attrs=attrs)


def _blocks(group: xr.Dataset, symmetries: Symmetries, count: int) -> list[slice]:
    """Return parts of the draws that fit in memory, together with a table of two parts."""
    K = symmetries.components
    length = sum(
        group[side].isel(chain=0, draw=0).size // group.sizes["component"] for side in "WH"
    )
    block = int(max(1, min(BLOCK_BYTES // (8 * K * length), (BLOCK_BYTES // 8) ** 0.5 // K)))
    return [slice(at, min(at + block, count)) for at in range(0, count, block)]


def _read(
    group: xr.Dataset,
    symmetries: Symmetries,
    sides: tuple[Side, ...],
    angle: bool,
    chosen: NDArray[np.int64],
) -> list[Array]:
    """Return components (draw, K, n) of the chosen draws, scaled for the comparison."""
    chains, draws = np.divmod(chosen, group.sizes["draw"])
    components: list[list[Array]] = [[] for _ in sides]
    for chain in np.unique(chains):
        part = group.isel(chain=[int(chain)], draw=draws[chains == chain])
        for W, H, _ in each_draw(part):
            values = {"W": W.T.astype(np.float64), "H": H.astype(np.float64)}
            if not angle:
                size = np.ones(len(H))
                size[symmetries.free] = sizes(W, H, symmetries.signed)[0][symmetries.free]
                size = np.where(size > 0, size, 1.0)[:, None]
                values = {"W": values["W"] / size, "H": values["H"] * size}
            for out, side in zip(components, sides, strict=True):
                vectors = values[side][: symmetries.components]
                out.append(unit_length(vectors) if angle else vectors)
    return [np.stack(out) for out in components]


def _table(left: Array, right: Array, angle: bool, either: NDArray[np.bool_]) -> Array:
    """Return angles, or squared distances, of all pairs of components: (x, y, K, K)."""
    (x, K, n), y = left.shape, len(right)
    products = (left.reshape(-1, n) @ right.reshape(-1, n).T).reshape(x, K, y, K).swapaxes(1, 2)
    norms, other_norms = (np.einsum("mkn,mkn->mk", one, one) for one in (left, right))
    norms, other_norms = norms[:, None, :, None], other_norms[None, :, None, :]
    if angle:
        angles = np.degrees(np.arccos(np.clip(products, -1.0, 1.0)))
        return np.where((norms == 0) & (other_norms == 0), 0.0, angles)
    return np.asarray(norms + other_norms - 2.0 * np.where(either, np.abs(products), products))


def _least(cost: Array, symmetries: Symmetries, angle: bool, aligned: bool) -> float:
    """Return the distance of two particles from the costs (K, K) of their components."""
    order = best_order(cost, symmetries) if aligned else np.arange(symmetries.components)
    total = float(cost[np.arange(symmetries.components), order].sum())
    return total / symmetries.components if angle else max(total, 0.0) ** 0.5


def angle_between(left: NDArray[Any], right: NDArray[Any]) -> Array:
    """Return angles in degrees between components (K, n); 90 to a zero component."""
    u, v = unit_length(left), unit_length(right)
    apart, together = np.linalg.norm(u - v, axis=1), np.linalg.norm(u + v, axis=1)
    return np.asarray(np.degrees(2.0 * np.arctan2(apart, together)))


def intensity_shares(
    W: NDArray[Any], H: NDArray[Any], signed: bool, spans: Sequence[slice] = (slice(None),)
) -> Array:
    """Return the share of each component in the total intensity, (K,).

    ``spans`` are the columns of H for each further axis of a tensor.
    """
    parts = [sizes(W, H[:, span], signed) for span in spans]
    of_w, of_h = parts[0][0], np.prod([size for _, size in parts], axis=0)
    each = (of_w * of_h) ** (2 if signed else 1)
    total = float(each.sum())
    return np.asarray(each / total) if total > 0 else np.full(each.shape, 1.0 / each.size)


Score = Callable[[NDArray[Any], NDArray[Any]], float | Mapping[str, float]]


@reads_in_threads
def top_entries(
    trace: Trace,
    count: int = 15,
    factor: Literal["W", "H"] = "W",
    component: Any = None,
    labels: Hashable | ArrayLike | None = None,
) -> xr.Dataset:
    r"""Return the largest entries of every component in every particle: words, genes, pixels.

    .. math:: a_{ik} = w_{ik} / \textstyle\sum_{i'} w_{i'k}, \qquad
        {\rm share}_{ik} = \sum_m p_m\, [\, a^{(m)}_{ik} \text{ is among the largest} \,]

    with the masses :math:`p_m` of the particles, components aligned; likewise for rows of H.
    Real-valued factors are scaled to length 1 and ranked by absolute value.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store; aligned if it is not.
    count
        Number of entries for each component.
    factor
        ``"W"``, entries by row of the data, or ``"H"``, by column.
    component
        Label of a component, or several of them; all by default.
    labels
        Names of the entries: one for each row (or column), or the name of a coordinate; by
        default the labels of the dimension, otherwise positions.

    Returns
    -------
    Dataset
        Over (chain, draw, component, rank), so that ``.to_dataframe()`` returns a table:
        ``label`` and ``value`` (a above, without unit) of the entry; ``share`` of the
        particles in which it is nonzero and among the largest of that component; ``mean``, its
        value averaged over all particles. The coordinate ``weight`` (chain, draw) is the mass
        of the particle.

    Raises
    ------
    OptionError
        If there are no draws, or an argument is not allowed.

    References
    ----------
    Masood and Doshi-Velez, figure 5. The number of components of each particle that contain a
    word (figure 7) is ``(top["label"] == word).any("rank").sum("component")``.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> dfac.top_entries(trace, count=3)["label"].sizes["rank"]
    3
    """
    count = whole_number("count", count, 1)
    one_of("factor", factor, ("W", "H"))
    run = aligned_run(trace, "a list of entries")
    group, dim = run.posterior, run.dims["WH".index(factor)]
    if FACTOR.format(SIDES["WH".index(factor)]) in group.coords:
        run.require_matrix(f'top_entries(factor="{factor}")')
    chosen = component_positions(group, component)
    names = _entry_labels(group, dim, labels)
    mass = run.masses
    count, width = min(count, group.sizes[dim]), len(chosen)
    at = np.empty((*mass.shape, width, count), dtype=np.int64)
    value = np.empty(at.shape)
    share, mean = np.zeros((width, group.sizes[dim])), np.zeros((width, group.sizes[dim]))
    for where, (W, H, _) in zip(np.ndindex(mass.shape), each_draw(group), strict=True):
        entries = unit_size((W.T if factor == "W" else H)[chosen], run.symmetries.signed)
        weight = mass.values[where]
        mean += weight * entries
        for k, entry_values in enumerate(entries):
            best = _largest(np.abs(entry_values), count)
            at[(*where, k)], value[(*where, k)] = best, entry_values[best]
            share[k, best[entry_values[best] != 0.0]] += weight
    each = np.arange(width)[:, None]
    dims = ("chain", "draw", "component", "rank")
    return xr.Dataset(
        {
            "label": (dims, names[at]),
            "value": (dims, value),
            "share": (dims, share[each, at]),
            "mean": (dims, mean[each, at]),
        },
        coords={
            **mass.coords,
            "weight": mass,
            "component": group["component"].values[chosen],
            "rank": np.arange(1, count + 1),
        },
        attrs={"factor": factor, "dim": dim},
    )


@reads_in_threads
def downstream(
    trace: Trace, score: Score, *, best: Literal["highest", "lowest"] = "highest"
) -> xr.Dataset:
    """Compute a score of the factors for every particle, such as that of a downstream task.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store, read a few draws at a
        time; components are in the order of the trace, see :func:`align`.
    score
        Function of W (I, K) and H (K, J) of one particle that returns a number, or several
        numbers by name, such as one for each class.
    best
        ``"highest"`` or ``"lowest"``, the best score.

    Returns
    -------
    Dataset
        ``value`` (chain, draw, score), in the unit of the score; over ``score``: weighted
        ``mean`` and ``sd`` over particles, ``best``, the best value, and ``best_chain`` and
        ``best_draw``, its particle. Mean and sd are NaN if a value is. The coordinate
        ``weight`` (chain, draw) is the mass of the particle.

    Raises
    ------
    OptionError
        If the run kept no draws, or scores are not numbers or not the same for all particles.

    References
    ----------
    Masood and Doshi-Velez, section 7.2 and figures 6 and 8.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> def error(W, H):
    ...     return np.sqrt(np.mean((V - W @ H) ** 2))
    >>> dfac.downstream(trace, error, best="lowest")["score"].dims
    ('score',)

    Quality of a classification of columns by their weights, with scikit-learn::

        def auc(W, H):
            probabilities = cross_val_predict(
                LogisticRegression(), H.T, topics, cv=5, method="predict_proba"
            )
            return {
                name: roc_auc_score(topics == name, probabilities[:, k])
                for k, name in enumerate(np.unique(topics))
            }

        scores = dfac.downstream(trace, auc)
        scores["best_draw"].to_series()
    """
    one_of("best", best, ("highest", "lowest"))
    run = Run.of(trace, "a score of every draw")
    run.require_matrix("downstream")
    mass = run.masses
    scores = [_scores_of(score(W, H)) for W, H, _ in each_draw(run.posterior)]
    names = list(scores[0])
    if any(set(one) != set(names) for one in scores):
        raise OptionError(
            "score must return the same names for every particle, got "
            f"{sorted(set().union(*scores))} in some and fewer in others; return NaN for a "
            "missing score"
        )
    values = np.array([[one[name] for name in names] for one in scores])
    mean, sd = mean_and_sd(values, mass.values.reshape(-1))
    signed = values if best == "highest" else -values
    valid = ~np.isnan(values)
    if not valid.any(axis=0).all():
        lost = names[int(np.flatnonzero(~valid.any(axis=0))[0])]
        raise OptionError(
            f"the score {lost!r} is not a number for any particle; check its function"
        )
    at = np.where(valid, signed, -np.inf).argmax(axis=0)
    chain, draw = np.unravel_index(at, mass.shape)
    return xr.Dataset(
        {
            "value": (("chain", "draw", "score"), values.reshape(*mass.shape, -1)),
            "mean": ("score", mean),
            "sd": ("score", sd),
            "best": ("score", values[at, np.arange(len(names))]),
            "best_chain": ("score", mass["chain"].values[chain]),
            "best_draw": ("score", mass["draw"].values[draw]),
        },
        coords={**mass.coords, "weight": mass, "score": names},
    )


def _largest(values: Array, count: int) -> NDArray[np.int64]:
    """Return positions of the largest values in descending order; ties go to the first."""
    if count < values.size:
        least = np.partition(values, values.size - count)[values.size - count]
        among = np.flatnonzero(values >= least)
    else:
        among = np.arange(values.size)
    order = np.argsort(-values[among], kind="stable")[:count]
    return np.asarray(among[order], dtype=np.int64)


def _entry_labels(group: xr.Dataset, dim: str, labels: Any) -> NDArray[Any]:
    """Return a label for every entry along a dimension of the data."""
    if labels is None:
        return np.asarray(group[dim].values)
    if isinstance(labels, str):
        fitting = [str(name) for name, one in group.coords.items() if one.dims == (dim,)]
        if labels not in fitting:
            raise OptionError(
                f"labels={labels!r} is not a coordinate of {dim!r}, which has {fitting}; pass one "
                "of these names, or the labels"
            )
        return np.asarray(group[labels].values)
    names = np.asarray(labels)
    if names.shape != (group.sizes[dim],):
        raise OptionError(
            f"labels must be one for each of the {group.sizes[dim]} entries of {dim!r}, got shape "
            f"{names.shape}"
        )
    return names


def _scores_of(result: Any) -> dict[str, float]:
    """Return the scores of one particle by name."""
    named = result if isinstance(result, Mapping) else {"score": result}
    try:
        scores = {str(name): float(value) for name, value in named.items()}
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"score must return a number or a dict of numbers by name, got {result!r}"
        ) from error
    if not scores:
        raise OptionError("score returned an empty dict; return at least one number")
    return scores
