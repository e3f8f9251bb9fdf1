"""``daskfactor predict``, ``recommend`` and ``transform``: predictions from a run."""

from typing import TYPE_CHECKING, Any, ClassVar

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.cli.output import Cells, Output

if TYPE_CHECKING:
    import xarray as xr


class Predict(Cells, Output):
    """Predict cells, observed or not: posterior mean, standard deviation and interval.

    In --rows and --columns, a number is a label if the labels are whole numbers, and otherwise a
    position from 0. A range always counts positions and excludes its end. Other text is a label.

        daskfactor predict run.zarr --rows 0:3 --columns 5,7

        daskfactor predict run.zarr --rows alice,bob --columns Dune

        daskfactor predict run.zarr --of observation --interval 0.95 -o filled.nc
    """

    verbs: ClassVar = {"predict": "interval of"}

    run: o.RunArgument

    def __call__(self) -> o.Answer | None:
        """Predict the cells."""
        self.check_output()
        tree = _run_with_draws(self.run, "a prediction")
        selected = self.positions_in(tree)
        # Select the factors by position, with their labels, because labels may repeat.
        part = tree.isel(selected, missing_dims="ignore")
        result = dfac.predict(part, **self.arguments("predict"))
        return self.put(_with_positions(result, tree, selected))


class Recommend(Cells, Output):
    """Recommend the best columns (items) for every row (user), with error bars.

    Cells are ranked by posterior mean, or by --by. The result equals a comparison of all cells,
    but most of them are ruled out without being computed. --columns limits the recommendations.

        daskfactor recommend run.zarr --rows alice,bob -n 10 --exclude ratings.csv

        daskfactor recommend run.zarr --exclude seen --by lower -o top.parquet
    """

    verbs: ClassVar = {"recommend": "n exclude by interval memory_limit"}

    run: o.RunArgument
    quiet: bool = False

    def __call__(self) -> o.Answer | None:
        """Rank the columns."""
        from daskfactor.runs.schema import factor_dims

        self.check_output()
        tree = _run_with_draws(self.run, "a ranking")
        selected = self.positions_in(tree)
        rows, columns = (_selector(tree, dim, selected.get(dim)) for dim in factor_dims(tree))
        options = self.arguments("recommend") | {"progressbar": not self.quiet}
        result = dfac.recommend(tree, rows, columns=columns, **options)
        return self.put(_with_positions(result, tree, selected))


class Transform(o.WeightedMatrix, Output, o.OnDevice, o.Seeded):
    """Compute the components of new rows from a fitted run, without fitting it again.

    Writes the posterior mean and standard deviation for each row and component of the run,
    aligned over its draws. Columns are matched by label if both data sets have labels. If the run
    has uncertainties or weights, pass those of the new rows, too.

        daskfactor transform run.zarr new.csv -o components.csv

        daskfactor transform run.zarr new.npz --keep-draws -o draws.nc

    Parameters
    ----------
    keep_draws
        Write every draw instead of means and standard deviations, to .nc or .zarr.
    """

    verbs: ClassVar = {"transform": "axis draws"}

    run: o.RunArgument
    keep_draws: bool = False

    def __call__(self) -> o.Answer | None:
        """Compute the components."""
        self.check_output(*([(".nc", ".zarr")] if self.keep_draws else []))
        trace = dfac.align(self.run)
        with self.running() as options:
            options |= self.arguments("transform") | self.reading()
            factors = dfac.transform(trace, self.input, **options)
        if self.keep_draws:
            return self.put(factors.to_dataset())
        draws = factors.weighted(factors["weight"]) if "weight" in factors.coords else factors
        dims = ["chain", "draw"]
        return self.put(draws.mean(dims).to_dataset(name="mean").assign(sd=draws.std(dims)))


def _run_with_draws(run: str, purpose: str) -> "xr.DataTree":
    """Return the tree of a stored run; refuse one without draws, which ``purpose`` needs."""
    from daskfactor.runs.trace import Run

    return Run.of(dfac.open_run(run), purpose).tree


def _with_positions(
    result: "xr.Dataset", tree: "xr.DataTree", selected: dict[str, list[int]]
) -> "xr.Dataset":
    """Add the selected positions as coordinates of rows or columns without labels."""
    from daskfactor.runs.schema import factor_dims

    if not selected:
        return result
    for name, dim in zip(result["mean"].dims, factor_dims(tree), strict=True):
        if dim in selected and name not in result.coords:
            result = result.assign_coords({name: selected[dim]})
    return result


def _selector(tree: "xr.DataTree", dim: str, chosen: list[int] | None) -> Any:
    """Return positions as `recommend` takes them: as labels, or as a mask if labels repeat."""
    import numpy as np

    posterior = tree["posterior"].to_dataset()
    labels = posterior.indexes.get(dim)
    if chosen is None or labels is None:
        return chosen
    if labels.is_unique:
        return labels.take(chosen).to_numpy()
    mask = np.zeros(posterior.sizes[dim], bool)
    mask[chosen] = True
    return mask
