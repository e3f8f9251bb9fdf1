"""A check of whole trees against what a run declares."""

from daskfactor.errors import StoreFormatError
from daskfactor.inference.hmc import HMC
from daskfactor.results import schema
from daskfactor.results.schema import COLUMN, ROW, factor_dims
from daskfactor.results.trace import check_weights

REGISTRY = (
    *schema.DRAWS,
    *schema.COARSE_DRAWS,
    *schema.STREAMED,
    *schema.MONITORED,
    *(schema.DENSITY, schema.OBJECTIVE, *schema.STEPS, *schema.PARTICLES, *HMC.statistics),
    *schema.TUNING,
    *schema.DISCREPANCIES,
    *(*schema.OBSERVED, *schema.WEIGHED),
    *(*schema.RATES, *schema.THRESHOLD),
)
_KINDS = {"factor": "f", "real": "f", "count": "iu", "flag": "b", "data": "biuf"}


def validate(tree):
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
    if "sample_stats" in tree.children and "weight" in tree["sample_stats"].data_vars:
        check_weights(tree["sample_stats"].to_dataset()["weight"].values)
