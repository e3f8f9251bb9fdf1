"""The variables of a run, where they are and what they hold; names that the user's may meet there.

Names and dimensions are ArviZ's where ArviZ has one. ``{row}`` and ``{column}``
stand for the user's own dimension names. An algorithm declares the statistics of
its draws as `Variable`s of its own; everything else is here.
"""

import json
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import xarray as xr

from daskfactor.errors import DataError, StoreFormatError

ROW: Final = "{row}"
COLUMN: Final = "{column}"
LIBRARY: Final = "daskfactor"
FORMAT_VERSION: Final = 2

Kind = Literal["factor", "real", "count", "flag", "data"]


class Variable(NamedTuple):
    """One variable of a run: where it is, what its axes are, what it holds."""

    group: str
    name: str
    dims: tuple[str, ...]
    kind: Kind
    doc: str


def statistic(name: str, doc: str, kind: Kind = "real") -> Variable:
    """Declare a number that an algorithm tells of each draw."""
    return Variable("sample_stats", name, ("chain", "draw"), kind, doc)


def _factors(group: str, doc: str) -> tuple[Variable, ...]:
    return (
        Variable(group, "W", ("chain", "draw", ROW, "component"), "factor", f"row factor, {doc}"),
        Variable(
            group, "H", ("chain", "draw", "component", COLUMN), "factor", f"column factor, {doc}"
        ),
    )


MOMENTS: Final = "posterior_moments"
MONITOR: Final = "monitor"
STEIN: Final = "stein"
COARSE: Final = "posterior_coarse"
WARMUP: Final = "warmup_sample_stats"

DRAWS: Final = _factors("posterior", "one draw per kept cycle")
COARSE_DRAWS: Final = _factors(COARSE, "of the chain with twice the step (P-SGRRLD)")
STREAMED: Final = (
    Variable(MOMENTS, "W_mean", ("chain", ROW, "component"), "factor", "mean of W over cycles"),
    Variable(MOMENTS, "W_var", ("chain", ROW, "component"), "factor", "population variance of W"),
    Variable(MOMENTS, "H_mean", ("chain", "component", COLUMN), "factor", "mean of H over cycles"),
    Variable(
        MOMENTS, "H_var", ("chain", "component", COLUMN), "factor", "population variance of H"
    ),
    Variable(MOMENTS, "count", ("chain",), "count", "cycles averaged; 0: nothing valid yet"),
)
MONITORED: Final = (
    Variable(MONITOR, "mean", ("chain", "cell"), "real", "mean of WH at a monitored cell"),
    Variable(MONITOR, "var", ("chain", "cell"), "real", "population variance of WH there"),
    Variable(MONITOR, "count", ("chain",), "count", "cycles averaged; 0: nothing valid yet"),
)
DENSITY: Final = statistic("lp", "log density of data and factors, up to a constant")
STEPS: Final = (
    statistic("step_size", "step size of the cycle"),
    statistic("diverging", "the cycle diverged and was rolled back", "flag"),
)
WEIGHT: Final = statistic("weight", "probability mass of the particle; all add up to 1")
PARTICLES: Final = (
    WEIGHT,
    statistic("seconds", "time its start and optimisation took, in s"),
    statistic("n_iter", "iterations of its optimisation", "count"),
)
OBJECTIVE: Final = statistic("objective", "objective f of the particle")
TUNING: Final = (
    Variable(WARMUP, "lp", ("chain", "warmup_draw"), "real", "as in sample_stats, while tuning"),
    Variable(WARMUP, "step_size", ("chain", "warmup_draw"), "real", "step size while tuning"),
)
DISCREPANCIES: Final = (
    Variable(
        STEIN, "stein_matrix", ("draw", "other_draw"), "real", "Stein kernel of two particles"
    ),
    Variable(STEIN, "discrepancy", (), "real", "Stein discrepancy under the weights"),
    Variable(STEIN, "discrepancy_equal", (), "real", "Stein discrepancy under equal weights"),
)
OBSERVED: Final = (
    Variable("observed_data", "V", (ROW, COLUMN), "data", "the data; NaN = missing"),
)
RATES: Final = (
    Variable("constant_data", "dispersion", (), "real", "dispersion of the Tweedie model"),
    Variable("constant_data", "rate_w", (), "real", "prior rate of W"),
    Variable("constant_data", "rate_h", (), "real", "prior rate of H"),
)
THRESHOLD: Final = (
    Variable("constant_data", "threshold", (), "real", "objective up to which all is alike"),
)

CELL_INDICES: Final = ("row_index", "column_index")
BIASED: Final = "biased"
"""Attribute of a tree: 1 if the algorithm's draws are off by what no diagnostic sees."""
RENAMED: Final = "renamed"
"""Attribute of a tree: the user's own names of what has another one in it, as JSON."""


def _own_names(variables: Iterable[Variable]) -> frozenset[str]:
    """Names of variables, and of those of their dimensions that are not the user's."""
    own = {variable.name: variable.dims for variable in variables}
    return frozenset({*own, *(dim for dims in own.values() for dim in dims)} - {ROW, COLUMN})


_FACTOR_NAMES = _own_names((*DRAWS, *STREAMED, *OBSERVED))
_CELL_NAMES = _own_names(MONITORED) | set(CELL_INDICES)


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
