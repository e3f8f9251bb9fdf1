"""Components under one name over draws and chains: permutation, sign and scale resolved."""

import json
from os import PathLike
from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import ModelError, OptionError
from daskfactor.models import model_from_dict
from daskfactor.results.matching import (
    By,
    Cost,
    Draws,
    Law,
    Match,
    Reference,
    best_draw,
    given_reference,
    iterated_mean,
    rearranged,
    unit,
)
from daskfactor.results.schema import MOMENTS, STEIN, factor_dims
from daskfactor.results.trace import Trace, as_tree, require_draws
from daskfactor.results.weights import draw_weights, over_chains

Array = NDArray[Any]
Factors = tuple[ArrayLike, ArrayLike]

GROUPS: Final = {"posterior": "alignment", "posterior_coarse": "alignment_coarse"}
"""Groups of draws, and where their alignment is put."""


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
    their place and scale. Particles count by their weight wherever draws are averaged.

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
        The trace with ``posterior`` (and ``posterior_coarse``) aligned,
        ``posterior_moments`` taken anew from the aligned draws, without ``stein`` if any
        particle's order changed, and a group
        ``alignment``: ``permutation`` (chain, draw, component), the position in the
        input of what is now component k; ``factor`` (chain, draw, component), c above;
        ``similarity`` (chain, draw, component), the product of the two cosines (the one of
        W, if ``by="w"``);
        ``share`` (component) and ``share_by_chain`` (chain, component), of the draws in
        which the component appears (of particles, of their mass).

    Raises
    ------
    OptionError
        If the run kept no draws, or the reference does not fit.

    Notes
    -----
    A mean over draws of W alone is meaningful after this, as far as ``share`` is
    near 1. A component with a share of one over the number of chains is one that a
    single chain has found. Masood and Doshi-Velez, section 7.2 and footnote 5, for ``by="w"``.
    """
    if not 0.0 < threshold <= 1.0:
        raise OptionError(f"threshold is a cosine above 0 and up to 1, got {threshold!r}")
    if by not in ("both", "w"):
        raise OptionError(f"by must be 'both' or 'w', the factors that are compared, got {by!r}")
    tree = as_tree(trace)
    if "posterior" not in tree.children:
        raise OptionError(
            "this run kept moments only, and components cannot be told apart in means over "
            'draws: run again with keep="draws"'
        )
    tree = require_draws(tree, "an alignment")
    fine = Draws(tree["posterior"].to_dataset(), factor_dims(tree), draw_weights(tree))
    law = law_of(tree)
    cost = Cost(law, threshold, by)
    if reference is None:
        target = iterated_mean(fine, cost, best_draw(tree, fine.weights))
    else:
        target = given_reference(_factors_of(reference), fine)
    groups = {name: node.to_dataset() for name, node in tree.children.items()}
    groups.pop(MOMENTS, None)
    for name, found_name in GROUPS.items():
        if name not in groups or groups[name].sizes["draw"] == 0:
            continue
        draws = fine if name == "posterior" else Draws(groups[name], fine.dims, None)
        found, moments = _all_matches(draws, target, cost)
        groups[name] = _aligned(draws, found)
        groups[found_name] = _described(draws, found, cost)
        if name == "posterior":
            groups[MOMENTS] = moments
    if STEIN in groups and _moved(groups["alignment"]):
        del groups[STEIN]  # that was of the particles in their old order
    aligned = xr.DataTree.from_dict(groups)
    aligned.attrs = dict(tree.attrs)
    return aligned


def _moved(alignment: xr.Dataset) -> bool:
    """Whether any component of any draw changed its place."""
    order = alignment["permutation"].transpose(..., "component").values
    return bool((order != np.arange(order.shape[-1])).any())


def law_of(tree: xr.DataTree) -> Law:
    """Tell which components may change places and sign, from what a run says of its model."""
    width = tree["posterior"].sizes["component"]
    stored = tree.attrs.get("model", "{}")
    try:
        model = model_from_dict(json.loads(stored) if isinstance(stored, str) else stored)
    except (ModelError, TypeError, ValueError):  # factors from elsewhere: all may move
        return Law(np.arange(width), False, width)
    count = min(model.n_components, width)
    free = np.arange(width) < count
    for mask in model.frozen:
        if mask is not None:
            free[: len(mask)] &= ~np.asarray(mask, dtype=bool)[:width]
    return Law(np.flatnonzero(free), not model.nonnegative, count, model.simplex)


def _factors_of(reference: Any) -> tuple[Array, Array]:
    if isinstance(reference, xr.DataTree | str | PathLike):
        tree = as_tree(reference)
        aligned = tree if "alignment" in tree.children else align(tree)
        moments = over_chains(aligned, aligned[MOMENTS].to_dataset())
        row, column = factor_dims(aligned)
        return (
            moments["W_mean"].transpose(row, "component").values,
            moments["H_mean"].transpose("component", column).values,
        )
    if isinstance(reference, xr.Dataset) and {"W", "H"} <= set(reference.data_vars):
        return (
            reference["W"].transpose(..., "component").values,
            reference["H"].transpose("component", ...).values,
        )
    if isinstance(reference, tuple | list) and len(reference) == 2:
        return np.asarray(reference[0]), np.asarray(reference[1])
    raise OptionError(
        "reference must be a trace or its path, a Dataset with W and H, or a pair (W, H), "
        f"got {type(reference).__name__}"
    )


class _Found(NamedTuple):
    """The matches of all draws, (chain, draw, component)."""

    permutation: NDArray[np.int64]
    factor: NDArray[np.float64]
    similarity: NDArray[np.float64]
    present: NDArray[np.bool_]


def _all_matches(draws: Draws, reference: Reference, cost: Cost) -> tuple[_Found, xr.Dataset]:
    """How every draw has to be changed, and the moments of the draws once they are."""
    shape = (*draws.row_factor.shape[:2], draws.row_factor.shape[3])
    found = _Found(
        np.zeros(shape, dtype=np.int64), np.ones(shape), np.zeros(shape), np.zeros(shape, bool)
    )
    moments = []
    for at, chain in enumerate(draws.chains):
        running = _Moments(draws)
        for number, (W, H) in enumerate(draws.of_chain(chain)):
            one = cost.match(W, H, reference)
            _store(found, (at, number), one)
            running.add(*rearranged(W, H, one), float(draws.masses[at, number]))
        moments.append(running.dataset())
    together = xr.concat(moments, dim="chain")
    names = [name for name, coord in draws.group.coords.items() if "draw" not in coord.dims]
    coords = draws.group.coords.to_dataset()[names].coords
    return found, together.assign_coords(coords)


def _store(found: _Found, at: tuple[int, int], one: Match) -> None:
    found.permutation[at] = one.permutation
    found.factor[at] = one.factor
    found.similarity[at] = one.similarity
    found.present[at] = one.present


class _Moments:
    """Mean and sum of squared deviations of the factors of one chain (Welford; West 1979)."""

    def __init__(self, draws: Draws) -> None:
        self.dims = draws.dims
        self.dtype = draws.row_factor.dtype
        self.count = 0
        self.total = 0.0
        self.parts = {
            name: (np.zeros(shape), np.zeros(shape))
            for name, shape in (
                ("W", draws.row_factor.shape[2:]),
                ("H", draws.column_factor.shape[2:]),
            )
        }

    def add(self, W: Array, H: Array, mass: float) -> None:
        if mass == 0:
            return
        self.count += 1
        self.total += mass
        for values, (mean, square) in zip((W, H), self.parts.values(), strict=True):
            delta = values - mean
            mean += delta / (self.total / mass)
            square += mass * delta * (values - mean)

    def dataset(self) -> xr.Dataset:
        dims = {"W": (self.dims[0], "component"), "H": ("component", self.dims[1])}
        variables: dict[str, Any] = {"count": ((), np.int64(self.count))}
        for name, (mean, square) in self.parts.items():
            variables[f"{name}_mean"] = (dims[name], mean.astype(self.dtype))
            variables[f"{name}_var"] = (
                dims[name],
                (square / (self.total or 1.0)).astype(self.dtype),
            )
        return xr.Dataset(variables)


def _aligned(draws: Draws, found: _Found) -> xr.Dataset:
    """The group with its factors rearranged: lazily where they were lazy, else as a copy."""
    parts = {"W": found.factor, "H": 1.0 / found.factor}
    return draws.group.assign(
        {name: _rearranged(draws.group[name], found.permutation, by) for name, by in parts.items()}
    )


def _rearranged(
    array: xr.DataArray, permutation: NDArray[np.int64], factor: NDArray[np.float64]
) -> xr.DataArray:
    """Components in their new order and scale, (chain, draw, component); as lazy as it was."""
    dims = ("chain", "draw", "component")
    changed: xr.DataArray = xr.apply_ufunc(
        lambda values, order, by: np.take_along_axis(values, order, -1) * by.astype(values.dtype),
        array if array.chunks is None else array.chunk(component=-1),
        *(xr.DataArray(own, dims=dims) for own in (permutation, factor)),
        input_core_dims=[["component"]] * 3,
        output_core_dims=[["component"]],
        dask="parallelized",
        output_dtypes=[array.dtype],
        keep_attrs=True,
    )
    return changed.transpose(*array.dims)


def _described(draws: Draws, found: _Found, cost: Cost) -> xr.Dataset:
    """The group that tells what was done."""
    dims = ("chain", "draw", "component")
    docs = {
        "permutation": "position in the input of what is now this component",
        "factor": "what its column of W was multiplied with, and its row of H divided by",
        "similarity": "cosine with the reference in W times that in H",
    }
    if cost.by == "w":
        docs["similarity"] = "cosine with the reference in W"
    mass = draws.masses
    variables: dict[str, Any] = {
        name: (dims, getattr(found, name), {"description": doc}) for name, doc in docs.items()
    }
    variables["share"] = (
        ("component",),
        _share(found.present, mass, (0, 1)),
        {"description": "share of all draws in which the component appears"},
    )
    variables["share_by_chain"] = (
        ("chain", "component"),
        _share(found.present, mass, (1,)),
        {"description": "share of a chain's draws in which the component appears"},
    )
    own = {"chain", "draw", "component"}
    names = [name for name, coord in draws.group.coords.items() if set(coord.dims) <= own]
    coords = draws.group.coords.to_dataset()[names].coords
    return xr.Dataset(variables, coords=coords, attrs={"threshold": cost.threshold, "by": cost.by})


def _share(
    present: NDArray[np.bool_], mass: NDArray[np.float64], axes: tuple[int, ...]
) -> NDArray[np.float64]:
    """Share of the mass over some axes, (..., component); NaN where there is no mass."""
    total = np.asarray(mass.sum(axis=axes))[..., None]
    found = (present * mass[..., None]).sum(axis=axes)
    return np.asarray(np.divide(found, total, out=np.full(found.shape, np.nan), where=total > 0))


def draw_masses(trace: Trace) -> xr.DataArray:
    """Probability mass of every draw, adding up to 1; equal for a run whose draws have none.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store. Of a selection of its draws the masses
        are made to add up to 1 again.

    Returns
    -------
    DataArray
        (chain, draw).

    Raises
    ------
    OptionError
        If there are no draws, or their masses are all 0.
    StoreFormatError
        If they are no masses, or not those of the draws.
    """
    tree = require_draws(trace, "a mass of every draw")
    group = tree["posterior"].to_dataset()
    found = draw_weights(tree)
    if found is None:
        shape = group.sizes["chain"], group.sizes["draw"]
        found = np.full(shape, 1.0 / (shape[0] * shape[1]))
    labels = {dim: group[dim].values for dim in ("chain", "draw")}
    return xr.DataArray(found, labels, ("chain", "draw"), name="weight")


def mean_and_sd(values: Array, weight: Array) -> tuple[Array, Array]:
    """Over the first axis, with probability masses (M,)."""
    mean = weight @ values
    return mean, np.sqrt(weight @ (values - mean) ** 2)


def aligned_trace(trace: Trace, purpose: str) -> xr.DataTree:
    """The tree of a trace that holds draws, aligned if it has not been."""
    tree = require_draws(trace, purpose)
    return tree if "alignment" in tree.children else align(tree)


def component_positions(group: xr.Dataset, component: Any) -> list[int]:
    """Positions of the components of these labels; of all for None.

    Raises
    ------
    OptionError
        If there is no such component.
    """
    known = group["component"].values.tolist()
    if component is None:
        return list(range(len(known)))
    wanted = np.atleast_1d(np.asarray(component)).tolist()
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
