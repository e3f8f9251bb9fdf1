r"""Alignment of components over draws and chains: permutation, sign and scale.

W, H here are one draw, (I, K) and (K, J). The cosine of two rank-one matrices is
the product of the cosines of their factors,

.. math:: \cos(w h^T, w' h'^T) = \cos(w, w') \cos(h, h'),

which does not depend on scales or a common change of sign; the Hungarian method finds the order
that maximises their sum. Masood and Doshi-Velez compare columns
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
from daskfactor.results.tensors import level_scales, rescaled
from daskfactor.runs.schema import COARSE, MOMENTS, STEIN, component_labels, tree_of
from daskfactor.runs.stacks import indexed
from daskfactor.runs.trace import (
    Run,
    Running,
    Symmetries,
    Trace,
    Weights,
    batches_of_draws,
    draw_at,
    factors_of,
    reads_in_threads,
    relative,
)

Array = NDArray[Any]
Factors = tuple[ArrayLike, ArrayLike]
By = Literal["both", "w"]

COARSE_GROUPS: Final = (COARSE, "alignment_coarse")
"""Groups of the coarse chain, which an aligned trace does not have."""
ROUNDS: Final = 6
"""Largest number of passes over all draws that refine the reference."""
_EACH: Final = ("chain", "draw", "component")


class Reference(NamedTuple):
    """Reference for the alignment: columns of W and rows of H, of length one (or zero)."""

    W: Array
    H: Array


class Match(NamedTuple):
    """Alignment of a draw: W_k = W[:, permutation_k] factor_k, H_k = H[permutation_k] / factor_k.

    Attributes
    ----------
    permutation, factor, similarity
        Arrays over components, (K,); the similarity is cos(w) cos(h) with the reference, or
        cos(w) if only W is compared.
    present
        True if some component of the draw reaches the threshold in all these cosines.
    matched
        True if the assigned component does.
    """

    permutation: NDArray[np.int64]
    factor: NDArray[np.float64]
    similarity: NDArray[np.float64]
    present: NDArray[np.bool_]
    matched: NDArray[np.bool_]


Matching = Callable[..., Match]


def reference_from(W: Array, H: Array) -> Reference:
    """Return the reference of a pair of factors."""
    return Reference(unit(W, 0), unit(H, 1))


def unit(factor: Array, axis: int) -> Array:
    """Normalise the vectors along an axis to length 1; zero vectors stay zero."""
    length = np.linalg.norm(factor, axis=axis, keepdims=True)
    return np.asarray(factor / np.where(length > 0, length, 1.0))


def match(
    W: Array,
    H: Array,
    reference: Reference,
    symmetries: Symmetries,
    threshold: float,
    by: By = "both",
) -> Match:
    """Find the order, sign and scale of a draw, or of several.

    Parameters
    ----------
    W, H
        The draws, (..., I, K) and (..., K, J).
    reference
        Reference with the shape of one draw.
    symmetries
        Symmetries of the factorization.
    threshold
        Least cosine similarity of a component with that of the reference.
    by
        ``"both"`` maximises the sum of the products of cosines; ``"w"`` minimises the sum of the
        angles between columns of W (between their lines, if they have signs).

    Returns
    -------
    Match
        Arrays have the shape (..., K).
    """
    count = W.shape[-1]
    cos_w = np.asarray(reference.W.T @ unit(W, -2), dtype=np.float64)
    cos_h = np.asarray(reference.H @ unit(H, -1).swapaxes(-1, -2), dtype=np.float64)
    if by == "w":  # treat all H as equal
        cos_h = np.where(cos_w < 0, -1.0, 1.0) if symmetries.signed else np.ones_like(cos_w)
    both = cos_w * cos_h
    cost = np.arccos(np.clip(both, -1.0, 1.0)) if by == "w" else -both
    cost = np.nan_to_num(cost, nan=2.0)  # no similarity if not finite
    permutation = best_order(cost, symmetries)

    def chosen(each: Array) -> Array:
        return np.asarray(np.take_along_axis(each, permutation[..., None], -1)[..., 0])

    factor = np.ones(permutation.shape)
    if not symmetries.simplex:  # give both the same size
        of_w, of_h = sizes(W, H, symmetries.signed)
        usable = (of_w > 0) & (of_h > 0)
        ratio = np.where(usable, of_h, 1.0) / np.where(usable, of_w, 1.0)
        root = np.take_along_axis(np.sqrt(ratio), permutation, -1)
        factor[..., symmetries.free] = root[..., symmetries.free]
    if symmetries.signed:
        turned = (chosen(cos_w) + chosen(cos_h))[..., symmetries.free] < 0
        factor[..., symmetries.free] *= np.where(turned, -1.0, 1.0)
    nearness = np.maximum(np.minimum(cos_w, cos_h), np.minimum(-cos_w, -cos_h))
    alike: NDArray[np.bool_] = np.asarray(nearness >= threshold)
    mine = np.zeros((count, count), dtype=bool)
    mine[np.ix_(symmetries.free, symmetries.free)] = True
    np.fill_diagonal(mine, True)
    present = np.asarray((alike & mine).any(axis=-1))
    return Match(permutation, factor, chosen(both), present, chosen(alike))


def best_order(cost: Array, symmetries: Symmetries) -> NDArray[np.int64]:
    """Return the order of components that minimises the sum of costs (..., K, K)."""
    order = np.broadcast_to(np.arange(cost.shape[-1]), cost.shape[:-1]).copy()
    if symmetries.free.size > 1:
        inside = cost[..., symmetries.free[:, None], symmetries.free]
        free = inside.reshape(-1, symmetries.free.size, symmetries.free.size)
        best = [symmetries.free[scipy.optimize.linear_sum_assignment(each)[1]] for each in free]
        order[..., symmetries.free] = np.reshape(best, (*order.shape[:-1], -1))
    return order


def sizes(W: Array, H: Array, signed: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the sums of columns of W and rows of H; their lengths if factors have signs."""
    if signed:
        W, H = W.astype(np.float64), H.astype(np.float64)
        return np.linalg.norm(W, axis=-2), np.linalg.norm(H, axis=-1)
    return W.sum(axis=-2, dtype=np.float64), H.sum(axis=-1, dtype=np.float64)


def rearranged(W: Array, H: Array, match: Match) -> tuple[Array, Array]:
    """Return copies of draws in the order, sign and scale of the reference."""
    factor, order = match.factor.astype(W.dtype), match.permutation
    new_w = np.take_along_axis(W, order[..., None, :], -1) * factor[..., None, :]
    return new_w, np.take_along_axis(H, order[..., None], -2) / factor[..., None]


@reads_in_threads
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

    The Hungarian method matches every draw with a reference W', H', and c makes sum_i W_ik
    equal to sum_j H_kj; for real-valued factors c makes their lengths equal and has the sign of
    the reference. For `SILFNMF` c is 1, since columns of W add up to 1. WH of every draw stays
    the same. Frozen components and biases keep their position and scale. Without a reference,
    the other components are sorted by their share of the mean of WH, the largest first: figures,
    lists and reports use this order. Averages over particles use their weights.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store; the result is then lazy, and
        draws are read a few at a time.
    reference
        Factors that define the order: a trace (aligned first if necessary), a Dataset with
        ``W`` and ``H`` as :func:`optimize` returns it, or a pair (W, H) of arrays (I, K) and
        (K, J). By default an iterated mean: it starts with the draw of the highest ``lp`` (for
        particles: the largest weight), continues with the mean over its chain, and then, for
        each component, with the mean over the draws of all chains in which it appears.
    threshold
        A component appears in a draw if some component of the draw has at least this cosine
        similarity with it in W and in H.
    by
        ``"both"``, or ``"w"`` to compare only W, as the paper does with topics: the sum of the
        angles between its columns is minimised, and ``threshold`` applies to W.

    Returns
    -------
    DataTree
        The trace with ``posterior`` aligned, ``posterior_moments`` of the aligned draws, without
        ``posterior_coarse``, without ``stein`` if the order of any particle changed, and with a
        group ``alignment``: ``permutation`` (chain, draw, component), the position of component
        k in the input; ``factor`` (chain, draw, component), c above; ``similarity`` (chain,
        draw, component), the product of the two cosines (only that of W, if ``by="w"``);
        ``share`` (component) and ``share_by_chain`` (chain, component), the share of draws (or
        of the mass of particles) in which the component appears; ``drawn_position`` (chain,
        draw, component) and ``drawn_scale`` (chain, draw, side, component), the position in the
        original draws and the factor that W and H (for a tensor, the factor of each axis) were
        multiplied with since, also if the input was aligned already.

    Raises
    ------
    OptionError
        If the run kept no draws, or the reference does not fit.

    Notes
    -----
    A mean of W over aligned draws is meaningful if ``share`` is near 1. A share of one over the
    number of chains means that only one chain has the component. For ``by="w"``: Masood and
    Doshi-Velez, section 7.2 and footnote 5.

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
        raise OptionError(f"threshold must be a cosine above 0 and up to 1, got {threshold!r}")
    one_of("by", by, ("both", "w"), ", the factors that are compared")
    run = Run.of(trace, "an alignment")
    symmetries, group, levels = run.symmetries, run.posterior, None
    if run.axes is not None:
        scales = level_scales(group, run.axes)
        group, symmetries = rescaled(group, run.axes, scales), symmetries._replace(simplex=True)
        levels = np.stack([one.transpose(*_EACH).values for one in scales], 2)
    matching = partial(match, symmetries=symmetries, threshold=threshold, by=by)
    if reference is None:
        target = _iterated_mean(run, group, matching)
    else:
        target = _checked_reference(reference, group)
    masses = relative(group, run.weights)
    matches, moments = _all_matches(group, masses, target, matching)
    if reference is None:
        order = _order_by_weight(run, moments, symmetries)
        matches = Match._make(each[..., order] for each in matches)
        moments = moments.isel(component=order).assign_coords(
            {name: values for name, values in moments.coords.items() if "component" in values.dims}
        )
    groups = {name: values for name, values in run.groups.items() if name not in COARSE_GROUPS}
    before = since_drawn(groups["alignment"]) if run.is_aligned else None
    groups["alignment"] = _alignment_group(group, masses, matches, threshold, by).assign(
        _original_order(matches, levels, before)
    )
    scales_of = matches.factor, 1.0 / matches.factor
    groups["posterior"] = _reordered(group, matches.permutation, scales_of, symmetries.signed)
    groups[MOMENTS] = _with_other_moments(moments, run.group(MOMENTS))
    if (matches.permutation != np.arange(matches.permutation.shape[-1])).any():
        groups.pop(STEIN, None)  # it describes the particles in their old order
    return indexed(tree_of(groups, run.attrs))


def as_drawn(tree: xr.DataTree) -> xr.DataTree:
    """Return a trace in the original order and scale of its draws, without an alignment.

    An unaligned trace is returned unchanged. Entries of an aligned one differ from the original
    draws by rounding; the moments, which are those of aligned draws, are dropped.
    """
    run = Run(tree)
    if not run.is_aligned:
        return tree
    gone = (MOMENTS, "alignment", *COARSE_GROUPS)
    groups = {name: values for name, values in run.groups.items() if name not in gone}
    position, scale = since_drawn(run.group("alignment"))
    back = np.argsort(position, axis=-1)
    undo = 1.0 / np.take_along_axis(scale, back[:, :, None], -1)
    if run.axes is None:
        scales = undo[:, :, 0], undo[:, :, 1]
        groups["posterior"] = _reordered(run.posterior, back, scales, run.symmetries.signed)
    else:
        ones = np.ones(back.shape)
        moved = _reordered(run.posterior, back, (ones, ones), run.symmetries.signed)
        each = [xr.DataArray(values, dims=_EACH) for values in np.moveaxis(undo, 2, 0)]
        groups["posterior"] = rescaled(moved, run.axes, each)
    return tree_of(groups, tree.attrs)


def _original_order(
    matches: Match, levels: Array | None, before: tuple[Array, Array] | None
) -> dict[str, tuple[tuple[str, ...], Array, dict[str, str]]]:
    """Return position and scale of components relative to the original draws, as variables."""
    order = matches.permutation
    scale = np.stack([matches.factor, 1.0 / matches.factor], 2) if levels is None else levels
    if levels is not None:
        scale = np.take_along_axis(scale, order[:, :, None], -1)
    if before is not None:
        order = np.take_along_axis(before[0], order, -1)
        scale = scale * np.take_along_axis(before[1], matches.permutation[:, :, None], -1)
    description = "what each factor was multiplied with since it was drawn"
    return {
        "drawn_position": (_EACH, order, {"description": "position as drawn by the run"}),
        "drawn_scale": ((*_EACH[:2], "side", _EACH[2]), scale, {"description": description}),
    }


def since_drawn(alignment: xr.Dataset) -> tuple[Array, Array]:
    """Return original positions of components, and scales (chain, draw, side, component).

    Alignments of version 0.1.0 have those of their input.
    """
    if "drawn_scale" in alignment:
        scale = alignment["drawn_scale"].transpose(*_EACH[:2], "side", _EACH[2]).values
        return alignment["drawn_position"].transpose(*_EACH).values, scale
    factor = alignment["factor"].transpose(*_EACH).values
    order = alignment["permutation"].transpose(*_EACH).values
    return order, np.stack([factor, 1.0 / factor], 2)


def _reordered(
    group: xr.Dataset, order: NDArray[np.int64], scales: tuple[Array, Array], signed: bool
) -> xr.Dataset:
    """Reorder the components of draws, and rescale W and H.

    Other variables of components, such as prior rates, are reordered without rescaling.
    """
    others = (key for key, values in group.data_vars.items() if "component" in values.dims)
    parts = dict.fromkeys(map(str, others), np.ones(order.shape))
    parts |= dict(zip("WH", scales, strict=True))
    if signed:  # links add to prior means of W, or to their logarithms for gamma priors
        links = dict(zip(("link_w", "link_h"), scales, strict=True))
        parts |= {link: scale for link, scale in links.items() if link in parts}
    return group.assign({n: _rearranged(group[n], order, scale) for n, scale in parts.items()})


def _order_by_weight(run: Run, moments: xr.Dataset, symmetries: Symmetries) -> NDArray[np.int64]:
    """Return the order that sorts components by their share of the mean of WH."""
    W, H = run.mean_factors(moments)
    of_w, of_h = sizes(W, H, symmetries.signed)
    order = np.arange(W.shape[1])
    order[symmetries.free] = symmetries.free[
        np.argsort(-(of_w * of_h)[symmetries.free], kind="stable")
    ]
    return order


def _with_other_moments(moments: xr.Dataset, run_moments: xr.Dataset) -> xr.Dataset:
    """Add the moments of a run that do not depend on the order of components."""
    names = [name for name, of in run_moments.data_vars.items() if "component" not in of.dims]
    return moments.assign({name: run_moments[name] for name in names if name not in moments})


def _checked_reference(reference: Any, group: xr.Dataset) -> Reference:
    """Return the reference of an argument.

    Raises
    ------
    OptionError
        If it has another type or shape, or is not finite.
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
    """Return chain and draw with the largest weight, and of these the highest density."""
    draws, weights = run.posterior, run.weights
    shape = draws.sizes["chain"], draws.sizes["draw"]
    allowed = np.ones(shape, dtype=bool) if weights is None else weights == weights.max()
    # Without a density: the last draw of the first chain, or the first of the largest weight.
    at = shape[1] - 1 if weights is None else int(allowed.argmax())
    if "lp" in run.stats:
        # Draws with changed labels have no density.
        lp = run.stats["lp"].reindex(chain=draws["chain"], draw=draws["draw"])
        density = np.where(allowed, lp.transpose("chain", "draw").values, np.nan)
        if np.isfinite(density).any():
            at = int(np.nanargmax(density))
    return at // shape[1], at % shape[1]


def _iterated_mean(run: Run, group: xr.Dataset, matching: Matching) -> Reference:
    """Return the mean of the aligned draws; each component over the draws in which it appears."""
    chain, draw = _best_draw(run)
    alone, weights = group.isel(chain=[chain]), run.weights
    reference = reference_from(*draw_at(group, chain, draw))
    # The first reference is a single, noisy draw, so that no threshold applies.
    every = partial(matching, threshold=-np.inf)
    of_chain = None if weights is None else weights[[chain]]
    reference, _ = _refine(alone, of_chain, reference, every)
    before: list[bytes] = []
    for _ in range(ROUNDS):
        reference, orders = _refine(group, weights, reference, matching)
        if orders == before:
            break
        before = orders
    return reference


def _refine(
    group: xr.Dataset, weights: Weights | None, reference: Reference, matching: Matching
) -> tuple[Reference, list[bytes]]:
    """Return the next reference, and the order of every draw with mass under the current one."""
    sum_w, sum_h = np.zeros(reference.W.shape), np.zeros(reference.H.shape)
    orders = []
    for W, H, mass in batches_of_draws(group, weights):
        matches = matching(W, H, reference)
        new_w, new_h = rearranged(W, H, matches)
        weight = mass[:, None] * matches.matched
        sum_w += np.einsum("dik,dk->ik", new_w, weight)
        sum_h += np.einsum("dkj,dk->kj", new_h, weight)
        orders.append(matches.permutation.tobytes())
    mean = reference_from(sum_w, sum_h)
    # Keep a component that no draw has any more.
    lost = ~(np.abs(sum_w).any(axis=0) & np.abs(sum_h).any(axis=1))
    mean.W[:, lost], mean.H[lost] = reference.W[:, lost], reference.H[lost]
    dtype = reference.W.dtype
    return Reference(mean.W.astype(dtype), mean.H.astype(dtype)), orders


def _all_matches(
    group: xr.Dataset, masses: Weights, reference: Reference, matching: Matching
) -> tuple[Match, xr.Dataset]:
    """Return the alignment of all draws, and the moments of the aligned draws."""
    factors = dict(zip("WH", factors_of(group), strict=True))
    matches, moments = [], []
    for at in range(group.sizes["chain"]):
        running = {name: Running(factor.shape[2:]) for name, factor in factors.items()}
        done = 0
        for W, H, _ in batches_of_draws(group.isel(chain=[at])):
            matches.append(matching(W, H, reference))
            each = masses[at, done : done + len(W)].tolist()
            for one, values in zip(running.values(), rearranged(W, H, matches[-1]), strict=True):
                for draw, mass in zip(values, each, strict=True):
                    one.add(draw, mass)
            done += len(W)
        moments.append(running)
    stacked = (np.concatenate(one) for one in zip(*matches, strict=True))
    every = Match(*(one.reshape(*masses.shape, -1) for one in stacked))
    variables: dict[str, Any] = {"count": ("chain", (masses > 0).sum(axis=1))}
    for name, factor in factors.items():
        accumulators, dims = [running[name] for running in moments], ("chain", *factor.dims[2:])
        means, spreads = (
            (one.mean for one in accumulators),
            (one.square / (one.total or 1.0) for one in accumulators),
        )
        for suffix, of_chains in (("mean", means), ("var", spreads)):
            values = np.stack([each.astype(group["W"].dtype) for each in of_chains])
            variables[f"{name}_{suffix}"] = dims, values
    return every, xr.Dataset(variables, coords=group.drop_dims("draw").coords)


def _permuted(values: Array, order: Array, by: Array) -> Array:
    """Permute and scale the last axis; at module level so that graphs can be pickled."""
    return np.asarray(np.take_along_axis(values, order, -1) * by.astype(values.dtype))


def _rearranged(
    array: xr.DataArray, permutation: NDArray[np.int64], factor: NDArray[np.float64]
) -> xr.DataArray:
    """Return an array with reordered and rescaled components; lazy if the input is."""
    changed: xr.DataArray = xr.apply_ufunc(
        _permuted,
        array if array.chunks is None else array.chunk(component=-1),
        *(xr.DataArray(values, dims=_EACH) for values in (permutation, factor)),
        input_core_dims=[["component"]] * 3,
        output_core_dims=[["component"]],
        dask="parallelized",
        output_dtypes=[array.dtype],
        keep_attrs=True,
    )
    return changed.transpose(*array.dims)


def _alignment_group(
    group: xr.Dataset, masses: Weights, matches: Match, threshold: float, by: By
) -> xr.Dataset:
    """Return the group ``alignment``."""

    def share(axes: tuple[int, ...]) -> Weights:
        with np.errstate(invalid="ignore"):  # a chain without mass has none
            mass_present = (matches.present * masses[..., None]).sum(axis=axes)
            return np.asarray(mass_present / np.asarray(masses.sum(axis=axes))[..., None])

    cosine = "cosine with the reference in W" + (" times that in H" if by == "both" else "")
    appears = "draws in which the component appears"
    by_chain = ("chain", "component")
    descriptions = {
        "permutation": (_EACH, "position of this component in the input"),
        "factor": (_EACH, "factor of its column of W, and divisor of its row of H"),
        "similarity": (_EACH, cosine),
        "share": (("component",), f"share of all {appears}"),
        "share_by_chain": (by_chain, f"share of a chain's {appears}"),
    }
    values = matches._asdict() | {"share": share((0, 1)), "share_by_chain": share((1,))}
    return xr.Dataset(
        {
            name: (dims, values[name], {"description": doc})
            for name, (dims, doc) in descriptions.items()
        },
        coords=group.drop_dims(set(group.dims) - set(_EACH)).coords,
        attrs={"threshold": threshold, "by": by},
    )


def mean_and_sd(values: Array, weight: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation over the first axis, with masses (M,)."""
    mean = weight @ values
    return mean, np.sqrt(weight @ (values - mean) ** 2)


def aligned_run(trace: Trace, purpose: str) -> Run:
    """Return a run with draws, aligned if it is not."""
    run = Run.of(trace, purpose)
    return run if run.is_aligned else Run(align(run.tree))


def component_positions(group: xr.Dataset, component: Any) -> list[int]:
    """Return positions of components by label; of all for None.

    Raises
    ------
    OptionError
        If there is no such component.
    """
    labels, titles = group["component"].values.tolist(), component_labels(group)
    if component is None:
        return list(range(len(labels)))
    requested = np.atleast_1d(np.asarray(component)).tolist()
    requested = [labels[titles.index(one)] if one in titles else one for one in requested]
    missing = [one for one in requested if one not in labels]
    if missing or not requested:
        raise OptionError(
            f"there is no component {missing}; this trace has the components {labels}"
        )
    return [labels.index(one) for one in requested]


def unit_size(components: NDArray[Any], signed: bool) -> Array:
    """Normalise components (K, n) to sum 1, or to length 1 if they are real-valued."""
    values = components.astype(np.float64)
    if signed:
        return unit_length(values)
    total = values.sum(axis=1, keepdims=True)
    return np.asarray(values / np.where(total > 0, total, 1.0))


def unit_length(components: NDArray[Any]) -> Array:
    """Normalise components (K, n) to length 1; zero components stay zero."""
    return unit(components.astype(np.float64), 1)
