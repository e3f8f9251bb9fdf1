"""Counts of 10x Genomics: a folder with a Matrix Market file, or one HDF5 file.

Both have genes as rows and cells as columns; they are read with cells as rows, as in AnnData.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from daskfactor.checks import warn
from daskfactor.data.adapters import Source, from_chunked, from_compressed
from daskfactor.data.annotated import Compressed, open_hdf5
from daskfactor.data.coo import Piece, text_array
from daskfactor.data.dialects import plain
from daskfactor.data.labels import NAMED, Labels
from daskfactor.data.statistics import NUMERIC, SourceInfo
from daskfactor.errors import DataError, DataWarning
from daskfactor.urls import Location

MATRIX = "matrix.mtx"
CELLS, GENES = "barcodes.tsv", ("features.tsv", "genes.tsv")


def with_cells_as_rows(source: Source, location: Location) -> Source:
    """Return the labelled transpose of a Matrix Market file with files of cells and genes.

    Raises
    ------
    DataError
        If there are more or fewer names than rows or columns.
    """
    path = Path(location)
    prefix, middle, _ = path.name.partition(MATRIX)
    if location.is_url or not middle:
        return source
    cells = _read_fields(path.with_name(prefix + CELLS))
    genes = next(
        filter(None, (_read_fields(path.with_name(prefix + name)) for name in GENES)), None
    )
    if not cells or not genes:
        return source
    assert source.shape is not None
    assert source.pieces is not None
    pieces, (rows, columns) = source.pieces, source.shape
    if (len(genes), len(cells)) != (rows, columns):
        raise DataError(
            f"{location} has {rows} rows and {columns} columns, but the files beside it name "
            f"{len(genes)} genes and {len(cells)} cells; move them away, or replace them with "
            "the right ones"
        )
    warn(
        f"the columns of {location} are used as rows, because the file {CELLS} beside it names "
        f"them: {columns} cells and {rows} genes",
        DataWarning,
    )

    def transposed(add: bool) -> Iterator[Piece]:
        for piece in pieces(add):
            yield Piece(piece.cols, piece.rows, piece.values)

    ids, names = zip(*((line[0], line[min(1, len(line) - 1)]) for line in genes), strict=True)
    labels = _labels([line[0] for line in cells], ids, names)
    return replace(source, shape=(columns, rows), labels=labels, pieces=transposed)


def _read_fields(path: Path) -> list[list[str]]:
    """Return the fields of each line of a file, compressed or not; empty without a file."""
    for packing in ("", ".gz"):
        packed = path.with_name(path.name + packing)
        if packed.is_file():
            with plain(packed) as file:
                text = file.read().decode("utf-8")
            return [line.split("\t") for line in text.splitlines() if line.strip()]
    return []


def _labels(cells: Any, genes: Any, names: Any = ()) -> Labels:
    """Return labels of cells and genes; gene names, which may repeat, are a coordinate."""
    more = {"name": text_array(list(names))} if len(names) else {}
    var = {"var": text_array(list(genes))} | more
    return Labels("obs", "var", {"obs": text_array(list(cells))}, var)


def is_netcdf(location: Location) -> bool:
    """Return whether an HDF5 file has netCDF dimensions, so that xarray reads it."""
    with open_hdf5(location) as root:
        if "_NCProperties" in root.attrs:
            return True
        scales = "DIMENSION_SCALE", b"DIMENSION_SCALE"
        return any(
            "DIMENSION_LIST" in node.attrs or node.attrs.get("CLASS") in scales
            for node in root.values()
        )


def is_hdf5(location: Location) -> bool:
    """Return whether a local file is HDF5; files of MATLAB have a text header first."""
    if location.is_url or not Path(location).is_file():
        return False
    with Path(location).open("rb") as file:
        start = file.read(520)
    return b"\x89HDF\r\n\x1a\n" in (start[:8], start[512:])


def read_hdf5(location: Location, name: str | None) -> Any:
    """Return the source of a 10x Genomics matrix in an HDF5 file, or of another matrix.

    An array with more dimensions is returned as an open dataset.

    Raises
    ------
    DataError
        If there is no matrix, or several without a name to select one.
    """
    root = open_hdf5(location)
    if root.attrs.get("encoding-type") == "anndata":
        raise DataError(f"{location} is a file of anndata: give it a name that ends in .h5ad")
    groups = [group for group in root.values() if hasattr(group, "keys") and "barcodes" in group]
    is_10x = len(groups) == 1 and {"data", "indices", "indptr"} <= groups[0].keys()
    if is_10x and name in (None, groups[0].name.strip("/")):
        return _of_10x(location, groups[0])
    if len(groups) > 1:
        genomes = {group.name.strip("/"): group for group in groups}
        if name in genomes:
            return _of_10x(location, genomes[name])
        raise DataError(
            f"{location} holds counts of {len(genomes)} genomes; name one as "
            f"{location}:{next(iter(genomes))} (it has {', '.join(genomes)})"
        )
    matrices_by_name: dict[str, Any] = {}

    def note(key: str, node: Any) -> None:
        if hasattr(node, "shape") and node.dtype.kind in NUMERIC and node.ndim > 1:
            matrices_by_name[key] = node

    root.visititems(note)
    if name is None:
        matrix_names = [key for key, node in matrices_by_name.items() if node.ndim == 2]
        if len(matrix_names) != 1:
            listed = [f"{key} {node.shape}" for key, node in matrices_by_name.items()][: 2 * NAMED]
            if not matrices_by_name:
                raise DataError(
                    f"{location} holds no matrix of numbers, nor counts of 10x Genomics"
                )
            raise DataError(
                f"{location} holds {len(matrix_names)} matrices ({', '.join(listed) or 'none'}); "
                + (f"name one as {location}:NAME, or pass" if matrix_names else "pass")
                + f" an array of it in Python: xarray.DataArray(h5py.File({location!r})[NAME][...])"
            )
        (name,) = matrix_names
    if name not in matrices_by_name:
        raise DataError(
            f"{location} has no matrix {name!r}, only {', '.join(matrices_by_name) or 'none'}"
        )
    array = matrices_by_name[name]
    return from_chunked(array, "hdf5", f"{location}:{name}") if array.ndim == 2 else array


def _of_10x(location: Location, group: Any) -> Source:
    """Return the source of a group of 10x Genomics.

    Compressed columns of genes × cells are compressed rows of cells × genes.
    """
    genes, cells = (int(size) for size in group["shape"][:])
    arrays = (group[key] for key in ("data", "indices", "indptr"))
    source = from_compressed(Compressed("csr", (cells, genes), *arrays))
    features = group.get("features")
    keys = ("genes", "gene_names") if features is None else ("id", "name")
    columns = [(group if features is None else features)[key] for key in keys]
    labels = _labels(*(np.asarray(column.asstr()[:]) for column in (group["barcodes"], *columns)))
    return replace(
        source, labels=labels, info=SourceInfo("10x", location, lazy=True), unstored="zero"
    )
