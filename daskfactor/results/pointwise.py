r"""Log-likelihoods of single cells and posterior predictive draws, as groups for ArviZ.

A cell is one value ``v`` with the mean ``mu`` of a draw of the factors. Its density is that of the
likelihood, normalised with respect to v, at the dispersion of the draw if it is sampled (for
beta = 1, Poisson masses are divided by phi: without this, a model with a high dispersion that
hides a poor fit would seem to predict better). With the uncertainty :math:`\sigma` of a cell it is
that of :math:`\mathcal N(\mu, \phi \sigma^2)`. A cell of weight w counts as w observations of the
same value, as in the posterior:

.. math:: \ell_{ij} = w_{ij} \log p(v_{ij} \mid \mu_{ij}, \phi)

so that removing its likelihood removes its full influence on the run. A new observation has
weight 1.
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import cells_at, match_labels, refuse_repeated, truth
from daskfactor.data.entries import entries_of
from daskfactor.data.holdout import find_cells
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataError, OptionError
from daskfactor.models.likelihood import Likelihood
from daskfactor.random import Stream, generator, resolve_seed
from daskfactor.results.predict import require_noise
from daskfactor.results.predictive_moments import (
    BLOCK_BYTES,
    blockwise,
    draws_of,
    from_array,
    map_blocks,
    mu_of,
)
from daskfactor.results.selection import Cells, keys_of, select, values_at
from daskfactor.results.tensors import chosen
from daskfactor.results.uncertainty import has_uncertainty, variances
from daskfactor.runs.schema import CELL_INDICES, group_attrs, tree_of
from daskfactor.runs.trace import Run, Trace, reads_in_threads

Array = NDArray[Any]
Lazy = Any  # dask.array.Array

CELLS: Final = (
    "cells are a pair (rows, columns) of integer positions, as monitor= and hold_out(...).cells "
    "have them, a pair of labels, or a boolean mask of the shape of V"
)
OBSERVED: Final = "observed_data"
HELD_OUT: Final = "held_out_log_likelihood"
"""Group of log-likelihoods of held-out cells, which `arviz.loo` does not use."""
DISPERSIONS: Final = ("dispersion", "noise")
"""Names of the dispersion of an observation among sampled variables."""


@reads_in_threads
def log_likelihood(
    trace: Trace,
    cells: Any,
    V: Any = None,
    *,
    uncertainty: Any = None,
    weights: Any = None,
    held_out: bool | None = None,
) -> xr.DataTree:
    r"""Return the log-likelihood of some cells for every draw, for ArviZ's ``loo`` and others.

    .. math:: \ell^{(t)}_{ij} = w_{ij} \log p(v_{ij} \mid (W^{(t)} H^{(t)})_{ij}, \phi^{(t)})

    with all normalising constants, evaluated lazily.

    **Reliability.** The best score of a factorization is that of held-out cells: the log of the
    mean density over draws, with `hold_out`, or with ``arviz.loo_kfold`` and `sampling_wrapper`.
    ``arviz.loo`` approximates it by importance weights of the draws. A cell can have a large
    influence on the factors of its row and column if these are short, or if the cell is an
    outlier; the draws then do not cover the posterior without the cell, and Pareto k is large.
    ``python -m benchmarks --only leave_one_out`` compares ``loo`` on small matrices of Poisson
    counts with runs without the cell: the error is small for small k, and tenths of a nat for
    single cells with large k; the in-sample density has a larger error and is always too high.
    So ``loo`` of many cells is a fair score if few k are large, but not that of a single cell.
    ``arviz.reloo`` refits for cells with large k.

    ``arviz.loo`` is only for observed cells: for held-out cells it would remove data that the run
    did not use, and its score would be too low. The score of held-out cells is
    :math:`\sum_{ij} \log \frac1T \sum_t \exp \ell^{(t)}_{ij}`; they are in a separate group,
    ``held_out_log_likelihood``, which ``arviz.loo`` does not use.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store; the fine chain of P-SGRRLD.
    cells
        ``(rows, columns)``: integer positions, as in ``sample(monitor=...)`` and
        ``hold_out(...).cells``, or labels (text, dates; numbers as `xarray.DataArray`); or a
        boolean mask with the shape of the data.
    V
        Values of these cells; or a matrix with the shape of the data, in any form that `sample`
        accepts. By default the data of the run, if its result has them.
    uncertainty
        Uncertainty of these cells for a run with uncertainties, one number or one for each. By
        default that of the run, if its result has it.
    weights
        Weights of these cells for a run with weights, likewise.
    held_out
        True if the run did not use these cells. By default determined from the data of the run,
        if its result has them, or if every cell was observed.

    Returns
    -------
    DataTree
        ``log_likelihood`` with V (chain, draw, cell), backed by dask; ``observed_data`` with V
        (cell,); of held-out cells these are ``held_out_log_likelihood`` and ``held_out_data``.
        ``posterior`` with mu (chain, draw, cell), on which ``loo`` counts effective
        draws. Cells have their labels, ``row_index`` and ``column_index``. Pass it to ArviZ 1.x
        directly, and to ArviZ 0.2x as ``arviz.from_datatree(tree)``.

    Raises
    ------
    OptionError
        If a cell does not exist, the run kept no draws, or draws have weights; if only some cells
        were observed, or this cannot be determined.
    DataError
        If a value is missing or impossible under the likelihood.
    ModelError
        If the density has neither a closed form nor a series here.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> tree = dfac.log_likelihood(trace, ([0, 1], [2, 3]))
    >>> dict(tree["log_likelihood"].sizes)
    {'chain': 1, 'draw': 20, 'cell': 2}
    """
    request = _request_cells(trace, cells, uncertainty, "a log-likelihood")
    values, seen = _values(request, V)
    request.law.check_values(values.min(initial=1.0), values.max(initial=1.0))
    unseen = _are_unseen(request, held_out, seen)
    densities = map_blocks(
        _log_density,
        request.mu,
        request.dispersion,
        _along_cells(request, values),
        _along_cells(request, _weights(request, weights)),
        law=request.law,
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
    )
    name, data = (HELD_OUT, "held_out_data") if unseen else ("log_likelihood", OBSERVED)
    return _tree(request, {name: densities}, values, data)


def _are_unseen(request: "_CellRequest", declared: bool | None, seen: bool) -> bool:
    """Return True if the run did not use the cells, by its data or the argument ``held_out=``.

    ``seen`` is True if values come from the data of the run, or from a matrix as large.

    Raises
    ------
    OptionError
        If it is true for only some cells, contradicts the argument, or cannot be determined.
    """
    if declared is not None:
        declared = truth("held_out", declared)
    about, observed = request.run.data, _stored_values(request)
    shape = about.get("shape", ()) if request.run.axes is None else request.run.axes.sizes
    complete = seen or "n_observed" not in about or about["n_observed"] == math.prod(shape)
    if observed is not None:
        unseen = int(np.isnan(observed).sum())
    elif complete:
        unseen = 0
    elif declared is not None:
        return declared
    else:
        raise OptionError(
            "the result does not have the data, so that it cannot show whether the run used these "
            "cells; pass held_out=True if they were held out, otherwise held_out=False"
        )
    if 0 < unseen < len(request.cells[0]):
        total = len(request.cells[0])
        raise OptionError(
            f"the run used {total - unseen} of these {total} cells "
            "but not the others, whose log-likelihoods are not comparable; pass them separately"
        )
    if declared not in (None, unseen > 0) and (observed is not None or "n_observed" in about):
        used = "did not use" if unseen else "used"
        raise OptionError(f"held_out={declared}, but the run {used} these cells; leave it out")
    return unseen > 0 if declared is None else declared


@reads_in_threads
def posterior_predictive(
    trace: Trace,
    cells: Any,
    V: Any = None,
    *,
    uncertainty: Any = None,
    random_seed: int | None = None,
) -> xr.DataTree:
    r"""Draw a new observation of some cells for every draw, for ArviZ's ``plot_ppc`` and others.

    .. math:: \tilde v^{(t)}_{ij} \sim p(v \mid (W^{(t)} H^{(t)})_{ij}, \phi^{(t)})

    Observations are determined by seed, chain and cell; they do not depend on other cells or on
    chunks. They are drawn lazily.

    Parameters
    ----------
    trace, cells, V, uncertainty
        As for `log_likelihood`. Cells may be missing; missing values are omitted.
    random_seed
        Any integer; by default that of the run.

    Returns
    -------
    DataTree
        ``posterior_predictive`` with V (chain, draw, cell), backed by dask; ``observed_data``
        with V (cell,) if no value is missing; ``posterior`` with mu.

    Raises
    ------
    OptionError, ModelError
        As for `log_likelihood`.
    DataError
        If ``V`` has no values at some cells.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> tree = dfac.posterior_predictive(trace, ([0, 1], [2, 3]), random_seed=0)
    >>> sorted(tree.children)
    ['observed_data', 'posterior', 'posterior_predictive']
    """
    request = _request_cells(trace, cells, uncertainty, "a posterior predictive sample")
    values = _values(request, V)[0] if V is not None else _stored_values(request)
    if random_seed is None:
        random_seed = int(request.run.attrs.get("random_seed", 0))
    mu = request.mu.rechunk({0: 1, 1: -1, 2: max(1, BLOCK_BYTES // (8 * request.mu.shape[1]))})
    chains = request.run.posterior["chain"].values
    draws = map_blocks(
        _new_observations,
        mu,
        request.dispersion,
        *(_along_cells(request, at, mu.chunks[2]) for at in request.numbers),
        from_array(chains[:, None, None], chunks=1),
        law=request.law,
        seed=resolve_seed(random_seed),
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
    )
    complete = None if values is None or np.isnan(values).any() else values
    return _tree(request, {"posterior_predictive": draws}, complete)


class _CellRequest(NamedTuple):
    """Cells of a run with their means and dispersions for every draw.

    ``dispersion`` is (chain, draw, cell), with length 1 if constant; ``cells`` are positions in the
    run; ``numbers`` those in the data, for a tensor in its first unfolding.
    """

    run: Run
    cells: Cells
    law: Likelihood
    mu: Lazy
    dispersion: Lazy
    numbers: tuple[NDArray[np.int64], NDArray[np.int64]]


def _request_cells(trace: Trace, cells: Any, uncertainty: Any, purpose: str) -> _CellRequest:
    """Return cells of a run, with their means and dispersions for every draw."""
    run = Run.of(trace, purpose)
    if run.weights is not None and np.ptp(run.weights) > 1e-12:
        raise OptionError(
            f"{purpose} needs draws of equal weight for ArviZ, but these draws have weights; use "
            "daskfactor.predict, which uses the weights, or draws of daskfactor.sample"
        )
    axes = run.axes
    if axes is None:
        run.require_matrix(purpose)
    model, dispersion = run.law
    require_noise(run, model, purpose, uncertainty)
    law = model.likelihood
    law.log_normalizer(np.ones(1), 1.0)  # raises if the likelihood has no density
    if axes is None:
        at = _chosen(run, cells)
        numbers = at[0].values, at[1].values
    else:
        tensor = chosen(run, axes, cells)
        run, at = tensor.run, (tensor.rows, tensor.columns)
        numbers = at[0].values, axes.columns(at[0])
    group = run.posterior
    drawn = next((one.name for one in model.learnt if one.name in DISPERSIONS), None)
    phi: Any = np.reshape(dispersion, (1, 1, -1))
    if drawn in group:
        phi = group[drawn].transpose("chain", "draw", ...).values.astype(np.float64)
        phi = phi.reshape(*phi.shape[:2], -1)
    if phi.shape[2] > 1:  # one for each column
        phi = phi[:, :, at[1].values]
    if has_uncertainty(run):
        phi = phi * _squares(run, at, uncertainty)
    mu = _means(group, at)
    sizes = [cells if size > 1 else (1,) for size, cells in zip(phi.shape, mu.chunks, strict=True)]
    noise = from_array(phi, chunks=tuple(sizes))
    return _CellRequest(run, at, law, mu, noise, numbers)


def _chosen(run: Run, cells: Any) -> Cells:
    """Return rows and columns of the cells along one dimension, with their labels."""
    every = select(run, None, None)
    pair = isinstance(cells, tuple | list) and len(cells) == 2
    if pair and all(map(_are_labels, cells)):
        keys = [xr.DataArray(np.atleast_1d(np.asarray(item)), dims="cell") for item in cells]
        rows, columns = select(run, *keys)
    else:
        shape, names = [at.size for at in every], [str(at.dims[0]) for at in every]
        if isinstance(cells, xr.DataArray) and any(at.attrs["levels"] for at in every):
            cells = _stacked_mask(cells, every)
        cells = tuple(cells) if pair else cells
        places = cells_at(cells, shape, CELLS, names, [*map(keys_of, every)])
        keys = [xr.DataArray(item, dims="cell") for item in places]
        rows, columns = (at.isel({at.dims[0]: key}) for at, key in zip(every, keys, strict=True))
    if rows.size == 0:
        raise OptionError(f"{CELLS}; got no cells")
    return rows, columns


def _are_labels(item: Any) -> bool:
    """Return True for one or several labels of rows or columns, False for positions."""
    is_named = isinstance(item, xr.DataArray) or np.asarray(item).dtype.kind not in "iu"
    return is_named and np.size(item) > 0


def _stacked_mask(mask: xr.DataArray, every: Cells) -> xr.DataArray:
    """Return a mask over stacked dimensions as a mask over rows and columns, by label."""
    sides = [list(at.attrs["levels"]) or [at.dims[0]] for at in every]
    if set(mask.dims) != {*sides[0], *sides[1]}:
        return mask
    for at in every:
        levels = at.attrs["levels"]
        try:
            unnamed = {name: labels for name, labels in levels.items() if name not in mask.indexes}
            mask = mask.assign_coords(unnamed)
            mask = mask.sel({name: xr.Variable(at.dims, at[name].values) for name in levels})
        except (KeyError, ValueError) as error:
            raise OptionError(
                f"cells lack some labels of the run along {', '.join(map(repr, levels))}; pass a "
                "mask over all labels"
            ) from error
    return mask


def _means(group: xr.Dataset, cells: Cells) -> Lazy:
    """Return mu of all draws at the cells, (chain, draw, cell), lazily and in blocks."""
    draws = draws_of(group, cells)
    return blockwise(
        _block_of_means,
        "sdp",
        *(draws.W, "sdik", draws.H.rechunk({1: draws.W.chunks[1]}), "sdkj"),
        *(draws.row_at, "p", draws.column_at, "p"),
        concatenate=True,
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
    )


def _block_of_means(W: Array, H: Array, row_at: Array, column_at: Array) -> Array:
    out = np.empty((*W.shape[:2], row_at.size))
    for at in np.ndindex(W.shape[:2]):
        out[at] = mu_of(W[at].astype(np.float64), H[at].astype(np.float64), row_at, column_at)
    return out


def _along_cells(request: _CellRequest, values: Array, chunks: Any = None) -> Lazy:
    """Return numbers of cells as an array (1, 1, cell) with the chunks of mu."""
    return from_array(values[None, None], chunks=(1, 1, chunks or request.mu.chunks[2]))


def _log_density(mu: Array, phi: Array, v: Array, weight: Array, law: Likelihood) -> Array:
    dispersion: Any = phi if phi.size > 1 else phi.item()
    density = law.log_density(np.broadcast_to(v, mu.shape), mu, dispersion) - np.log(
        law.spacing(dispersion)
    )
    return np.asarray(weight * density)


def _new_observations(
    mu: Array, phi: Array, rows: Array, columns: Array, chains: Array, law: Likelihood, seed: int
) -> Array:
    out, chain = np.empty(mu.shape), int(chains.item())
    for p, (row, column) in enumerate(zip(rows.flat, columns.flat, strict=True)):
        rng = generator(seed, chain, Stream.PREDICTION, int(row), int(column))
        cell_phi = phi[0, :, p if phi.shape[2] > 1 else 0]
        drawn: Any = cell_phi if cell_phi.size > 1 else cell_phi.item()
        out[0, :, p] = law.sample(rng, mu[0, :, p], drawn)
    return out


def _squares(run: Run, cells: Cells, uncertainty: Any) -> Array:
    """Return squared uncertainties of the cells, (cell,)."""
    squares = np.asarray(variances(run, cells, uncertainty, np.empty(cells[0].size)).compute())
    wrong = ~((squares > 0) & np.isfinite(squares))
    if wrong.any():
        raise DataError(
            f"{wrong.sum()} of {squares.size} cells have no positive, finite uncertainty, the "
            f"first at row {cells[0].values[wrong][0]}, column {cells[1].values[wrong][0]}; "
            "pass them as uncertainty="
        )
    return squares


def _weights(request: _CellRequest, passed: Any) -> Array:
    """Return weights of the cells, (cell,); 1 for a run without weights."""
    size = request.cells[0].size
    if request.run.data.get("weighting") != "weights":
        if passed is not None:
            raise OptionError("the run has no weights of cells; leave weights out")
        return np.ones(size)
    stored = request.run.observed("weights")
    if passed is None and stored is None:
        raise OptionError(
            "a log-likelihood needs the weight of each of these cells, which the result does not "
            "have; pass them as weights="
        )
    weights = (
        _entries_at(stored, request.cells) if passed is None else np.asarray(passed, np.float64)
    )
    if weights.shape not in ((), (size,)) or not (
        np.isfinite(weights).all() and (weights >= 0).all()
    ):
        raise DataError(
            f"weights must be one finite number of at least 0, or one for each of the {size} "
            f"cells, got shape {weights.shape}"
        )
    return np.broadcast_to(weights, (size,))


def _stored_values(request: _CellRequest) -> NDArray[np.float64] | None:
    """Return stored values of the cells, NaN if missing; None if the result has no data."""
    observed = request.run.observed("V")
    return None if observed is None else _entries_at(observed, request.cells)


def _entries_at(stored: Any, cells: Cells) -> NDArray[np.float64]:
    """Return the entries of a stored matrix at single cells."""
    return np.asarray(values_at(stored, cells), np.float64)


def _values(request: _CellRequest, V: Any) -> tuple[NDArray[np.float64], bool]:
    """Return the values of the cells, and True if they are known to be those of the run."""
    rows, columns = request.cells
    size, seen = rows.size, V is None
    if V is None:
        values, advice = _stored_values(request), "as V=, for example hold_out(...).values"
        if values is None:
            raise OptionError(
                "the result has no data, which are stored only if dense and small; pass the matrix "
                "or the values of these cells as V="
            )
    elif np.ndim(V) == 1 and not isinstance(V, str):
        values, advice = np.asarray(V, np.float64), "without NaN"
        if values.size != size:
            raise DataError(f"V has {values.size} values for {size} cells; pass one for each")
    else:
        read = _of_matrix if request.run.axes is None else _of_tensor
        (values, seen), advice = read(request, V), "as V="
    missing = np.isnan(values)
    if missing.any():
        raise DataError(
            f"V has no value at {missing.sum()} of {size} cells, the first at row "
            f"{rows.values[missing][0]}, column {columns.values[missing][0]}; pass values of all "
            f"{advice}, or leave these cells out"
        )
    return np.asarray(values, np.float64), seen


def _of_matrix(request: _CellRequest, V: Any) -> tuple[NDArray[np.float64], bool]:
    """Return entries of a matrix, and True if it has as many as the data of the run."""
    about, every = request.run.data, select(request.run, None, None)
    apart = isinstance(V, xr.DataArray) and V.ndim > 2
    rows, columns = ([*at.attrs["levels"]] or at.dims[0] if apart else None for at in every)
    if getattr(V, "dims", None) == (every[1].dims[0], every[0].dims[0]):
        V = V.transpose()
    data = as_blocks(
        V,
        dtype="float64",
        unstored=about.get("unstored"),
        allow_empty=True,
        rows=rows,
        columns=columns,
    )
    try:
        keys = [(keys_of(at), labels) for at, labels in zip(every, data.labels.keys, strict=True)]
        labelled = [all(labels is not None for labels in pair) for pair in keys]
        shape = tuple(at.size for at in every)
        if any(a != b and not n for a, b, n in zip(data.shape, shape, labelled, strict=True)):
            raise DataError(
                f"V must have the shape of the run's data, {shape}, or one value for each of "
                f"the {request.cells[0].size} cells, got shape {data.shape}"
            )
        same = data.total_observed == about.get("n_observed")
        places = [at.values for at in request.cells]
        for side, what in enumerate(("rows", "columns")):
            if labelled[side]:
                match = match_labels(*keys[side])
                refuse_repeated(match, what, "V")
                places[side] = match.at[places[side]]
        present = (places[0] >= 0) & (places[1] >= 0)
        values = np.full(present.shape, np.nan)
        values[present] = data.values(*(at[present] for at in places))
        return values, same
    finally:
        if data is not V:
            data.close()


def _of_tensor(request: _CellRequest, V: Any) -> tuple[NDArray[np.float64], bool]:
    """Return entries of a tensor, and True if it has as many as the data of the run."""
    about, axes = request.run.data, request.run.axes
    assert axes is not None
    if set(getattr(V, "dims", ())) == set(axes.names):
        V = V.transpose(*axes.names)
    stores_all = not (hasattr(V, "todense") or hasattr(V, "dask"))
    entries = entries_of(V, None if stores_all else about.get("unstored"))
    if tuple(entries.shape) != axes.sizes:
        raise DataError(
            f"V must have the shape of the run's data, {axes.sizes}, or one value for each of the "
            f"{request.cells[0].size} cells, got shape {tuple(entries.shape)}"
        )
    for name, labels in (entries.labels or {}).items():
        if name in axes.labels and not np.array_equal(labels, axes.labels[name]):
            raise DataError(
                f"the labels of V along {name!r} are not those of the run; pass V in the order of "
                "the run, or one value for each cell"
            )
    at = np.ravel_multi_index(tuple(entries.places), axes.sizes)
    requested = request.numbers[0] * math.prod(axes.sizes[1:]) + request.numbers[1]
    zeros = entries.unstored == "zero"
    values = np.full(requested.size, 0.0 if zeros else np.nan)
    place, absent = find_cells(at, requested)
    values[~absent] = entries.values[place[~absent]]
    observed = math.prod(axes.sizes) if zeros else at.size
    return values, observed == about.get("n_observed")


def _tree(
    request: _CellRequest, drawn: dict[str, Lazy], values: Array | None, data: str = OBSERVED
) -> xr.DataTree:
    """Return the groups as a tree, with the labels of the cells under the user's names."""
    labels: dict[Any, Any] = {"cell": ("cell", np.arange(request.cells[0].size))}
    labels |= {name: ("cell", at) for name, at in zip(CELL_INDICES, request.numbers, strict=True)}
    labels |= {
        str(name): ("cell", coord.values, coord.attrs)
        for at in request.cells
        for name, coord in at.coords.items()
        if coord.shape == at.shape
    }
    along = {dim: request.run.posterior[dim].values for dim in ("chain", "draw")}
    sampled = ("chain", "draw", "cell")
    groups = {"posterior": xr.Dataset({"mu": (sampled, request.mu)}, labels | along)}
    for group, array in drawn.items():
        groups[group] = xr.Dataset({"V": (sampled, array)}, labels | along)
    if values is not None:
        groups[data] = xr.Dataset({"V": ("cell", values)}, labels)
    for dataset in groups.values():
        dataset.attrs = group_attrs(request.run.attrs, dataset.dims)
    return tree_of(groups, group_attrs(request.run.attrs, ()))
