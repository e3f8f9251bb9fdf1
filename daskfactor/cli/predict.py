"""``daskfactor predict``, ``recommend``, ``transform``: what a run says of cells and new rows."""

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.cli.output import Cells, Output
from daskfactor.cli.verb_options import Shows

if TYPE_CHECKING:
    import xarray as xr


def predict(
    run: o.Run,
    cells: Cells,
    output: Output,
    options: Annotated[o.Arguments, Shows("predict", "interval", "of")],
) -> o.Answer | None:
    """Predict cells: posterior mean, standard deviation and interval, observed or not.

    Numbers are labels where labels are whole numbers, and else count rows and columns from 0. A
    range always counts from 0, and its end is left out. What is no number is a label.

        daskfactor predict run.zarr --rows 0:3 --columns 5,7

        daskfactor predict run.zarr --rows alice,bob --columns Dune

        daskfactor predict run.zarr --of observation --interval 0.95 -o filled.nc
    """
    output.check()
    tree = _run_with_draws(run, "a prediction")
    at = cells.of(tree)
    # The factors are cut, with their labels: positions are meant, and labels may repeat.
    result = dfac.predict(tree.isel(at, missing_dims="ignore"), **options)
    return output.put(_placed(result, tree, at))


def recommend(
    run: o.Run,
    cells: Cells,
    output: Output,
    options: Annotated[
        o.Arguments,
        Shows("recommend", "n", "exclude", "by", "interval", "memory_limit"),
    ],
    quiet: o.Quiet = False,
) -> o.Answer | None:
    """Find the best columns (items) for every row (user) by posterior mean, with error bars.

    The result is that of comparing all cells, but most are ruled out without being computed.
    Columns that are named are those that may be recommended.

        daskfactor recommend run.zarr --rows alice,bob -n 10 --exclude ratings.csv

        daskfactor recommend run.zarr --exclude seen --by lower -o top.parquet
    """
    from daskfactor.results.schema import factor_dims

    output.check()
    tree = _run_with_draws(run, "a ranking")
    at = cells.of(tree)
    rows, columns = (_key(tree, dim, at.get(dim)) for dim in factor_dims(tree))
    result = dfac.recommend(tree, rows, columns=columns, progressbar=not quiet, **options)
    return output.put(_placed(result, tree, at))


def transform(
    run: o.Run,
    matrix: o.Weighed,
    place: o.SeededOnDevice,
    output: Output,
    options: Annotated[o.Arguments, Shows("transform", "axis", "draws")],
    keep_draws: Annotated[
        bool,
        Option(
            "--keep-draws", help="Write every draw, in place of means and deviations: .nc, .zarr."
        ),
    ] = False,
) -> o.Answer | None:
    """Give new rows their components, by what a run has learnt, without fitting it again.

    Posterior mean and standard deviation for each row and component; components are those of
    the run, aligned over its draws. Columns of the data are matched by label where both have
    labels. Where the run was given uncertainties or weights, new rows need theirs.

        daskfactor transform run.zarr new.csv -o components.csv

        daskfactor transform run.zarr new.npz --keep-draws -o draws.nc
    """
    output.check(*([(".nc", ".zarr")] if keep_draws else []))
    trace = dfac.align(run)
    with place.running() as running:
        found = dfac.transform(trace, matrix.input, **options, **matrix.told(), **running)
    if keep_draws:
        return output.put(found.to_dataset())
    over = found.weighted(found["weight"]) if "weight" in found.coords else found
    dims = ["chain", "draw"]
    return output.put(over.mean(dims).to_dataset(name="mean").assign(sd=over.std(dims)))


def _run_with_draws(run: str, what: str) -> "xr.DataTree":
    from daskfactor.results.trace import Run

    return Run.of(dfac.open_run(run), what).tree


def _placed(result: "xr.Dataset", tree: "xr.DataTree", at: dict[str, list[int]]) -> "xr.Dataset":
    """Say of rows or columns without labels which ones were chosen."""
    from daskfactor.results.schema import factor_dims

    for name, dim in zip(result["mean"].dims, factor_dims(tree) if at else (), strict=bool(at)):
        if dim in at and name not in result.coords:
            result = result.assign_coords({name: at[dim]})
    return result


def _key(tree: "xr.DataTree", dim: str, chosen: list[int] | None) -> Any:
    """Positions as `recommend` takes them: labels where there are any, a mask if these repeat."""
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
