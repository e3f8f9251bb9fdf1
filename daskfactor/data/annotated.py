"""AnnData: selection of one matrix of an object or a file, and the names of its rows and columns.

Only names and the column that selects variables are read here; matrices stay in the file. Sparse
matrices are seen as their three arrays, which all versions of anndata write alike; names and
columns, which differ by version, are read by anndata itself.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import require
from daskfactor.data.coo import text_array
from daskfactor.data.labels import NAMED
from daskfactor.data.places import find_place
from daskfactor.data.statistics import SourceInfo
from daskfactor.errors import DaskfactorError, DataError
from daskfactor.urls import Location, error_summary, safe_cause

H5AD = ".h5ad"
RAW = "raw"
"""Name of `AnnData.raw` among the layers."""
UNSTORED = "unstored"
"""Key of `uns` in which `export` writes the meaning of unstored entries."""


@dataclass(frozen=True)
class Annotated:
    """One matrix of an AnnData, with the names of observations and variables.

    Attributes
    ----------
    matrix
        The matrix, as an adapter reads it.
    obs, var
        Names of all rows and columns.
    chosen
        Positions of the selected variables, ascending; None: all.
    unstored
        Meaning of unstored entries.
    info
        Origin of the matrix.
    """

    matrix: Any
    obs: NDArray[Any]
    var: NDArray[Any]
    chosen: NDArray[np.int64] | None
    unstored: str
    info: SourceInfo


class Compressed(NamedTuple):
    """Sparse matrix in a file: compressed rows (csr) or columns (csc), not read yet."""

    format: str
    shape: tuple[int, int]
    data: Any
    indices: Any
    indptr: Any


class Columns:
    """Columns of ``obs`` or ``var`` in a file."""

    def __init__(self, location: str, group: Any) -> None:
        self._location, self._group = location, group
        self.columns = [str(name) for name in group.attrs.get("column-order", group)]

    def __getitem__(self, name: str) -> Any:
        return _element(self._location, self._group[name])


@dataclass(frozen=True)
class AnnotatedFile:
    """AnnData in a file, with the attributes of the object that are used here.

    ``layer`` is the layer that was named with the file; ``part`` is ``"raw/"`` in its ``raw``.
    """

    location: str
    root: Any
    layer: str | None = None
    part: str = ""

    @property
    def X(self) -> Any:  # noqa: N802 - AnnData's name
        """Return the main matrix, not read; None if there is none."""
        return stored_matrix(self.location, self.root, f"{self.part}X")

    @property
    def layers(self) -> Mapping[str, Any]:
        """Return the layers by name, not read."""
        names = [] if self.part else list(self.root.get("layers", {}))
        return {name: stored_matrix(self.location, self.root, f"layers/{name}") for name in names}

    @property
    def raw(self) -> "AnnotatedFile | None":
        """Return ``raw``: a matrix with variables of its own; None if there is none."""
        return AnnotatedFile(self.location, self.root, part="raw/") if RAW in self.root else None

    @property
    def obs_names(self) -> NDArray[Any]:
        """Return the names of the observations."""
        return self._names("obs")

    @property
    def var_names(self) -> NDArray[Any]:
        """Return the names of the variables."""
        return self._names(f"{self.part}var")

    @property
    def var(self) -> Columns:
        """Return the columns of the variables."""
        return Columns(self.location, self.root[f"{self.part}var"])

    @property
    def uns(self) -> Mapping[str, Any]:
        """Return the stored meaning of unstored entries; empty if the file has none."""
        uns = self.root.get("uns", {})
        return {UNSTORED: _element(self.location, uns[UNSTORED])} if UNSTORED in uns else {}

    def _names(self, side: str) -> NDArray[Any]:
        group = self.root[side]
        key = group.attrs.get("_index") if hasattr(group, "keys") else None
        names = _element(self.location, group if key is None else group[key])
        if names is not None and getattr(names, "dtype", None) is not None and names.dtype.names:
            names = names[names.dtype.names[0]]  # a table of anndata before 0.7
            return np.char.decode(names, "utf-8") if names.dtype.kind == "S" else names
        return np.asarray(names.index if key is None else names, object)


def part_of(data: Any, layer: str | None = None, mask_var: Any = None) -> Annotated:
    """Return one matrix of an AnnData object, of its ``raw``, or of a file.

    Parameters
    ----------
    data
        AnnData object, its ``raw``, or an opened file.
    layer
        Name of a layer, or ``"raw"``; X if left out.
    mask_var
        Name of a boolean column of ``var``, or a boolean array, that selects variables.

    Raises
    ------
    DataError
        If it has no such layer or column, or the mask is invalid.
    """
    owner, is_file = data, isinstance(data, AnnotatedFile)
    layer = owner.layer if is_file and layer is None else layer
    location = owner.location if is_file else "the AnnData object"
    matrix = owner.X if layer is None else None
    if layer is not None:
        layers = getattr(owner, "layers", {})
        if layer == RAW and RAW not in layers and getattr(owner, "raw", None) is not None:
            owner = owner.raw
            matrix = owner.X
        elif layer not in layers:
            names = ", ".join(filter(None, layers)) or "none"  # anndata 0.13 has X among them
            raise DataError(f"{location} has no layer {layer!r}; its layers are: {names}")
        else:
            matrix = layers[layer]
    if matrix is None:
        available = [str(name) for name in getattr(owner, "layers", {}) if name]
        other = (
            f", or choose a layer with layer= (it has {', '.join(available)})" if available else ""
        )
        raise DataError(f"{location} has no X; set it{other}")
    var = np.asarray(owner.var_names, object)
    chosen = None if mask_var is None else _chosen(owner, location, mask_var, var)
    unstored = getattr(owner, "uns", {}).get(UNSTORED)
    named = mask_var is None or isinstance(mask_var, str)
    info = SourceInfo(
        "anndata",
        owner.location if is_file and named else None,
        lazy=is_file,
        layer=layer,
        mask_var=mask_var if isinstance(mask_var, str) else None,
    )
    return Annotated(
        matrix,
        _texts(owner.obs_names),
        _texts(var),
        chosen,
        unstored if unstored in ("zero", "missing") else "zero",
        info,
    )


def open_annotated(location: Location, layer: str | None = None) -> AnnotatedFile:
    """Open an ``.h5ad`` file or a zarr store of anndata, without reading.

    ``layer`` may have its path in the file: ``layers/counts`` for ``counts``.
    """
    is_file = location.suffix == H5AD and not Path(location).is_dir()
    root = open_hdf5(location) if is_file else find_place(location).node
    layer = None if layer in (None, "X") else str(layer).removeprefix("layers/")
    return AnnotatedFile(location, root, "raw" if layer == "raw/X" else layer)


def compressed(location: str, group: Any) -> Compressed:
    """Return the arrays of a sparse matrix in a file.

    Raises
    ------
    DataError
        If the group is not a sparse matrix.
    """
    attrs = dict(group.attrs)
    kind = str(attrs.get("encoding-type", attrs.get("h5sparse_format", "group")))
    if kind.removesuffix("_matrix") not in ("csr", "csc"):
        raise DataError(
            f"{group.name.strip('/')} of {location} is stored as {kind}, which is not a supported "
            "matrix; make it a dense array or compressed rows or columns, and write it again"
        )
    height, width = attrs["shape"] if "shape" in attrs else attrs["h5sparse_shape"]
    arrays = (group[name] for name in ("data", "indices", "indptr"))
    return Compressed(kind.removesuffix("_matrix"), (int(height), int(width)), *arrays)


def stored_matrix(location: str, root: Any, key: str) -> Any:
    """Return a matrix of a file as an adapter reads it; None if there is none."""
    if key not in root:
        return None
    node = root[key]
    if node.attrs.get("encoding-type") == "null":
        return None
    return compressed(location, node) if hasattr(node, "keys") else node


def _chosen(owner: Any, location: str, mask_var: Any, var: NDArray[Any]) -> NDArray[np.int64]:
    """Return the positions of the variables that a mask, or the column of that name, selects."""
    import pandas as pd

    named = isinstance(mask_var, str)
    what = f"the column {mask_var!r} of var in {location}" if named else "mask_var"
    if named and mask_var not in owner.var.columns:
        names = ", ".join(map(str, list(owner.var.columns)[: 2 * NAMED])) or "none"
        raise DataError(
            f"{location} has no column {mask_var!r} in var (its columns: {names}); make one, for "
            "example with scanpy.pp.highly_variable_genes, or pass a boolean array"
        )
    values = owner.var[mask_var] if named else mask_var
    if isinstance(values, pd.Series) and not named and not _same_names(values.index, var):
        raise DataError(
            "mask_var is a Series with other names than the variables of the AnnData, or in "
            "another order; pass the name of a column of var, or a boolean array"
        )
    flags = values if hasattr(values, "dtype") else np.asarray(values)
    if not pd.api.types.is_bool_dtype(flags.dtype) or np.shape(flags) != var.shape:
        raise DataError(
            f"{what} must be one boolean for each of the {var.size} variables, got dtype "
            f"{flags.dtype} and shape {np.shape(flags)}; turn it into one, for example with "
            ".astype(bool)"
        )
    if np.asarray(pd.isna(np.asarray(flags, object))).any():
        raise DataError(f"{what} has missing values; fill them with False, or with True")
    positions = np.flatnonzero(np.asarray(flags, bool)).astype(np.int64)
    if not positions.size:
        raise DataError(f"{what} selects none of the {var.size} variables; select at least one")
    return positions


def _same_names(index: Any, names: NDArray[Any]) -> bool:
    """Return whether an index has these names; a default RangeIndex always matches."""
    counted = type(index).__name__ == "RangeIndex" and len(index) == names.size
    return counted or [*map(str, index)] == [*map(str, names)]


def _texts(names: Any) -> NDArray[Any]:
    """Return names as an array of text."""
    return text_array([str(name) for name in np.asarray(names, object)])


def _element(location: str, element: Any) -> Any:
    """Return an element of a file, read by anndata."""
    io = require("anndata.io", "anndata", "AnnData files")
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of old files
            return io.read_elem(element)
    except DaskfactorError:
        raise
    except Exception as error:  # anndata's own classes of errors change with its versions
        raise DataError(
            f"{element.name} of {location} cannot be read by the anndata that is installed "
            f"({str(error).splitlines()[0][:200]}); a newer anndata may have written it: upgrade "
            "anndata"
        ) from error


def open_hdf5(location: Location) -> Any:
    """Open an HDF5 file for reading."""
    h5py = require("h5py", "anndata", "HDF5 files")
    try:
        return h5py.File(location.path_or_file(), "r")
    except DaskfactorError:
        raise
    except OSError as error:
        if not location.is_url and not Path(location).exists():
            raise DataError(f"{location} does not exist; check the path") from error
        reason = str(error) if not location.is_url else error_summary(error, location)
        kind = "AnnData" if location.lower().endswith(H5AD) else "HDF5"
        raise DataError(f"{location} is not a readable {kind} file: {reason}") from safe_cause(
            error, location
        )
