"""How far particles are from each other, and what each says: components, entries, scores.

Masses are those of `daskfactor.results.trace.Run.masses`. The paper's letters are A for W
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
from daskfactor.data.coupled import FACTOR, SIDES
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
from daskfactor.results.trace import Law, Run, Trace, each_draw, reads_here

Array = NDArray[np.float64]
Side = Literal["W", "H"]

APPEARS: Final = 0.8
"""Cosine from which on a component is one of the alignment's, where that does not say."""
BLOCK_BYTES: Final = 2**26
"""Of particles, and of a table of angles between their components, at a time."""


@reads_here
def component_variability(trace: Trace) -> xr.Dataset:
    r"""How much each component differs between particles.

    .. math:: \bar a_k \propto \sum_m p_m\, w^{(m)}_k / \|w^{(m)}_k\|, \qquad
        \bar\alpha_k = \sum_m p_m \angle(w^{(m)}_k, \bar a_k), \qquad
        s_k = \frac{\sum_{ij} w_{ik} h_{kj}}{\sum_{ijk'} w_{ik'} h_{k'j}}

    The mean direction :math:`\bar a_k` is taken over the particles in which the component
    appears to its alignment, so that it is that of one mode, and angles from it over all of
    them. The same for rows of H. Where factors are real-valued, s is the share of the sum of
    squares.

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
        standard deviations are of the particles with their masses, not of an estimate.

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
    group, found = run.posterior, run.group("alignment")
    threshold = float(found.attrs.get("threshold", APPEARS))
    weight = run.masses.values.reshape(-1)
    similarity = found["similarity"].transpose("chain", "draw", "component").values
    counted = similarity.reshape(weight.size, -1) >= threshold**2
    counted |= ~(counted & (weight > 0)[:, None]).any(axis=0)
    mean_w, mean_h = (np.zeros(()) for _ in range(2))
    for own, on, (W, H) in zip(weight, counted, each_draw(group), strict=True):
        mean_w = mean_w + own * on[:, None] * unit_length(W.T)
        mean_h = mean_h + own * on[:, None] * unit_length(H)
    angles = np.empty((2, *counted.shape))
    intensity, spans = np.empty(counted.shape), axis_spans(run, group)
    for number, (W, H) in enumerate(each_draw(group)):
        angles[0, number] = angle_between(W.T, mean_w)
        angles[1, number] = angle_between(H, mean_h)
        intensity[number] = intensity_shares(W, H, run.law.signed, spans)
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


@reads_here
def pairwise_distances(
    trace: Trace,
    of: Literal["W", "H", "both"] = "W",
    aligned: bool = True,
    *,
    metric: Literal["angle", "euclidean"] = "angle",
    most: int = 200,
) -> xr.DataArray:
    r"""How far every two particles are from each other: the diversity of a posterior.

    .. math:: d(x, y) = \min_\pi \frac1K \sum_k \angle(w^x_k, w^y_{\pi(k)}), \qquad
        d(x, y) = \Big( \min_\pi \sum_k \|w^x_k - w^y_{\pi(k)}\|^2 \Big)^{1/2}

    the second for ``metric="euclidean"``, where columns of W are first made to add up to 1
    (to have length 1 where factors are real-valued) and rows of H take what they are
    divided by. So neither order nor scale nor sign of components matters. Frozen components
    keep their place and scale. Any two particles are matched with each other, not with a
    reference.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store, read a block of draws at
        a time; it need not be aligned.
    of
        ``"W"``, ``"H"``, or ``"both"``: a component's angle is then the mean of both, and one
        order is found for both.
    aligned
        Whether to look for the best order and sign; False takes those of the trace.
    metric
        ``"angle"``, in degrees, or ``"euclidean"``, without unit of W and in the unit of the
        data of H; the two have no sum.
    most
        Largest number of draws that are compared: of more, one in two, in three and so on
        is. Time grows with the square of their number.

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
    group, law = run.posterior, run.law
    total = group.sizes["chain"] * group.sizes["draw"]
    step = -(-total // most)
    if step > 1:
        warnings.warn(
            f"of the {total} draws one in {step} is compared; pass most={total} for all of them",
            SamplingWarning,
            stacklevel=3,
        )
    chosen = np.arange(0, total, step)
    table = np.zeros((chosen.size, chosen.size))
    movable = np.isin(np.arange(law.components), law.free) & (law.signed and aligned)
    either = movable[:, None] & movable  # pairs of components that may change their sign
    parts = _blocks(group, law, chosen.size)
    for number, x in enumerate(parts):
        mine = _read(group, law, sides[of], angle, chosen[x])
        for y in parts[number:]:
            theirs = mine if y == x else _read(group, law, sides[of], angle, chosen[y])
            pairs = zip(mine, theirs, strict=True)
            costs = np.mean([_table(one, other, angle, either) for one, other in pairs], axis=0)
            if angle:  # one sign for W and H
                costs = np.where(either, np.minimum(costs, 180.0 - costs), costs)
            table[x, y] = [[_least(cost, law, angle, aligned) for cost in row] for row in costs]
            table[y, x] = table[x, y].T
    np.fill_diagonal(table, 0.0)
    chain, draw = np.divmod(chosen, group.sizes["draw"])
    labels = {"chain": group["chain"].values[chain], "draw": group["draw"].values[draw]}
    coords = {name: ("draw", one) for name, one in labels.items()}
    coords |= {f"other_{name}": ("other_draw", one) for name, one in labels.items()}
    units = {"angle": "degree", "euclidean": "1" if of == "W" else "of the data"}[metric]
    attrs = {"of": of, "metric": metric, "aligned": int(aligned), "units": units}
    return xr.DataArray(table, coords, ("draw", "other_draw"), name="distance", attrs=attrs)


def _blocks(group: xr.Dataset, law: Law, count: int) -> list[slice]:
    """Parts of the draws, so few at a time that they and a table of two parts fit."""
    K = law.components
    length = sum(
        group[side].isel(chain=0, draw=0).size // group.sizes["component"] for side in "WH"
    )
    block = int(max(1, min(BLOCK_BYTES // (8 * K * length), (BLOCK_BYTES // 8) ** 0.5 // K)))
    return [slice(at, min(at + block, count)) for at in range(0, count, block)]


def _read(
    group: xr.Dataset, law: Law, sides: tuple[Side, ...], angle: bool, chosen: NDArray[np.int64]
) -> list[Array]:
    """Components (draw, K, n) of the chosen draws, a comparison's factors in its scale."""
    chains, draws = np.divmod(chosen, group.sizes["draw"])
    found: list[list[Array]] = [[] for _ in sides]
    for chain in np.unique(chains):
        part = group.isel(chain=[int(chain)], draw=draws[chains == chain])
        for W, H in each_draw(part):
            values = {"W": W.T.astype(np.float64), "H": H.astype(np.float64)}
            if not angle:
                size = np.ones(len(H))
                size[law.free] = sizes(W, H, law.signed)[0][law.free]
                size = np.where(size > 0, size, 1.0)[:, None]
                values = {"W": values["W"] / size, "H": values["H"] * size}
            for out, side in zip(found, sides, strict=True):
                own = values[side][: law.components]
                out.append(unit_length(own) if angle else own)
    return [np.stack(out) for out in found]


def _table(left: Array, right: Array, angle: bool, either: NDArray[np.bool_]) -> Array:
    """Angles, or squared distances, of all pairs of components of two blocks: (x, y, K, K)."""
    (x, K, n), y = left.shape, len(right)
    products = (left.reshape(-1, n) @ right.reshape(-1, n).T).reshape(x, K, y, K).swapaxes(1, 2)
    own, other = (np.einsum("mkn,mkn->mk", one, one) for one in (left, right))
    own, other = own[:, None, :, None], other[None, :, None, :]
    if angle:
        angles = np.degrees(np.arccos(np.clip(products, -1.0, 1.0)))
        return np.where((own == 0) & (other == 0), 0.0, angles)
    return np.asarray(own + other - 2.0 * np.where(either, np.abs(products), products))


def _least(cost: Array, law: Law, angle: bool, aligned: bool) -> float:
    """Distance of two particles from the costs (K, K) of their components."""
    order = best_order(cost, law) if aligned else np.arange(law.components)
    total = float(cost[np.arange(law.components), order].sum())
    return total / law.components if angle else max(total, 0.0) ** 0.5


def angle_between(left: NDArray[Any], right: NDArray[Any]) -> Array:
    """Angles in degrees between components (K, n); between nothing and something 90."""
    u, v = unit_length(left), unit_length(right)
    apart, together = np.linalg.norm(u - v, axis=1), np.linalg.norm(u + v, axis=1)
    return np.asarray(np.degrees(2.0 * np.arctan2(apart, together)))


def intensity_shares(
    W: NDArray[Any], H: NDArray[Any], signed: bool, spans: Sequence[slice] = (slice(None),)
) -> Array:
    """Share of the total intensity that each component carries, (K,).

    ``spans`` are the columns of H of each further axis of a tensor.
    """
    parts = [sizes(W, H[:, span], signed) for span in spans]
    of_w, of_h = parts[0][0], np.prod([own for _, own in parts], axis=0)
    each = (of_w * of_h) ** (2 if signed else 1)
    total = float(each.sum())
    return np.asarray(each / total) if total > 0 else np.full(each.shape, 1.0 / each.size)


Score = Callable[[NDArray[Any], NDArray[Any]], float | Mapping[str, float]]


@reads_here
def top_entries(
    trace: Trace,
    count: int = 15,
    factor: Literal["W", "H"] = "W",
    component: Any = None,
    labels: Hashable | ArrayLike | None = None,
) -> xr.Dataset:
    r"""The largest entries of every component in every particle: words, genes, pixels, days.

    .. math:: a_{ik} = w_{ik} / \textstyle\sum_{i'} w_{i'k}, \qquad
        {\rm share}_{ik} = \sum_m p_m\, [\, a^{(m)}_{ik} \text{ is among the largest} \,]

    with the masses :math:`p_m` of the particles, components aligned; a row of H likewise.
    Real-valued factors are put to length 1, and the largest are those of largest size.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store; aligned if it is not.
    count
        How many entries of each component.
    factor
        ``"W"``, entries by row of the data, or ``"H"``, by column.
    component
        Label of a component, or several of them; all by default.
    labels
        What entries are called: one name for each row (or column), or the name of a
        coordinate of them; by default the labels of that dimension, else positions.

    Returns
    -------
    Dataset
        Over (chain, draw, component, rank), so that ``.to_dataframe()`` is a table of it:
        ``label`` and ``value`` (a above, without unit) of the entry; ``share`` of the
        particles in which it is among the largest of that component, an entry of 0 never
        being so; ``mean``, its value averaged over all particles. The coordinate ``weight``
        (chain, draw) is the particle's mass.

    Raises
    ------
    OptionError
        If there are no draws, or an argument is not allowed.

    References
    ----------
    Masood and Doshi-Velez, figure 5. In how many components of each particle a word comes
    up, figure 7, is ``(top["label"] == word).any("rank").sum("component")``.

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
    for where, (W, H) in zip(np.ndindex(mass.shape), each_draw(group), strict=True):
        entries = unit_size((W.T if factor == "W" else H)[chosen], run.law.signed)
        weight = mass.values[where]
        mean += weight * entries
        for k, own in enumerate(entries):
            best = _largest(np.abs(own), count)
            at[(*where, k)], value[(*where, k)] = best, own[best]
            share[k, best[own[best] != 0.0]] += weight
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


@reads_here
def downstream(
    trace: Trace, score: Score, *, best: Literal["highest", "lowest"] = "highest"
) -> xr.Dataset:
    """How well every particle serves a purpose: a score of its factors, particle by particle.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store, read a few draws at a
        time; components come in the trace's own order, see :func:`align`.
    score
        Called with W (I, K) and H (K, J) of one particle; returns a number, or several of
        them under their names, such as one for each class.
    best
        Whether the highest or the lowest score is the best.

    Returns
    -------
    Dataset
        ``value`` (chain, draw, score), in the score's unit; over ``score``: ``mean`` and
        ``sd`` over particles with their masses, ``best``, the best value, and ``best_chain``
        and ``best_draw``, the particle that has it. A value that is not a number makes mean
        and sd none. The coordinate ``weight`` (chain, draw) is the particle's mass.

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

    How well classes are told from the weights of their columns, with scikit-learn::

        def auc(W, H):
            found = cross_val_predict(
                LogisticRegression(), H.T, topics, cv=5, method="predict_proba"
            )
            return {
                name: roc_auc_score(topics == name, found[:, k])
                for k, name in enumerate(np.unique(topics))
            }

        scores = dfac.downstream(trace, auc)
        scores["best_draw"].to_series()
    """
    one_of("best", best, ("highest", "lowest"))
    run = Run.of(trace, "a score of every draw")
    run.require_matrix("downstream")
    mass = run.masses
    found = [_scores_of(score(W, H)) for W, H in each_draw(run.posterior)]
    names = list(found[0])
    if any(set(one) != set(names) for one in found):
        raise OptionError(
            "score must return the same names for every particle, got "
            f"{sorted(set().union(*found))} in some and fewer in others; return NaN for a score "
            "that one particle does not have"
        )
    values = np.array([[one[name] for name in names] for one in found])
    mean, sd = mean_and_sd(values, mass.values.reshape(-1))
    signed = values if best == "highest" else -values
    known = ~np.isnan(values)
    if not known.any(axis=0).all():
        lost = names[int(np.flatnonzero(~known.any(axis=0))[0])]
        raise OptionError(
            f"the score {lost!r} is not a number for any particle; check its function"
        )
    at = np.where(known, signed, -np.inf).argmax(axis=0)
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
    """Positions of the largest values in descending order; of equal ones the first."""
    if count < values.size:
        least = np.partition(values, values.size - count)[values.size - count]
        among = np.flatnonzero(values >= least)
    else:
        among = np.arange(values.size)
    order = np.argsort(-values[among], kind="stable")[:count]
    return np.asarray(among[order], dtype=np.int64)


def _entry_labels(group: xr.Dataset, dim: str, labels: Any) -> NDArray[Any]:
    """One label for every entry along a dimension of the data."""
    if labels is None:
        return np.asarray(group[dim].values)
    if isinstance(labels, str):
        fitting = [str(name) for name, one in group.coords.items() if one.dims == (dim,)]
        if labels not in fitting:
            raise OptionError(
                f"labels={labels!r} is no coordinate of {dim!r}, which has {fitting}; name one of "
                "them, or pass the labels themselves"
            )
        return np.asarray(group[labels].values)
    names = np.asarray(labels)
    if names.shape != (group.sizes[dim],):
        raise OptionError(
            f"labels must be one for each of the {group.sizes[dim]} entries of {dim!r}, got shape "
            f"{names.shape}"
        )
    return names


def _scores_of(found: Any) -> dict[str, float]:
    """Scores of one particle under their names."""
    named = found if isinstance(found, Mapping) else {"score": found}
    try:
        scores = {str(name): float(value) for name, value in named.items()}
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"score must return a number or a dict of numbers by name, got {found!r}"
        ) from error
    if not scores:
        raise OptionError("score returned no scores, an empty dict; return at least one number")
    return scores
