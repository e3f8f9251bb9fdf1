"""Write results into an AnnData: `obsm`, `varm` and `uns` under one key, as scanpy does.

W belongs to observations, H to variables; entries are matched by name.
"""

import json
import shutil
import warnings
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor
from daskfactor.checks import match_labels, require, warn
from daskfactor.data.annotated import H5AD, open_annotated
from daskfactor.data.places import kind_of
from daskfactor.data.store import writing_errors
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.publish import check_free, publishing
from daskfactor.results.align import align, sizes
from daskfactor.results.components import factor_moments
from daskfactor.results.schema import MOMENTS, component_labels
from daskfactor.results.summary import cached_summary
from daskfactor.results.summary_cache import cached_in
from daskfactor.results.trace import Run, Trace, reads_in_threads
from daskfactor.urls import Location

Array = NDArray[Any]

KEY: Final = "dfac"
SD: Final = "_sd"
SIDES: Final = {"W": ("obsm", "obs", "observation"), "H": ("varm", "var", "variable")}
"""AnnData attribute, name axis and title of the entries of each factor."""


class Side(NamedTuple):
    """Mean and standard deviation of a factor, (entry, component), with the names of entries."""

    names: Array | None
    mean: Array
    sd: Array | None


class AnnDataResult(NamedTuple):
    """Factors of a result by name, and its contents of ``uns``."""

    sides: dict[str, Side]
    uns: dict[str, Any]
    mask_var: str | None


def to_anndata(
    trace: Trace | xr.Dataset | xr.DataArray,
    adata: Any,
    key_added: str = KEY,
    *,
    evidence: Any = None,
    copy: bool = False,
) -> Any:
    r"""Write a result into an AnnData, as scanpy writes its own.

    .. math:: \mathrm{obsm}_{ik} = \mathrm{E}[W_{ik}], \qquad
        \mathrm{varm}_{jk} = \mathrm{E}[H_{kj}]

    in the order and scale of :func:`align`. Observations and variables are matched by name;
    ``adata`` may have them in any order, and more or fewer of them.

    Parameters
    ----------
    trace
        Result of a run or of :func:`stein_posterior`, or the path of its store; a point estimate
        of :func:`optimize`, which has no standard deviations; or the result of :func:`transform`
        for new observations or variables of an aligned trace, which has only one factor.
    adata
        AnnData with at least some of these observations and variables, usually the one that
        was sampled.
    key_added
        Key in ``obsm``, ``varm`` and ``uns``; existing entries are replaced.
    evidence
        Result of :func:`log_evidence` for this model, to store in ``uns``.
    copy
        Return a copy with the result and leave ``adata`` unchanged.

    Returns
    -------
    AnnData or None
        The copy, if ``copy``; otherwise None, as for scanpy's functions.

    Raises
    ------
    DataError
        If names do not match, or are not unique where they must be.
    OptionError
        If there is no result or no AnnData.

    Notes
    -----
    ``obsm[key]`` and ``varm[key]`` hold posterior means, ``obsm[key + "_sd"]`` and
    ``varm[key + "_sd"]`` standard deviations. Variables that were not fitted, outside
    ``mask_var``, have a loading of 0, as in scanpy's PCA, and a standard deviation of NaN.
    Observations that the result lacks are NaN, with a warning. ``uns[key]`` holds ``params``
    (model, sampler, draws, seed, layer, mask_var, version), ``weight`` (share of each component
    in the mean of the data), ``share`` (of the draws in which it appears), ``convergence`` (the
    lights and the text of :func:`summarize`) and ``evidence``. Biases of :class:`GaussianMF` are
    omitted. A run that stored only moments contributes the components of its first chain.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> import anndata
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> adata = anndata.AnnData(V.astype(np.float32))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(adata, dfac.TweedieNMF(2), **run)
    >>> dfac.to_anndata(trace, adata)
    >>> adata.obsm["dfac"].shape, adata.varm["dfac"].shape
    ((20, 2), (15, 2))
    """
    if not (hasattr(adata, "obsm") and hasattr(adata, "varm")):
        raise OptionError(
            "to_anndata writes into an AnnData object, got "
            f"{adata if isinstance(adata, str) else f'a {type(adata).__name__}'}; a file is "
            "annotated by the command daskfactor annotate"
        )
    contents = result_of(trace, evidence)
    placed = matched(contents, adata)
    if copy:
        adata = adata.to_memory() if adata.isbacked else adata.copy()
    for where, arrays in placed.items():
        for suffix, values in arrays.items():
            getattr(adata, where)[key_added + suffix] = values
    adata.uns[key_added] = contents.uns
    return adata if copy else None


def annotate_file(
    trace: Trace,
    source: str | PathLike[str],
    target: str | PathLike[str],
    key_added: str = KEY,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a result into a copy of an AnnData file, of which only names are read.

    Return the contents of ``uns``. ``target`` may be ``source`` itself.

    Raises
    ------
    DataError
        If there is no AnnData, or names do not match.
    StoreError
        If the target exists and may not be replaced, or cannot be written.
    """
    source, target = Path(source).expanduser(), Path(target).expanduser()
    if source.suffix != H5AD and not _is_annotated(str(source)):
        raise DataError(f"{source} is no AnnData: give an .h5ad file or a .zarr that anndata wrote")
    file = open_annotated(Location(source))
    check_free(target, overwrite, _is_annotated)
    if target.suffix != source.suffix:
        raise OptionError(f"{target} must end in {source.suffix}, as {source.name} does")
    result = result_of(trace)
    placed = matched(result, file)
    with writing_errors(str(target)), publishing(target, overwrite, _is_annotated) as draft:
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, draft)
        _write_elements(draft, key_added, placed, result.uns)
    return result.uns


def _is_annotated(path: str) -> bool:
    return kind_of(path) == "anndata"


def _write_elements(
    path: Path, key: str, placed: dict[str, dict[str, Array]], uns: dict[str, Any]
) -> None:
    """Write elements into a file; elements of the same names are replaced."""
    io = require("anndata.io", "anndata", "AnnData files")
    elements = [
        (where, key + suffix, values)
        for where, arrays in placed.items()
        for suffix, values in arrays.items()
    ]
    if path.is_dir():
        import zarr

        root: Any = zarr.open_group(store=str(path), mode="r+", use_consolidated=False)
    else:
        root = require("h5py", "anndata", "AnnData files").File(path, "r+")
    for where, name, values in [*elements, ("uns", key, uns)]:
        if where not in root:
            io.write_elem(root, where, {})
        if name in root[where]:
            del root[where][name]
        io.write_elem(root[where], name, values)
    if path.is_dir():
        _consolidate(path)
    else:
        root.close()


def _consolidate(path: Path) -> None:
    """Update consolidated metadata of a zarr store, if it has them: readers use nothing else."""
    import zarr

    root = zarr.open_group(store=str(path), mode="r")
    if root.metadata.consolidated_metadata is not None:
        # Consolidated metadata are not part of the specification yet.
        with warnings.catch_warnings(action="ignore"):
            zarr.consolidate_metadata(str(path), zarr_format=root.metadata.zarr_format)


@reads_in_threads
def result_of(result: Any, evidence: Any = None) -> AnnDataResult:
    """Return factors and metadata of a result."""
    if isinstance(result, xr.DataArray):
        contents = _of_new(result)
    elif isinstance(result, xr.Dataset) and {"W", "H"} <= set(result.data_vars):
        run = Run(result)
        run.require_matrix("to_anndata")
        contents = _of_point(run)
    else:
        run = Run.of(result)
        run.require_matrix("to_anndata")
        contents = _of_trace(run)
    if evidence is not None:
        names = ("value", "standard_error", "discretization_error")
        contents.uns["evidence"] = {
            name: float(number)
            for name in names
            if (number := getattr(evidence, name, None)) is not None
        }
    return contents


def _of_trace(run: Run) -> AnnDataResult:
    """Return the result of aligned draws, or of moments."""
    aligned = Run(align(run.tree)) if run.has_draws and not run.is_aligned else run
    if MOMENTS not in aligned:
        raise OptionError("the run has no draws yet; resume it before writing an AnnData")
    moments, together = aligned.group(MOMENTS), aligned.is_aligned
    count = _n_components(run, moments.sizes["component"])
    dtype, sides = np.dtype(run.attrs.get("dtype", "float32")), {}
    for name, dim in zip("WH", aligned.dims, strict=True):
        mean_and_sd = factor_moments(aligned, name, None if together else 0)
        mean, sd = (one[:count].T.astype(dtype) for one in mean_and_sd)
        sides[name] = Side(_names(moments, dim), mean, sd)
    uns = _params(run, sides)
    if together:
        uns["share"] = aligned.group("alignment")["share"].values[:count]
    summary = cached_summary(cached_in(run.tree), run.tree, aligned.tree if together else None)
    lights = getattr(summary, "lights", {})
    uns["convergence"] = {name: light.status for name, light in lights.items()}
    uns["convergence"]["verdict"] = summary.verdict
    return AnnDataResult(sides, uns, _source(run).get("mask_var"))


def _of_point(run: Run) -> AnnDataResult:
    """Return the result of a point estimate, without standard deviations."""
    point: Any = run.tree
    count, sides = _n_components(run, point.sizes["component"]), {}
    for name in "WH":
        (dim,) = (one for one in point[name].dims if one != "component")
        values = point[name].transpose(dim, "component").values[:, :count]
        sides[name] = Side(_names(point, dim), values, None)
    return AnnDataResult(sides, _params(run, sides), _source(run).get("mask_var"))


def _of_new(new: xr.DataArray) -> AnnDataResult:
    """Return the result of factors of new rows, or columns: (weighted) draws or a mean."""
    rest = [dim for dim in new.dims if dim not in ("chain", "draw", "component")]
    if new.name not in SIDES or "component" not in new.dims or len(rest) != 1:
        raise OptionError(
            f"an array {new.name!r} with the dimensions {', '.join(map(str, new.dims))} has no "
            "factors; pass the result of transform()"
        )
    over = [dim for dim in ("chain", "draw") if dim in new.dims]
    if over and not new.attrs.get("aligned", 1):
        raise OptionError(
            "these draws belong to an unaligned trace, whose components may swap places between "
            "draws, so that a mean has no meaning; pass transform(align(trace), ...)"
        )
    factors = [str(label).isdecimal() for label in component_labels(new)]  # no biases
    values = new.isel(component=factors).transpose(..., rest[0], "component").astype(np.float64)
    if not over:
        side = Side(_names(new, rest[0]), values.values.astype(new.dtype), None)
    else:
        masses = xr.ones_like(values.isel({rest[0]: 0, "component": 0}, drop=True))
        masses = new.coords.get("weight", masses).reset_coords(drop=True)
        weighted = values.weighted(masses)
        mean, sd = (
            moment.values.astype(new.dtype) for moment in (weighted.mean(over), weighted.std(over))
        )
        side = Side(_names(new, rest[0]), mean, sd)
    return AnnDataResult({str(new.name): side}, _params(Run(new), {}), None)


def _names(group: Any, dim: Any) -> Array | None:
    """Return labels of rows, or columns, as text."""
    return None if dim not in group.coords else np.array([*map(str, group[dim].values)], object)


def _n_components(run: Run, width: int) -> int:
    """Return the number of columns of W without biases."""
    return width if run.model is None else min(int(run.model.n_components), width)


def _source(run: Run) -> dict[str, Any]:
    """Return layer and variables of the AnnData that a result was made from."""
    return dict(run.document("run").get("source", {}))


def _params(run: Run, sides: dict[str, Side]) -> dict[str, Any]:
    """Return settings of a result for ``uns``, in types that all versions of anndata write."""
    attrs, model, sampler = run.attrs, run.document("model"), run.document("sampler")
    params = {
        "model": model.get("type"),
        "model_settings": json.dumps(model) if model else None,
        "sampler": sampler.get("type", attrs.get("method")),
        "random_seed": attrs.get("random_seed"),
        "version": attrs.get("inference_library_version", daskfactor.__version__),
        **{name: attrs.get(name) for name in ("draws", "tune", "thin", "chains", "keep", "n_iter")},
        **{name: _source(run).get(name) for name in ("layer", "mask_var")},
        "dispersion": attrs.get("dispersion"),
    }
    params = {name: value for name, value in params.items() if value is not None}
    if not sides:
        return {"params": params}
    W, H = sides["W"].mean.astype(np.float64), sides["H"].mean.astype(np.float64).T
    params["n_components"] = W.shape[1]
    of_w, of_h = sizes(W, H, bool((W < 0).any() or (H < 0).any()))
    weight = of_w * of_h
    return {"params": params, "weight": weight / (weight.sum() or 1.0)}


def matched(result: AnnDataResult, adata: Any) -> dict[str, dict[str, Array]]:
    """Return arrays that match the axes of an AnnData, by attribute and suffix of the key."""
    columns: dict[str, dict[str, Array]] = {}
    for name, side in result.sides.items():
        where, axis, entry = SIDES[name]
        names = np.array([*map(str, getattr(adata, f"{axis}_names"))], object)
        masked = None
        if name == "H" and result.mask_var is not None and result.mask_var in adata.var.columns:
            masked = np.asarray(adata.var[result.mask_var])
        at = positions(side, names, axis, masked)
        missing = at < 0
        if name == "W" and missing.any():
            warn(
                f"{int(missing.sum())} of the {at.size} {entry}s of the AnnData are not among the "
                f"{len(side.mean)} of the result; their rows of {where} are NaN",
                DataWarning,
            )
        columns[where] = {"": _spread(side.mean, at, np.nan if name == "W" else 0.0)}
        if side.sd is not None:
            columns[where][SD] = _spread(side.sd, at, np.nan)
    return columns


def _spread(values: Array, at: NDArray[np.int64], fill: float) -> Array:
    """Return rows in the order of the AnnData; ``fill`` for names that the result lacks."""
    out = np.full((at.size, values.shape[1]), fill, values.dtype)
    out[at >= 0] = values[at[at >= 0]]
    return out


def positions(
    side: Side, names: Array, axis: str, masked: Array | None = None
) -> NDArray[np.int64]:
    """Return the row of the result for each name of an AnnData, -1 if it has none.

    Raises
    ------
    DataError
        If names cannot be matched.
    """
    count, labels = len(side.mean), side.names
    if labels is None:
        if count != names.size:
            raise DataError(
                f"the result has {count} rows for {axis} without names, but the AnnData has "
                f"{names.size}; pass the AnnData itself to sample or as_blocks to keep names"
            )
        return np.arange(count)
    if masked is not None and masked.dtype == bool and np.array_equal(labels, names[masked]):
        return np.where(masked, np.cumsum(masked) - 1, -1)
    places, sides = match_labels(names, labels), (f"{axis}_names of the AnnData", "the result")
    if len(places.unmatched) == count:
        raise DataError(
            f"none of the {count} names of the result for {axis} ({labels[0]!r}, ...) is in "
            f"{axis}_names of the AnnData ({names[0] if names.size else 'none'!r}, ...); pass the "
            "AnnData that was sampled, with observations as rows"
        )
    for what, twice in zip(sides, places.repeated, strict=True):
        if twice is not None:
            raise DataError(
                f"{what} has the name {twice!r} more than once, and the order of both sides "
                f"differs, so that names cannot be matched; call adata.{axis}_names_make_unique("
                ") before sampling"
            )
    return places.at
