"""Results in an AnnData, where scanpy looks for them: `obsm`, `varm` and `uns` under one key.

W belongs to observations, H to variables; entries are matched by name.
"""

import json
import shutil
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor
from daskfactor.checks import match_labels, require, warn
from daskfactor.data.annotated import open_annotated
from daskfactor.data.store import writing_errors, zarr_kind
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.publish import check_free, publishing
from daskfactor.results.align import align, sizes
from daskfactor.results.components import factor_moments
from daskfactor.results.schema import MOMENTS, component_labels
from daskfactor.results.summary import cached_summary
from daskfactor.results.summary_cache import cached_in
from daskfactor.results.trace import Run, Trace, reads_here

Array = NDArray[Any]

KEY: Final = "dfac"
SD: Final = "_sd"
SIDES: Final = {"W": ("obsm", "obs", "observation"), "H": ("varm", "var", "variable")}
"""Of each factor: where it goes, what names it, what one entry is called."""


class Side(NamedTuple):
    """Mean and standard deviation of a factor, (entry, component), with the names of entries."""

    names: Array | None
    mean: Array
    sd: Array | None


class AnnDataResult(NamedTuple):
    """What a result says: its factors by name, and what goes into ``uns``."""

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

    of the components that :func:`align` makes, in its order and scale. Observations and
    variables are matched by name, in whatever order and number they are in ``adata``.

    Parameters
    ----------
    trace
        Result of a run or of :func:`stein_posterior`, or the path of its store; a point of
        :func:`optimize`, which has no standard deviations; or what :func:`transform` gives
        for new observations or variables, of an aligned trace, which has one side alone.
    adata
        Any AnnData with those observations and variables, or some of them, or more: usually
        the one that was sampled.
    key_added
        Key in ``obsm``, ``varm`` and ``uns``; what is there is replaced.
    evidence
        Result of :func:`log_evidence` for this model, to go into ``uns``.
    copy
        Whether to return a copy with the result rather than change ``adata``.

    Returns
    -------
    AnnData or None
        The copy, if ``copy``; otherwise nothing, as from scanpy's functions.

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
    (model, sampler, draws, seed, layer, mask_var, version), ``weight`` (share of the data's mean
    that each component carries), ``share`` (of the draws in which it appears), ``convergence``
    (the lights of :func:`summarize` and its words) and ``evidence``. Biases of a
    :class:`GaussianMF` are left out. Of a run that kept moments alone, components are those of
    its first chain.

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
    told = result_of(trace, evidence)
    placed = matched(told, adata)
    if copy:
        adata = adata.to_memory() if adata.isbacked else adata.copy()
    for where, arrays in placed.items():
        for suffix, values in arrays.items():
            getattr(adata, where)[key_added + suffix] = values
    adata.uns[key_added] = told.uns
    return adata if copy else None


def annotate_file(
    trace: Trace,
    source: str | PathLike[str],
    target: str | PathLike[str],
    key_added: str = KEY,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a result into a copy of a file of an AnnData, of which only names are read.

    Returns what went into ``uns``. ``target`` may be ``source`` itself.

    Raises
    ------
    DataError
        If there is no AnnData, or names do not match.
    StoreError
        If something is there that may not be replaced, or it cannot be written.
    """
    source, target = Path(source).expanduser(), Path(target).expanduser()
    file = open_annotated(str(source))
    if file is None:
        raise DataError(f"{source} is no AnnData: give an .h5ad file or a .zarr that anndata wrote")
    check_free(target, overwrite, _is_annotated)
    if target.suffix != source.suffix:
        raise OptionError(f"{target} must end in {source.suffix}, as {source.name} does")
    told = result_of(trace)
    placed = matched(told, file)
    with writing_errors(str(target)), publishing(target, overwrite, _is_annotated) as draft:
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, draft)
        _write_elements(draft, key_added, placed, told.uns)
    return told.uns


def _is_annotated(path: str) -> bool:
    return zarr_kind(path) == "anndata"


def _write_elements(
    path: Path, key: str, placed: dict[str, dict[str, Array]], uns: dict[str, Any]
) -> None:
    """Add elements to a file, in place of those that have their names."""
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
    """Write the index of a zarr store anew, if it has one: readers see nothing else."""
    import zarr

    root = zarr.open_group(store=str(path), mode="r")
    if root.metadata.consolidated_metadata is not None:
        import warnings

        with warnings.catch_warnings():  # that the index is no part of the format, yet
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(str(path), zarr_format=root.metadata.zarr_format)


@reads_here
def result_of(result: Any, evidence: Any = None) -> AnnDataResult:
    """Components of a result, and what is to be said of it."""
    if isinstance(result, xr.DataArray):
        told = _of_new(result)
    elif isinstance(result, xr.Dataset) and {"W", "H"} <= set(result.data_vars):
        run = Run(result)
        run.require_matrix("to_anndata")
        told = _of_point(run)
    else:
        run = Run.of(result)
        run.require_matrix("to_anndata")
        told = _of_trace(run)
    if evidence is not None:
        names = ("value", "standard_error", "discretization_error")
        told.uns["evidence"] = {
            name: float(own) for name in names if (own := getattr(evidence, name, None)) is not None
        }
    return told


def _of_trace(run: Run) -> AnnDataResult:
    """Of draws, aligned, or of moments alone."""
    aligned = Run(align(run.tree)) if run.has_draws and not run.is_aligned else run
    if MOMENTS not in aligned:
        raise OptionError("this run has no draws yet, and an AnnData needs some; resume it first")
    moments, together = aligned.group(MOMENTS), aligned.is_aligned
    count = _n_components(run, moments.sizes["component"])
    dtype, sides = np.dtype(run.attrs.get("dtype", "float32")), {}
    for name, dim in zip("WH", aligned.dims, strict=True):
        own = factor_moments(aligned, name, None if together else 0)
        mean, sd = (one[:count].T.astype(dtype) for one in own)
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
    """Of a point estimate, which knows no spread."""
    point: Any = run.tree
    count, sides = _n_components(run, point.sizes["component"]), {}
    for name in "WH":
        (dim,) = (one for one in point[name].dims if one != "component")
        values = point[name].transpose(dim, "component").values[:, :count]
        sides[name] = Side(_names(point, dim), values, None)
    return AnnDataResult(sides, _params(run, sides), _source(run).get("mask_var"))


def _of_new(new: xr.DataArray) -> AnnDataResult:
    """Of factors of new rows, or columns: draws, by weight if they have any, or a mean."""
    rest = [dim for dim in new.dims if dim not in ("chain", "draw", "component")]
    if new.name not in SIDES or "component" not in new.dims or len(rest) != 1:
        raise OptionError(
            f"an array {new.name!r} with the dimensions {', '.join(map(str, new.dims))} holds no "
            "factors; pass what transform() returned"
        )
    over = [dim for dim in ("chain", "draw") if dim in new.dims]
    if over and not new.attrs.get("aligned", 1):
        raise OptionError(
            "these are draws under a trace that is not aligned, whose components may change places "
            "from draw to draw, so that they have no mean; pass transform(align(trace), ...)"
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
            own.values.astype(new.dtype) for own in (weighted.mean(over), weighted.std(over))
        )
        side = Side(_names(new, rest[0]), mean, sd)
    return AnnDataResult({str(new.name): side}, _params(Run(new), {}), None)


def _names(group: Any, dim: Any) -> Array | None:
    """Labels of rows, or columns, as text."""
    return None if dim not in group.coords else np.array([*map(str, group[dim].values)], object)


def _n_components(run: Run, width: int) -> int:
    """How many of the columns of W are no biases."""
    return width if run.model is None else min(int(run.model.n_components), width)


def _source(run: Run) -> dict[str, Any]:
    """What a result says of the layer and the variables that it was made from."""
    return dict(run.document("run").get("source", {}))


def _params(run: Run, sides: dict[str, Side]) -> dict[str, Any]:
    """What ``uns`` holds of how a result was made: only what all versions of anndata can write."""
    attrs, model, sampler = run.attrs, run.document("model"), run.document("sampler")
    known = {
        "model": model.get("type"),
        "model_settings": json.dumps(model) if model else None,
        "sampler": sampler.get("type", attrs.get("method")),
        "random_seed": attrs.get("random_seed"),
        "version": attrs.get("inference_library_version", daskfactor.__version__),
        **{name: attrs.get(name) for name in ("draws", "tune", "thin", "chains", "keep", "n_iter")},
        **{name: _source(run).get(name) for name in ("layer", "mask_var")},
        "dispersion": attrs.get("dispersion"),
    }
    params = {name: value for name, value in known.items() if value is not None}
    if not sides:
        return {"params": params}
    W, H = sides["W"].mean.astype(np.float64), sides["H"].mean.astype(np.float64).T
    params["n_components"] = W.shape[1]
    of_w, of_h = sizes(W, H, bool((W < 0).any() or (H < 0).any()))
    weight = of_w * of_h
    return {"params": params, "weight": weight / (weight.sum() or 1.0)}


def matched(told: AnnDataResult, adata: Any) -> dict[str, dict[str, Array]]:
    """Arrays of the length of an AnnData's axes, by where they go and what is added to the key."""
    found: dict[str, dict[str, Array]] = {}
    for name, side in told.sides.items():
        where, axis, entry = SIDES[name]
        names = np.array([*map(str, getattr(adata, f"{axis}_names"))], object)
        masked = None
        if name == "H" and told.mask_var is not None and told.mask_var in adata.var.columns:
            masked = np.asarray(adata.var[told.mask_var])
        at = positions(side, names, axis, masked)
        missing = at < 0
        if name == "W" and missing.any():
            warn(
                f"{int(missing.sum())} of the {at.size} {entry}s of the AnnData are not among the "
                f"{len(side.mean)} of the result; their rows of {where} are NaN",
                DataWarning,
            )
        found[where] = {"": _spread(side.mean, at, np.nan if name == "W" else 0.0)}
        if side.sd is not None:
            found[where][SD] = _spread(side.sd, at, np.nan)
    return found


def _spread(values: Array, at: NDArray[np.int64], fill: float) -> Array:
    """Rows at their places in the AnnData; ``fill`` where it has more."""
    out = np.full((at.size, values.shape[1]), fill, values.dtype)
    out[at >= 0] = values[at[at >= 0]]
    return out


def positions(
    side: Side, names: Array, axis: str, masked: Array | None = None
) -> NDArray[np.int64]:
    """Row of the result for each name of an AnnData, -1 where it has none.

    Raises
    ------
    DataError
        If they cannot be matched.
    """
    count, own = len(side.mean), side.names
    if own is None:
        if count != names.size:
            raise DataError(
                f"the result has {count} rows for {axis} without names, and the AnnData has "
                f"{names.size}; pass the AnnData itself to sample, or as_blocks, so that names "
                "are kept"
            )
        return np.arange(count)
    if masked is not None and masked.dtype == bool and np.array_equal(own, names[masked]):
        return np.where(masked, np.cumsum(masked) - 1, -1)
    found, sides = match_labels(names, own), (f"{axis}_names of the AnnData", "the result")
    if len(found.unmatched) == count:
        raise DataError(
            f"none of the {count} names that the result has for {axis} ({own[0]!r}, ...) is among "
            f"{axis}_names of the AnnData ({names[0] if names.size else 'none'!r}, ...); pass the "
            "AnnData that was sampled, with observations as rows"
        )
    for what, twice in zip(sides, found.repeated, strict=True):
        if twice is not None:
            raise DataError(
                f"{what} has the name {twice!r} more than once, and in another order than the "
                f"other side, so that names cannot be matched; call adata.{axis}_names_make_unique("
                ") before sampling"
            )
    return found.at
