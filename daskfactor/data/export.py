"""`export`: a blocked store as a file that other programs read."""

import contextlib
import gzip
import os
import uuid
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.labels import Labels
from daskfactor.data.matrix_files import label_file
from daskfactor.data.sources import open_blocked_store
from daskfactor.data.store_writer import writing_errors
from daskfactor.data.tables import require
from daskfactor.errors import DataError, OptionError, StoreError

KINDS = (".npz", ".mtx", ".mtx.gz", ".h5ad")


def export(
    source: str | PathLike[str] | BlockedData,
    path: str | PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Write a sparse matrix to a file, in the caller's order, with its labels.

    The matrix is put together in memory as compressed rows: 8 bytes an entry, and
    for some formats as much again.

    Parameters
    ----------
    source
        Path or URL of a blocked store, or sparse `BlockedData`.
    path
        ``.npz``: what `scipy.sparse.load_npz` reads, with arrays row_labels, column_labels and
        unstored beside the matrix. ``.mtx`` or ``.mtx.gz``: Matrix Market, with labels in
        ``NAME.rows.txt`` and ``NAME.columns.txt``. ``.h5ad``: AnnData.
    overwrite
        Whether a file that is there already may be replaced.

    Raises
    ------
    OptionError
        If the kind of file is unknown, or a library it needs is not installed.
    DataError
        If the blocks are dense.
    StoreError
        If the store cannot be read or the file cannot be written.

    Notes
    -----
    `convert` reads all of these back. Entries that are missing although stored are NaN.
    """
    target = Path(path)
    kind = next((end for end in reversed(KINDS) if target.name.lower().endswith(end)), None)
    if kind is None:
        raise OptionError(f"export writes {', '.join(KINDS)}, got {str(path)!r}")
    if target.exists() and not overwrite:
        raise StoreError(f"{target} exists already; give another name, or allow overwrite=True")
    data = source if isinstance(source, BlockedData) else open_blocked_store(str(source))
    if not data.is_sparse:
        raise DataError("these blocks are dense; use to_numpy() and NumPy's own save")
    making = target.with_name(f".{uuid.uuid4().hex}-{target.name}")
    with writing_errors(str(target)):
        try:
            {".npz": _npz, ".h5ad": _h5ad}.get(kind, _matrix_market)(data, making, target)
            os.replace(making, target)  # noqa: PTH105 - the one call that does it atomically
        finally:
            making.unlink(missing_ok=True)


def _npz(data: BlockedData, making: Path, target: Path) -> None:
    matrix, labels = data.observed_sparse(), data.labels
    arrays: dict[str, NDArray[Any]] = {
        "format": np.array(b"csr"),
        "shape": np.array(matrix.shape),
        "data": matrix.data,
        "indices": matrix.indices,
        "indptr": matrix.indptr,
        "unstored": np.array(data.unstored),
        "dims": np.array([labels.row_dim, labels.col_dim]),
    }
    rows, cols = _index_labels(labels)
    if rows is not None:
        arrays["row_labels"] = rows
    if cols is not None:
        arrays["column_labels"] = cols
    with making.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _matrix_market(data: BlockedData, making: Path, target: Path) -> None:
    from scipy.io import mmwrite

    matrix = data.observed_sparse()
    if data.is_integer and not np.isnan(matrix.data).any():
        matrix = matrix.astype(np.int64)
    packed = target.name.lower().endswith(".gz")
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(making.open("wb"))
        if packed:
            file = stack.enter_context(gzip.GzipFile(target.name, "wb", 6, file, mtime=0))
        mmwrite(file, matrix, comment=f"entries that are not stored: {data.unstored}")
    for side, labels in zip(("rows", "columns"), _index_labels(data.labels), strict=True):
        beside = label_file(target, side)
        beside.unlink(missing_ok=True)
        if labels is not None:
            beside.write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")


def _h5ad(data: BlockedData, making: Path, target: Path) -> None:
    anndata = require("anndata", "anndata", "AnnData files")
    import pandas as pd

    frames = []
    for coords, dim, size in (
        (data.labels.row_coords, data.labels.row_dim, data.shape[0]),
        (data.labels.col_coords, data.labels.col_dim, data.shape[1]),
    ):
        index = coords.get(dim, np.arange(size))
        others = {name: column for name, column in coords.items() if name != dim}
        frames.append(pd.DataFrame(others, index=pd.Index(index.astype(str))))
    found = anndata.AnnData(data.observed_sparse(), *frames, uns={"unstored": data.unstored})
    found.write_h5ad(making)


def _index_labels(labels: Labels) -> list[NDArray[Any] | None]:
    """Labels of rows and of columns, texts at a fixed width, None where there are none."""
    found = [labels.row_coords.get(labels.row_dim), labels.col_coords.get(labels.col_dim)]
    return [
        side.astype(np.str_) if side is not None and side.dtype.kind in "OT" else side
        for side in found
    ]
