r"""Components under one name over draws and chains: permutation, sign and scale resolved.

W, H here are one draw, (I, K) and (K, J). The cosine of two rank-one matrices is
the product of the cosines of their factors,

.. math:: \cos(w h^T, w' h'^T) = \cos(w, w') \cos(h, h'),

which no scale and no common change of sign alters; the order that makes the sum of
these largest is found by the Hungarian method. Masood and Doshi-Velez compare columns
of W alone, and minimise the sum of the angles between them (section 7.2, footnote 5).
"""

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import scipy
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import one_of
from daskfactor.errors import OptionError
from daskfactor.results.schema import COARSE, MOMENTS, STEIN, component_labels, tree_of
from daskfactor.results.stacks import indexed
from daskfactor.results.tensors import level_scales, rescaled
from daskfactor.results.trace import (
    Law,
    Run,
    Running,
    Trace,
    Weights,
    batches_of_draws,
    each_draw,
    factors_of,
    reads_here,
    relative,
    weighted_batches,
)

Array = NDArray[Any]
Factors = tuple[ArrayLike, ArrayLike]
By = Literal["both", "w"]

COARSE_GROUPS: Final = (COARSE, "alignment_coarse")
"""Draws of a coarse chain, which an aligned trace does not have, and their alignment before."""
ROUNDS: Final = 6
"""Passes over all draws after which the reference is taken as it is."""
_EACH: Final = ("chain", "draw", "component")


class Reference(NamedTuple):
    """What draws are compared with: columns of W, rows of H, of length one (or zero)."""

    W: Array
    H: Array


class Match(NamedTuple):
    """How a draw has to be changed: W_k = W[:, permutation_k] factor_k, H_k likewise / factor_k.

    Attributes
    ----------
    permutation, factor, similarity
        Over components, (K,); the similarity is cos(w) cos(h) of what is put there, or
        cos(w) where W alone is compared.
    present
        Whether any component of the draw has all these cosines at the threshold or above.
    matched
        Whether the one that is put there has.
    """

    permutation: NDArray[np.int64]
    factor: NDArray[np.float64]
    similarity: NDArray[np.float64]
    present: NDArray[np.bool_]
    matched: NDArray[np.bool_]


Matching = Callable[..., Match]


def reference_from(W: Array, H: Array) -> Reference:
    """The reference that a pair of factors is."""
    return Reference(unit(W, 0), unit(H, 1))


def unit(factor: Array, axis: int) -> Array:
    """The vectors along an axis made of length 1; of nothing but zeros as they are."""
    length = np.linalg.norm(factor, axis=axis, keepdims=True)
    return np.asarray(factor / np.where(length > 0, length, 1.0))


def match(
    W: Array, H: Array, reference: Reference, law: Law, threshold: float, by: By = "both"
) -> Match:
    """Find the order, sign and scale of a draw, or of several.

    Parameters
    ----------
    W, H
        The draws, (..., I, K) and (..., K, J).
    reference
        Of the shape of one.
    law
        Which components may move.
    threshold
        Cosine from which on a component is taken to be the reference's.
    by
        ``"both"``: the sum of the products of cosines is made largest; ``"w"``: the sum
        of the angles between columns of W (their lines, where they have signs), least.

    Returns
    -------
    Match
        Of arrays (..., K).
    """
    count = W.shape[-1]
    cos_w = np.asarray(reference.W.T @ unit(W, -2), dtype=np.float64)
    cos_h = np.asarray(reference.H @ unit(H, -1).swapaxes(-1, -2), dtype=np.float64)
    if by == "w":  # as if H were alike everywhere
        cos_h = np.where(cos_w < 0, -1.0, 1.0) if law.signed else np.ones_like(cos_w)
    both = cos_w * cos_h
    cost = np.arccos(np.clip(both, -1.0, 1.0)) if by == "w" else -both
    cost = np.nan_to_num(cost, nan=2.0)  # what is not finite resembles nothing
    permutation = best_order(cost, law)

    def chosen(each: Array) -> Array:
        return np.asarray(np.take_along_axis(each, permutation[..., None], -1)[..., 0])

    factor = np.ones(permutation.shape)
    if not law.simplex:  # both of one size
        of_w, of_h = sizes(W, H, law.signed)
        usable = (of_w > 0) & (of_h > 0)
        ratio = np.where(usable, of_h, 1.0) / np.where(usable, of_w, 1.0)
        root = np.take_along_axis(np.sqrt(ratio), permutation, -1)
        factor[..., law.free] = root[..., law.free]
    if law.signed:
        turned = (chosen(cos_w) + chosen(cos_h))[..., law.free] < 0
        factor[..., law.free] *= np.where(turned, -1.0, 1.0)
    nearness = np.maximum(np.minimum(cos_w, cos_h), np.minimum(-cos_w, -cos_h))
    alike: NDArray[np.bool_] = np.asarray(nearness >= threshold)
    mine = np.zeros((count, count), dtype=bool)
    mine[np.ix_(law.free, law.free)] = True
    np.fill_diagonal(mine, True)
    present = np.asarray((alike & mine).any(axis=-1))
    return Match(permutation, factor, chosen(both), present, chosen(alike))


def best_order(cost: Array, law: Law) -> NDArray[np.int64]:
    """The order of components that makes the sum of costs (..., K, K) least; frozen ones stay."""
    order = np.broadcast_to(np.arange(cost.shape[-1]), cost.shape[:-1]).copy()
    if law.free.size > 1:
        inside = cost[..., law.free[:, None], law.free]
        free = inside.reshape(-1, law.free.size, law.free.size)
        best = [law.free[scipy.optimize.linear_sum_assignment(each)[1]] for each in free]
        order[..., law.free] = np.reshape(best, (*order.shape[:-1], -1))
    return order


def sizes(W: Array, H: Array, signed: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums over the columns of W and rows of H; their lengths where factors have signs."""
    if signed:
        W, H = W.astype(np.float64), H.astype(np.float64)
        return np.linalg.norm(W, axis=-2), np.linalg.norm(H, axis=-1)
    return W.sum(axis=-2, dtype=np.float64), H.sum(axis=-1, dtype=np.float64)


def rearranged(W: Array, H: Array, found: Match) -> tuple[Array, Array]:
    """Return draws in the reference's order, sign and scale; copies of the same dtype."""
    factor, order = found.factor.astype(W.dtype), found.permutation
    new_w = np.take_along_axis(W, order[..., None, :], -1) * factor[..., None, :]
    return new_w, np.take_along_axis(H, order[..., None], -2) / factor[..., None]


@reads_here
def align(
    trace: Trace,
    reference: Trace | xr.Dataset | Factors | None = None,
    *,
    threshold: float = 0.8,
    by: By = "both",
) -> xr.DataTree:
    r"""Give components one order, sign and scale over all draws and chains.

    .. math:: \pi = \arg\max_\pi \sum_k \cos(w_{\pi(k)}, w'_k) \cos(h_{\pi(k)}, h'_k),
        \qquad w_k \leftarrow c\, w_{\pi(k)}, \quad h_k \leftarrow h_{\pi(k)} / c

    Every draw is matched with a reference W', H' by the Hungarian method, and c makes
    sum_i W_ik equal to sum_j H_kj; where factors are real-valued, c makes their lengths
    equal and its sign is that of the reference. Under a `SILFNMF` c is 1, since columns of W
    add up to 1 there. WH of every draw stays what it was. Frozen components and biases keep
    their place and scale. Without a reference, the other components come in the order of their
    weight, that which carries most of the mean of WH first: these are the names of components
    in figures, lists and reports. Particles count by their weight wherever draws are averaged.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store; then the result is
        as lazy as it was, and draws are read a few at a time.
    reference
        Factors to name the components after: a trace (aligned by itself first if it has
        not been), a Dataset with ``W`` and ``H`` as :func:`optimize` returns it, or
        a pair (W, H) of arrays (I, K) and (K, J). By default an iterated mean: it starts
        at the draw with the highest ``lp`` (of particles: the largest weight), becomes the
        mean over its chain, and then, for each component, the mean over the draws of all
        chains in which it appears.
    threshold
        A component appears in a draw if some component of the draw has a cosine of
        at least this with it in W and in H.
    by
        ``"both"``, or ``"w"`` to look at W alone, as the paper does with topics: the sum of
        the angles between its columns is made least, and ``threshold`` is about W.

    Returns
    -------
    DataTree
        The trace with ``posterior`` aligned, ``posterior_moments`` taken anew from the aligned
        draws, without ``posterior_coarse``, without ``stein`` if any particle's order changed, and
        a group
        ``alignment``: ``permutation`` (chain, draw, component), the position in the
        input of what is now component k; ``factor`` (chain, draw, component), c above;
        ``similarity`` (chain, draw, component), the product of the two cosines (the one of
        W, if ``by="w"``);
        ``share`` (component) and ``share_by_chain`` (chain, component), of the draws in
        which the component appears (of particles, of their mass); ``drawn_position`` (chain,
        draw, component) and ``drawn_scale`` (chain, draw, side, component), the position among
        the components as the run drew them and what W and H (of a tensor, the factor of each
        axis) were multiplied with since, also where a trace is aligned that has been before.

    Raises
    ------
    OptionError
        If the run kept no draws, or the reference does not fit.

    Notes
    -----
    A mean over draws of W alone is meaningful after this, as far as ``share`` is
    near 1. A component with a share of one over the number of chains is one that a
    single chain has found. Masood and Doshi-Velez, section 7.2 and footnote 5, for ``by="w"``.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), chains=2, **run)
    >>> aligned = dfac.align(trace)
    >>> aligned["alignment"]["similarity"].dims
    ('chain', 'draw', 'component')
    """
    if not 0.0 < threshold <= 1.0:
        raise OptionError(f"threshold is a cosine above 0 and up to 1, got {threshold!r}")
    one_of("by", by, ("both", "w"), ", the factors that are compared")
    run = Run.of(trace, "an alignment")
    law, group, levels = run.law, run.posterior, None
    if run.axes is not None:
        scales = level_scales(group, run.axes)
        group, law = rescaled(group, run.axes, scales), law._replace(simplex=True)
        levels = np.stack([one.transpose(*_EACH).values for one in scales], 2)
    matching = partial(match, law=law, threshold=threshold, by=by)
    if reference is None:
        target = _iterated_mean(run, group, matching)
    else:
        target = _given(reference, group)
    masses = relative(group, run.weights)
    found, moments = _all_matches(group, masses, target, matching)
    if reference is None:
        order = _by_weight(run, moments, law)
        found = Match._make(each[..., order] for each in found)
        moments = moments.isel(component=order).assign_coords(
            {name: own for name, own in moments.coords.items() if "component" in own.dims}
        )
    groups = {name: own for name, own in run.groups.items() if name not in COARSE_GROUPS}
    before = since_drawn(groups["alignment"]) if run.is_aligned else None
    groups["alignment"] = _described(group, masses, found, threshold, by).assign(
        _drawn(found, levels, before)
    )
    scales_of = found.factor, 1.0 / found.factor
    groups["posterior"] = _moved(group, found.permutation, scales_of, law.signed)
    groups[MOMENTS] = _with_unordered(moments, run.group(MOMENTS))
    if (found.permutation != np.arange(found.permutation.shape[-1])).any():
        groups.pop(STEIN, None)  # that was of the particles in their old order
    return indexed(tree_of(groups, run.attrs))


def as_drawn(tree: xr.DataTree) -> xr.DataTree:
    """Return a trace in the order and scale in which its run drew it, without an alignment.

    A trace that is not aligned comes back as it is. Of an aligned one, entries differ from those
    that were drawn by rounding; moments, which are those of aligned draws, are left out.
    """
    run = Run(tree)
    if not run.is_aligned:
        return tree
    gone = (MOMENTS, "alignment", *COARSE_GROUPS)
    groups = {name: own for name, own in run.groups.items() if name not in gone}
    position, scale = since_drawn(run.group("alignment"))
    back = np.argsort(position, axis=-1)
    undo = 1.0 / np.take_along_axis(scale, back[:, :, None], -1)
    if run.axes is None:
        scales = undo[:, :, 0], undo[:, :, 1]
        groups["posterior"] = _moved(run.posterior, back, scales, run.law.signed)
    else:
        ones = np.ones(back.shape)
        moved = _moved(run.posterior, back, (ones, ones), run.law.signed)
        each = [xr.DataArray(own, dims=_EACH) for own in np.moveaxis(undo, 2, 0)]
        groups["posterior"] = rescaled(moved, run.axes, each)
    return tree_of(groups, tree.attrs)


def _drawn(
    found: Match, levels: Array | None, before: tuple[Array, Array] | None
) -> dict[str, tuple[tuple[str, ...], Array, dict[str, str]]]:
    """Describe where components were when the run drew them, and how their scale differs."""
    order = found.permutation
    scale = np.stack([found.factor, 1.0 / found.factor], 2) if levels is None else levels
    if levels is not None:
        scale = np.take_along_axis(scale, order[:, :, None], -1)
    if before is not None:
        order = np.take_along_axis(before[0], order, -1)
        scale = scale * np.take_along_axis(before[1], found.permutation[:, :, None], -1)
    told = "what each factor was multiplied with since it was drawn"
    return {
        "drawn_position": (_EACH, order, {"description": "position as drawn by the run"}),
        "drawn_scale": ((*_EACH[:2], "side", _EACH[2]), scale, {"description": told}),
    }


def since_drawn(alignment: xr.Dataset) -> tuple[Array, Array]:
    """Positions of components as drawn, and scales (chain, draw, side, component) since then.

    Alignments of version 0.1.0 tell those of the trace that was given.
    """
    if "drawn_scale" in alignment:
        scale = alignment["drawn_scale"].transpose(*_EACH[:2], "side", _EACH[2]).values
        return alignment["drawn_position"].transpose(*_EACH).values, scale
    factor = alignment["factor"].transpose(*_EACH).values
    order = alignment["permutation"].transpose(*_EACH).values
    return order, np.stack([factor, 1.0 / factor], 2)


def _moved(
    group: xr.Dataset, order: NDArray[np.int64], scales: tuple[Array, Array], signed: bool
) -> xr.Dataset:
    """Give the components of draws another order, and W and H other scales.

    What else a component has, such as its prior's rate, goes with it, in the scale drawn.
    """
    others = (key for key, own in group.data_vars.items() if "component" in own.dims)
    parts = dict.fromkeys(map(str, others), np.ones(order.shape))
    parts |= dict(zip("WH", scales, strict=True))
    if signed:  # links add to prior means of W; of gamma priors, to logarithms of these
        links = dict(zip(("link_w", "link_h"), scales, strict=True))
        parts |= {link: scale for link, scale in links.items() if link in parts}
    return group.assign({n: _rearranged(group[n], order, scale) for n, scale in parts.items()})


def _by_weight(run: Run, moments: xr.Dataset, law: Law) -> NDArray[np.int64]:
    """The order in which components that may move carry less and less of the mean of WH."""
    W, H = run.mean_factors(moments)
    of_w, of_h = sizes(W, H, law.signed)
    order = np.arange(W.shape[1])
    order[law.free] = law.free[np.argsort(-(of_w * of_h)[law.free], kind="stable")]
    return order


def _with_unordered(moments: xr.Dataset, own: xr.Dataset) -> xr.Dataset:
    """Moments of aligned draws, with those of the run that no order of components touches."""
    kept = [name for name, of in own.data_vars.items() if "component" not in of.dims]
    return moments.assign({name: own[name] for name in kept if name not in moments})


def _given(reference: Any, group: xr.Dataset) -> Reference:
    """The reference that the caller named, checked.

    Raises
    ------
    OptionError
        If it is none, of another shape, or not finite.
    """
    if isinstance(reference, xr.DataTree | str | PathLike):
        aligned = aligned_run(reference, "an alignment")
        W, H = aligned.mean_factors(aligned.group(MOMENTS))
    elif isinstance(reference, xr.Dataset) and {"W", "H"} <= set(reference.data_vars):
        W = reference["W"].transpose(..., "component").values
        H = reference["H"].transpose("component", ...).values
    elif isinstance(reference, tuple | list) and len(reference) == 2:
        W, H = np.asarray(reference[0]), np.asarray(reference[1])
    else:
        raise OptionError(
            "reference must be a trace or its path, a Dataset with W and H, or a pair (W, H), "
            f"got {type(reference).__name__}"
        )
    shapes = tuple(factor.shape[2:] for factor in factors_of(group))
    if (W.shape, H.shape) != shapes:
        raise OptionError(
            f"the reference has W and H of shapes {W.shape} and {H.shape}, the trace "
            f"{shapes[0]} and {shapes[1]}: pass one of the same data and number of components"
        )
    if not (np.isfinite(W).all() and np.isfinite(H).all()):
        raise OptionError("the reference holds values that are not finite; pass finite factors")
    dtype = group["W"].dtype
    return reference_from(W.astype(dtype), H.astype(dtype))


def _best_draw(run: Run) -> tuple[int, int]:
    """Positions of the chain and draw of most weight, then of highest density."""
    draws, weights = run.posterior, run.weights
    shape = draws.sizes["chain"], draws.sizes["draw"]
    allowed = np.ones(shape, dtype=bool) if weights is None else weights == weights.max()
    # Where no density is known: the last draw of the first chain, the first of most weight.
    at = shape[1] - 1 if weights is None else int(allowed.argmax())
    if "lp" in run.stats:
        # Of draws whose labels were changed nothing is found.
        lp = run.stats["lp"].reindex(chain=draws["chain"], draw=draws["draw"])
        density = np.where(allowed, lp.transpose("chain", "draw").values, np.nan)
        if np.isfinite(density).any():
            at = int(np.nanargmax(density))
    return at // shape[1], at % shape[1]


def _iterated_mean(run: Run, group: xr.Dataset, matching: Matching) -> Reference:
    """The mean of the aligned draws, each component over the draws in which it appears."""
    chain, draw = _best_draw(run)
    alone, weights = group.isel(chain=[chain]), run.weights
    reference = reference_from(*next(each_draw(alone.isel(draw=[draw]))))
    # The start is a single, noisy draw: every draw counts, however far from it.
    every = partial(matching, threshold=-np.inf)
    of_chain = None if weights is None else weights[[chain]]
    reference, _ = _round(alone, of_chain, reference, every)
    before: list[bytes] = []
    for _ in range(ROUNDS):
        reference, orders = _round(group, weights, reference, matching)
        if orders == before:
            break
        before = orders
    return reference


def _round(
    group: xr.Dataset, weights: Weights | None, reference: Reference, matching: Matching
) -> tuple[Reference, list[bytes]]:
    """The next reference, and the order of every draw with mass under this one."""
    sum_w, sum_h = np.zeros(reference.W.shape), np.zeros(reference.H.shape)
    orders = []
    for (W, H), mass in weighted_batches(group, weights):
        found = matching(W, H, reference)
        new_w, new_h = rearranged(W, H, found)
        weight = mass[:, None] * found.matched
        sum_w += np.einsum("dik,dk->ik", new_w, weight)
        sum_h += np.einsum("dkj,dk->kj", new_h, weight)
        orders.append(found.permutation.tobytes())
    mean = reference_from(sum_w, sum_h)
    # A component that no draw has any more stays what it was.
    lost = ~(np.abs(sum_w).any(axis=0) & np.abs(sum_h).any(axis=1))
    mean.W[:, lost], mean.H[lost] = reference.W[:, lost], reference.H[lost]
    dtype = reference.W.dtype
    return Reference(mean.W.astype(dtype), mean.H.astype(dtype)), orders


def _all_matches(
    group: xr.Dataset, masses: Weights, reference: Reference, matching: Matching
) -> tuple[Match, xr.Dataset]:
    """How every draw has to be changed, and the moments of the draws once they are."""
    factors = dict(zip("WH", factors_of(group), strict=True))
    matches, moments = [], []
    for at in range(group.sizes["chain"]):
        running = {name: Running(factor.shape[2:]) for name, factor in factors.items()}
        done = 0
        for W, H in batches_of_draws(group.isel(chain=[at])):
            matches.append(matching(W, H, reference))
            each = masses[at, done : done + len(W)].tolist()
            for one, values in zip(running.values(), rearranged(W, H, matches[-1]), strict=True):
                for draw, mass in zip(values, each, strict=True):
                    one.add(draw, mass)
            done += len(W)
        moments.append(running)
    stacked = (np.concatenate(one) for one in zip(*matches, strict=True))
    found = Match(*(one.reshape(*masses.shape, -1) for one in stacked))
    variables: dict[str, Any] = {"count": ("chain", (masses > 0).sum(axis=1))}
    for name, factor in factors.items():
        own, dims = [running[name] for running in moments], ("chain", *factor.dims[2:])
        means, spreads = (one.mean for one in own), (one.square / (one.total or 1.0) for one in own)
        for told, of_chains in (("mean", means), ("var", spreads)):
            values = np.stack([each.astype(group["W"].dtype) for each in of_chains])
            variables[f"{name}_{told}"] = dims, values
    return found, xr.Dataset(variables, coords=group.drop_dims("draw").coords)


def _permuted(values: Array, order: Array, by: Array) -> Array:
    """Permute the last axis and multiply it, by a function of the module: graphs are pickled."""
    return np.asarray(np.take_along_axis(values, order, -1) * by.astype(values.dtype))


def _rearranged(
    array: xr.DataArray, permutation: NDArray[np.int64], factor: NDArray[np.float64]
) -> xr.DataArray:
    """Components in their new order and scale, (chain, draw, component); as lazy as it was."""
    changed: xr.DataArray = xr.apply_ufunc(
        _permuted,
        array if array.chunks is None else array.chunk(component=-1),
        *(xr.DataArray(own, dims=_EACH) for own in (permutation, factor)),
        input_core_dims=[["component"]] * 3,
        output_core_dims=[["component"]],
        dask="parallelized",
        output_dtypes=[array.dtype],
        keep_attrs=True,
    )
    return changed.transpose(*array.dims)


def _described(
    group: xr.Dataset, masses: Weights, found: Match, threshold: float, by: By
) -> xr.Dataset:
    """The group that tells what was done."""

    def share(axes: tuple[int, ...]) -> Weights:
        with np.errstate(invalid="ignore"):  # a chain without mass has none
            held = (found.present * masses[..., None]).sum(axis=axes)
            return np.asarray(held / np.asarray(masses.sum(axis=axes))[..., None])

    cosine = "cosine with the reference in W" + (" times that in H" if by == "both" else "")
    appears = "draws in which the component appears"
    by_chain = ("chain", "component")
    told = {
        "permutation": (_EACH, "position in the input of what is now this component"),
        "factor": (_EACH, "what its column of W was multiplied with, and its row of H divided by"),
        "similarity": (_EACH, cosine),
        "share": (("component",), f"share of all {appears}"),
        "share_by_chain": (by_chain, f"share of a chain's {appears}"),
    }
    values = found._asdict() | {"share": share((0, 1)), "share_by_chain": share((1,))}
    return xr.Dataset(
        {name: (dims, values[name], {"description": doc}) for name, (dims, doc) in told.items()},
        coords=group.drop_dims(set(group.dims) - set(_EACH)).coords,
        attrs={"threshold": threshold, "by": by},
    )


def mean_and_sd(values: Array, weight: Array) -> tuple[Array, Array]:
    """Over the first axis, with probability masses (M,)."""
    mean = weight @ values
    return mean, np.sqrt(weight @ (values - mean) ** 2)


def aligned_run(trace: Trace, purpose: str) -> Run:
    """Read a trace that holds draws, aligned if it has not been."""
    run = Run.of(trace, purpose)
    return run if run.is_aligned else Run(align(run.tree))


def component_positions(group: xr.Dataset, component: Any) -> list[int]:
    """Positions of the components of these labels; of all for None.

    Raises
    ------
    OptionError
        If there is no such component.
    """
    known, called = group["component"].values.tolist(), component_labels(group)
    if component is None:
        return list(range(len(known)))
    wanted = np.atleast_1d(np.asarray(component)).tolist()
    wanted = [known[called.index(one)] if one in called else one for one in wanted]
    missing = [one for one in wanted if one not in known]
    if missing or not wanted:
        raise OptionError(f"there is no component {missing}; this trace has the components {known}")
    return [known.index(one) for one in wanted]


def unit_size(components: NDArray[Any], signed: bool) -> Array:
    """Components (K, n) that add up to 1 each, of length 1 if they are real-valued."""
    values = components.astype(np.float64)
    if signed:
        return unit_length(values)
    total = values.sum(axis=1, keepdims=True)
    return np.asarray(values / np.where(total > 0, total, 1.0))


def unit_length(components: NDArray[Any]) -> Array:
    """Components (K, n) of length 1; of nothing but zeros as they are."""
    return unit(components.astype(np.float64), 1)
