"""What the particles of a posterior say: their largest entries, and how well each serves a purpose.

Masses are those of :func:`daskfactor.results.masses.draw_masses`. The paper's letters are A for W
and W for H.

Source: Masood and Doshi-Velez, "A particle-based variational approach to Bayesian non-negative
matrix factorization", section 7.2.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import whole_number
from daskfactor.errors import OptionError
from daskfactor.results.alignment import law_of
from daskfactor.results.masses import (
    aligned_trace,
    component_positions,
    draw_masses,
    mean_and_sd,
    unit_size,
)
from daskfactor.results.schema import factor_dims
from daskfactor.results.trace import Trace, each_draw, require_draws

Array = NDArray[np.float64]
Score = Callable[[NDArray[Any], NDArray[Any]], float | Mapping[str, float]]


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
    """
    count = whole_number("count", count, 1)
    if factor not in ("W", "H"):
        raise OptionError(f'factor must be "W" or "H", got {factor!r}')
    tree = aligned_trace(trace, "a list of entries")
    group, law = tree["posterior"].to_dataset(), law_of(tree)
    dim = factor_dims(tree)[0 if factor == "W" else 1]
    chosen = component_positions(group, component)
    names = _entry_labels(group, dim, labels)
    mass = draw_masses(tree)
    count, width = min(count, group.sizes[dim]), len(chosen)
    at = np.empty((*mass.shape, width, count), dtype=np.int64)
    value = np.empty(at.shape)
    share, mean = np.zeros((width, group.sizes[dim])), np.zeros((width, group.sizes[dim]))
    for where, (W, H) in zip(np.ndindex(mass.shape), each_draw(group, None), strict=True):
        entries = unit_size((W.T if factor == "W" else H)[chosen], law.signed)
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

    Examples
    --------
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

    References
    ----------
    Masood and Doshi-Velez, section 7.2 and figures 6 and 8.
    """
    if best not in ("highest", "lowest"):
        raise OptionError(f'best must be "highest" or "lowest", got {best!r}')
    tree = require_draws(trace, "a score of every draw")
    group, mass = tree["posterior"].to_dataset(), draw_masses(tree)
    found = [_scores_of(score(W, H)) for W, H in each_draw(group, None)]
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
