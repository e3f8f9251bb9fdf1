"""The variables of a run: one registry from which stores, trees and checks are built.

Names and dimensions are ArviZ's where ArviZ has one. ``{row}`` and ``{column}``
stand for the user's own dimension names.
"""

import json
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import DataError, StoreFormatError

ROW = "{row}"
COLUMN = "{column}"
LIBRARY = "daskfactor"
FORMAT_VERSION = 1
WEIGHT_TOLERANCE: Final = 1e-6
"""How far the sum of all weights may be from 1."""

Kind = Literal["factor", "real", "count", "flag", "data"]


class Variable(NamedTuple):
    """One variable of a run: where it is, what its axes are, what it holds."""

    group: str
    name: str
    dims: tuple[str, ...]
    kind: Kind
    doc: str


def _factors(group: str, doc: str) -> tuple[Variable, ...]:
    return (
        Variable(group, "W", ("chain", "draw", ROW, "component"), "factor", f"row factor, {doc}"),
        Variable(
            group, "H", ("chain", "draw", "component", COLUMN), "factor", f"column factor, {doc}"
        ),
    )


MOMENTS = "posterior_moments"
STEIN = "stein"
_STATS = "sample_stats"
_WARMUP = "warmup_sample_stats"
_TABLE = ("chain", "draw")

REGISTRY: tuple[Variable, ...] = (
    *_factors("posterior", "one draw per kept cycle"),
    *_factors("posterior_coarse", "of the chain with twice the step (P-SGRRLD)"),
    Variable(MOMENTS, "W_mean", ("chain", ROW, "component"), "factor", "mean of W over cycles"),
    Variable(MOMENTS, "W_var", ("chain", ROW, "component"), "factor", "population variance of W"),
    Variable(MOMENTS, "H_mean", ("chain", "component", COLUMN), "factor", "mean of H over cycles"),
    Variable(
        MOMENTS, "H_var", ("chain", "component", COLUMN), "factor", "population variance of H"
    ),
    Variable(MOMENTS, "count", ("chain",), "count", "cycles averaged; 0: nothing valid yet"),
    Variable("monitor", "mean", ("chain", "cell"), "real", "mean of WH at a monitored cell"),
    Variable("monitor", "var", ("chain", "cell"), "real", "population variance of WH there"),
    Variable("monitor", "count", ("chain",), "count", "cycles averaged; 0: nothing valid yet"),
    Variable(_STATS, "lp", _TABLE, "real", "log density of data and factors, up to a constant"),
    Variable(_STATS, "step_size", _TABLE, "real", "step size of the cycle"),
    Variable(_STATS, "diverging", _TABLE, "flag", "the cycle diverged and was rolled back"),
    Variable(_STATS, "acceptance_rate", _TABLE, "real", "acceptance probability of the proposal"),
    Variable(_STATS, "weight", _TABLE, "real", "probability mass of the particle; all add up to 1"),
    Variable(_STATS, "objective", _TABLE, "real", "objective f of the particle"),
    Variable(_STATS, "seconds", _TABLE, "real", "time its start and optimisation took, in s"),
    Variable(_STATS, "n_iter", _TABLE, "count", "iterations of its optimisation"),
    Variable(_WARMUP, "lp", ("chain", "warmup_draw"), "real", "as in sample_stats, while tuning"),
    Variable(_WARMUP, "step_size", ("chain", "warmup_draw"), "real", "step size while tuning"),
    Variable(
        STEIN, "stein_matrix", ("draw", "other_draw"), "real", "Stein kernel of two particles"
    ),
    Variable(STEIN, "discrepancy", (), "real", "Stein discrepancy under the weights"),
    Variable(STEIN, "discrepancy_equal", (), "real", "Stein discrepancy under equal weights"),
    Variable("observed_data", "V", (ROW, COLUMN), "data", "the data; NaN = missing"),
    Variable("constant_data", "dispersion", (), "real", "dispersion of the Tweedie model"),
    Variable("constant_data", "rate_w", (), "real", "prior rate of W"),
    Variable("constant_data", "rate_h", (), "real", "prior rate of H"),
    Variable("constant_data", "threshold", (), "real", "objective up to which all is alike"),
)

WEIGHTED = frozenset({"lp", "weight"})
"""Statistics of particles that are known only when all particles are there."""
OF_PARTICLES = frozenset({"weight", "seconds", "n_iter"})
OF_CYCLES = frozenset({"step_size", "diverging"})
MONITOR = "monitor"
CELL_INDICES = ("row_index", "column_index")
RENAMED = "renamed"
"""Attribute of a tree: the user's own names of what has another one in it, as JSON."""


def _own_names(*groups: str) -> frozenset[str]:
    """Names of the variables of some groups, and of the dimensions that are not the user's."""
    own = [variable for variable in REGISTRY if variable.group in groups]
    dims = {dim for variable in own for dim in variable.dims} - {ROW, COLUMN}
    return frozenset(dims | {variable.name for variable in own})


_FACTOR_NAMES = _own_names("posterior", "posterior_coarse", MOMENTS, "observed_data")
_CELL_NAMES = _own_names(MONITOR) | set(CELL_INDICES)


def beside(names: Iterable[str], own: Collection[str]) -> dict[str, str]:
    """Give every name of the user's one that is not among ``own``: with underscores at its end.

    A name that is free stays as it is. The others become the same whatever ``own`` is, so that
    one has at most two forms in all the groups of a tree.
    """
    names = list(names)
    taken = {*names, *_FACTOR_NAMES, *_CELL_NAMES, *own}

    def free(name: str) -> str:
        while name in taken:
            name += "_"
        return name

    return {name: free(name) if name in own else name for name in names}


def names_in(group: str, names: Iterable[str]) -> dict[str, str]:
    """What the user's dimensions and coordinates are called in a group of the results."""
    return beside(names, _CELL_NAMES if group == MONITOR else _FACTOR_NAMES)


def own_names(tree: xr.DataTree) -> dict[Any, str]:
    """The user's names of those dimensions and coordinates that have others in the tree."""
    return dict(json.loads(tree.attrs.get(RENAMED, "{}")))


def check_dims(dims: Sequence[Hashable]) -> None:
    """Refuse names of the data's dimensions that cannot be written to a store.

    Raises
    ------
    DataError
        If a name is no text, or if rows and columns share one name.
    """
    for dim in dims:
        if not isinstance(dim, str) or not dim or "/" in dim:
            raise DataError(
                f"a dimension of the data is named {dim!r}; "
                "dimension names must be non-empty text without '/'"
            )
    if dims[0] == dims[1]:
        raise DataError(
            f"rows and columns are both named {dims[0]!r}; rename one of them, for example "
            f"xarray.DataArray(V.values, dims=({dims[0]!r}, '{dims[0]}_2'))"
        )


def factor_dims(tree: xr.DataTree) -> tuple[str, str]:
    """The user's names of rows and columns in a trace.

    Raises
    ------
    StoreFormatError
        If the tree holds neither draws nor moments of the factors.
    """
    own = {"chain", "draw", "component"}
    for group, w, h in (("posterior", "W", "H"), (MOMENTS, "W_mean", "H_mean")):
        if group in tree.children and {w, h} <= set(tree[group].data_vars):
            dims = [[d for d in tree[group][name].dims if d not in own] for name in (w, h)]
            if len(dims[0]) == len(dims[1]) == 1:
                return str(dims[0][0]), str(dims[1][0])
    raise StoreFormatError(
        f"this tree holds the groups {sorted(tree.children)} but no factors; "
        "pass the result of daskfactor.sample or the path of a run store"
    )


def validate(tree: xr.DataTree) -> None:
    """Check a tree against the registry: names, dimensions, kinds of values.

    Raises
    ------
    StoreFormatError
        If a variable is unknown, or has other dimensions or another kind of
        values than the registry says, or if weights are no probability masses.
    """
    row, column = factor_dims(tree)
    names = {ROW: row, COLUMN: column}
    known = {(variable.group, variable.name): variable for variable in REGISTRY}
    for group, node in tree.children.items():
        for name, array in node.data_vars.items():
            variable = known.get((group, str(name)))
            if variable is None:
                raise StoreFormatError(f"a run has no variable {name!r} in group {group!r}")
            dims = tuple(names.get(dim, dim) for dim in variable.dims)
            if array.dims != dims:
                raise StoreFormatError(
                    f"{group}/{name} has dimensions {array.dims}, a run has {dims}"
                )
            if array.dtype.kind not in _KINDS[variable.kind]:
                raise StoreFormatError(
                    f"{group}/{name} has dtype {array.dtype}, a run has {variable.kind} values"
                )
    if _STATS in tree.children and "weight" in tree[_STATS].data_vars:
        check_weights(tree[_STATS].to_dataset()["weight"].values)


def check_weights(weights: NDArray[np.floating[Any]]) -> None:
    """Refuse weights that are no probability masses.

    Raises
    ------
    StoreFormatError
        If one is negative or not finite, or if they do not add up to 1 within 1e-6.
    """
    whole = weights.size > 0 and bool(np.isfinite(weights).all())
    if not (whole and weights.min() >= 0 and abs(weights.sum() - 1.0) <= WEIGHT_TOLERANCE):
        least = weights.min() if weights.size else np.nan
        raise StoreFormatError(
            f"weights of particles must be at least 0 and add up to 1, got a smallest of {least:g} "
            f"and a sum of {weights.sum():g}; write them anew, divided by their sum"
        )


_KINDS: dict[Kind, str] = {"factor": "f", "real": "f", "count": "iu", "flag": "b", "data": "biuf"}
