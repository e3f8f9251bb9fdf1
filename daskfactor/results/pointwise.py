r"""Log densities of single cells and draws of new observations there, as ArviZ's groups.

A cell is one value ``v`` with the mean ``mu`` of a draw of the factors. Its density is the law's
own, with every constant, for each unit of v, at the dispersion of that draw where dispersions are
drawn (so that beta = 1 has phi times Poisson's masses over phi: with them undivided, a model whose
dispersion is set high to make up for a poor fit would seem to predict better). With the
uncertainty :math:`\sigma` of a cell it is that of :math:`\mathcal N(\mu, \phi \sigma^2)`. A cell
of weight w is w observations of the same value, as it is to the posterior:

.. math:: \ell_{ij} = w_{ij} \log p(v_{ij} \mid \mu_{ij}, \phi)

so that leaving it out by its likelihood leaves out what the run took in. A new observation
is one of weight 1.
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import cell_positions, label_at, match_labels, truth
from daskfactor.data.sources import as_blocks
from daskfactor.data.tensor import entries_of
from daskfactor.errors import DataError, OptionError
from daskfactor.models.likelihood import Likelihood
from daskfactor.random import Stream, generator, resolve_seed
from daskfactor.results.cellwise import (
    BLOCK_BYTES,
    blockwise,
    draws_of,
    from_array,
    map_blocks,
    mu_of,
)
from daskfactor.results.predict import observed_law
from daskfactor.results.schema import CELL_INDICES, group_attrs, tree_of
from daskfactor.results.selection import keys_of, select
from daskfactor.results.tensors import chosen
from daskfactor.results.trace import Run, Trace, reads_here
from daskfactor.results.uncertainty import has_uncertainty, knows_variances, variances

Array = NDArray[Any]
Lazy = Any  # dask.array.Array

CELLS: Final = (
    "cells are a pair (rows, columns) of integer positions, as monitor= and hold_out(...).cells "
    "have them, a pair of labels, or a boolean mask of the shape of V"
)
OBSERVED: Final = "observed_data"
HELD_OUT: Final = "held_out_log_likelihood"
"""Group of log densities of cells that a run has not seen: `arviz.loo` looks for another."""
DISPERSIONS: Final = ("dispersion", "noise")
"""What the dispersion of an observation may be called among what is drawn."""


@reads_here
def log_likelihood(
    trace: Trace,
    cells: Any,
    V: Any = None,
    *,
    uncertainty: Any = None,
    weights: Any = None,
    held_out: bool | None = None,
) -> xr.DataTree:
    r"""Log density of the values at some cells under every draw, for ArviZ's ``loo`` and others.

    .. math:: \ell^{(t)}_{ij} = w_{ij} \log p(v_{ij} \mid (W^{(t)} H^{(t)})_{ij}, \phi^{(t)})

    with all normalising constants. Nothing is read or computed of the draws until asked for.

    **What to trust.** The honest score of a factorization is that of cells which it never saw:
    hold some out and take the log of the mean over draws of the density there, by `hold_out` or by
    ``arviz.loo_kfold`` with `sampling_wrapper`. ``arviz.loo`` imitates that by weighting the
    draws anew. But a cell is much of what is known of its row and its column: where these are
    short, or a cell is unlike the others, their factors would move farther than the draws reach,
    which a large Pareto k tells. ``python -m benchmarks --only leave_one_out`` compares it on
    small matrices of Poisson counts with runs without the cell: ``loo`` is near where k is small,
    and off by tenths of a nat for single cells where it is large; the density at cells that were
    seen is farther off, and always too good. So ``loo`` of many cells is a fair score where few k
    are large; that of one cell is not. ``arviz.reloo`` refits for those of large k.

    ``arviz.loo`` is for cells that the run has seen, and for these alone: of held-out cells it
    would leave out what was never in, and tell too low a score. Theirs is
    :math:`\sum_{ij} \log \frac1T \sum_t \exp \ell^{(t)}_{ij}`, as it stands, and they are in a
    group of their own, ``held_out_log_likelihood``, which ``arviz.loo`` does not take.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store. Of P-SGRRLD, the fine chain.
    cells
        ``(rows, columns)``: integer positions, as ``sample(monitor=...)`` takes and
        ``hold_out(...).cells`` is, or labels (text, dates; numbers as `xarray.DataArray`); or a
        boolean mask of the shape of the data.
    V
        The values at these cells, one for each; or a matrix of the shape of the run's, anything
        that `sample` takes. Left out: the run's own data, where results keep them.
    uncertainty
        For a run with uncertainties of cells: that of these cells, one number or one for
        each. Left out: the run's own, where results keep them.
    weights
        The same for a run with weights of cells.
    held_out
        Whether the run has not seen these cells. Left out: as its data say, where results keep
        them, or where it saw every cell.

    Returns
    -------
    DataTree
        ``log_likelihood`` with V (chain, draw, cell), backed by dask; ``observed_data`` with V
        (cell,); of held-out cells these are ``held_out_log_likelihood`` and ``held_out_data``.
        ``posterior`` with mu (chain, draw, cell), on which ``loo`` counts effective
        draws. Cells carry their labels, ``row_index`` and ``column_index``. ArviZ 1.x takes
        it as it is, ArviZ 0.2x as ``arviz.from_datatree(tree)``.

    Raises
    ------
    OptionError
        If a cell does not exist, the run kept no draws, or these have weights; if some cells were
        seen and others not, or it is not known which.
    DataError
        If a value is missing or none of the law's.
    ModelError
        If the density of the law has neither a closed form nor a series here.

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
    asked = _ask(trace, cells, uncertainty, "a log-likelihood")
    values, seen = _values(asked, V)
    asked.law.check_values(values.min(initial=1.0), values.max(initial=1.0))
    apart = _held_out(asked, held_out, seen)
    found = map_blocks(
        _log_density,
        asked.mu,
        asked.dispersion,
        _along_cells(asked, values),
        _along_cells(asked, _weights(asked, weights)),
        law=asked.law,
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
    )
    name, data = (HELD_OUT, "held_out_data") if apart else ("log_likelihood", OBSERVED)
    return _tree(asked, {name: found}, values, data)


def _held_out(asked: "_Asked", told: bool | None, seen: bool) -> bool:
    """Whether the run has not seen the cells: as its data say, or as the caller does.

    ``seen``: their values come from the run's own data, or from a matrix with as many entries.

    Raises
    ------
    OptionError
        If this holds for some of them, is not what the caller says, or is not known.
    """
    if told is not None:
        told = truth("held_out", told)
    about, kept = asked.run.data, _own_values(asked)
    shape = about.get("shape", ()) if asked.run.axes is None else asked.run.axes.sizes
    whole = seen or "n_observed" not in about or about["n_observed"] == math.prod(shape)
    if kept is not None:
        unseen = int(np.isnan(kept).sum())
    elif whole:
        unseen = 0
    elif told is not None:
        return told
    else:
        raise OptionError(
            "the results do not keep the data, so that nothing tells whether the run has seen "
            "these cells: pass held_out=True if they were left out, or held_out=False"
        )
    if 0 < unseen < len(asked.cells[0]):
        raise OptionError(
            f"the run has seen {len(asked.cells[0]) - unseen} of these {len(asked.cells[0])} cells "
            "and not the others, whose log-likelihoods do not mean the same: ask for them apart"
        )
    if told not in (None, unseen > 0) and (kept is not None or "n_observed" in about):
        has = "has not" if unseen else "has"
        raise OptionError(f"held_out={told}, but the run {has} seen these cells; leave it out")
    return unseen > 0 if told is None else told


@reads_here
def posterior_predictive(
    trace: Trace,
    cells: Any,
    V: Any = None,
    *,
    uncertainty: Any = None,
    random_seed: int | None = None,
) -> xr.DataTree:
    r"""Draw a new observation of some cells under every draw, for ArviZ's ``plot_ppc`` and others.

    .. math:: \tilde v^{(t)}_{ij} \sim p(v \mid (W^{(t)} H^{(t)})_{ij}, \phi^{(t)})

    The same seed, chain and cell give the same observations, whatever other cells are asked for
    and however the result is chunked. Nothing is read or drawn until asked for.

    Parameters
    ----------
    trace, cells, V, uncertainty
        As for `log_likelihood`. Cells may be missing; values that are not known are left out.
    random_seed
        Any whole number; left out, that of the run.

    Returns
    -------
    DataTree
        ``posterior_predictive`` with V (chain, draw, cell), backed by dask; ``observed_data``
        with V (cell,) if all of the values are known; ``posterior`` with mu.

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
    asked = _ask(trace, cells, uncertainty, "a posterior predictive sample")
    values = _values(asked, V)[0] if V is not None else _own_values(asked)
    if random_seed is None:
        random_seed = int(asked.run.attrs.get("random_seed", 0))
    mu = asked.mu.rechunk({0: 1, 1: -1, 2: max(1, BLOCK_BYTES // (8 * asked.mu.shape[1]))})
    chains = asked.run.posterior["chain"].values
    found = map_blocks(
        _new_observations,
        mu,
        asked.dispersion,
        *(_along_cells(asked, at, mu.chunks[2]) for at in asked.numbers),
        from_array(chains[:, None, None], chunks=1),
        law=asked.law,
        seed=resolve_seed(random_seed),
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
    )
    known = None if values is None or np.isnan(values).any() else values
    return _tree(asked, {"posterior_predictive": found}, known)


class _Asked(NamedTuple):
    """What is asked of which cells of a run; ``dispersion`` (chain, draw, cell), or 1 for any.

    ``cells`` are positions in the run; ``numbers`` those in the data, of a tensor in its first
    unfolding.
    """

    run: Run
    cells: tuple[xr.DataArray, xr.DataArray]
    law: Likelihood
    mu: Lazy
    dispersion: Lazy
    numbers: tuple[NDArray[np.int64], NDArray[np.int64]]


def _ask(trace: Trace, cells: Any, uncertainty: Any, purpose: str) -> _Asked:
    """Find the cells, and their means and dispersions under every draw."""
    run = Run.of(trace, purpose)
    if run.weights is not None and np.ptp(run.weights) > 1e-12:
        raise OptionError(
            f"{purpose} has one number for every draw, which ArviZ counts alike, and these draws "
            "have weights; use daskfactor.predict, which goes by the weights, or the draws of "
            "daskfactor.sample"
        )
    axes = run.axes
    if axes is None:
        run.require_matrix(purpose)
    model, dispersion = observed_law(run)
    if not model.has_observations:
        raise OptionError(
            f"{purpose} needs a law of observations, and a {type(model).__name__} has none: it "
            "only tells good factorizations from others"
        )
    if not knows_variances(run, uncertainty):
        raise OptionError(
            f"{purpose} needs the uncertainty of each of these cells, and the run did not keep "
            "those that it was given; pass them as uncertainty="
        )
    law = model.likelihood
    law.log_normalizer(np.ones(1), 1.0)  # refuses a law without a density
    if axes is None:
        at = _chosen(run, cells)
        numbers = at[0].values, at[1].values
    else:
        found = chosen(run, axes, cells)
        run, at = found.run, (found.rows, found.columns)
        numbers = at[0].values, axes.columns(at[0])
    group = run.posterior
    drawn = next((own.name for own in model.learnt if own.name in DISPERSIONS), None)
    phi: Any = np.reshape(dispersion, (1, 1, -1))
    if drawn in group:
        phi = group[drawn].transpose("chain", "draw", ...).values.astype(np.float64)
        phi = phi.reshape(*phi.shape[:2], -1)
    if phi.shape[2] > 1:  # of columns
        phi = phi[:, :, at[1].values]
    if has_uncertainty(run):
        phi = phi * _squares(run, at, uncertainty)
    mu = _means(group, at)
    sizes = [whole if size > 1 else (1,) for size, whole in zip(phi.shape, mu.chunks, strict=True)]
    noise = from_array(phi, chunks=tuple(sizes))
    return _Asked(run, at, law, mu, noise, numbers)


def _chosen(run: Run, cells: Any) -> tuple[xr.DataArray, xr.DataArray]:
    """Positions of rows and columns of the cells, along one dimension, with their labels."""
    every = select(run, None, None)
    pair = isinstance(cells, tuple | list) and len(cells) == 2
    if pair:
        named = [isinstance(own, xr.DataArray) for own in cells]
        named = [
            a or np.asarray(own).dtype.kind not in "iu" for a, own in zip(named, cells, strict=True)
        ]
        cells = tuple(cells)
    if pair and all(named) and all(np.size(own) for own in cells):
        keys = [xr.DataArray(np.atleast_1d(np.asarray(own)), dims="cell") for own in cells]
        rows, columns = select(run, *keys)
    else:
        shape, names = [at.size for at in every], [str(at.dims[0]) for at in every]
        if isinstance(cells, xr.DataArray) and any(at.attrs["levels"] for at in every):
            cells = _stacked_mask(cells, every)
        found = cell_positions(cells, shape, names, CELLS, (keys_of(every[0]), keys_of(every[1])))
        keys = [xr.DataArray(own, dims="cell") for own in found]
        rows, columns = (at.isel({at.dims[0]: key}) for at, key in zip(every, keys, strict=True))
    if rows.size == 0:
        raise OptionError(f"{CELLS}; got no cells at all")
    return rows, columns


def _stacked_mask(mask: xr.DataArray, every: tuple[xr.DataArray, xr.DataArray]) -> xr.DataArray:
    """A mask over dimensions that the run has stacked, as one over rows and columns, by label."""
    sides = [list(at.attrs["levels"]) or [at.dims[0]] for at in every]
    if set(mask.dims) != {*sides[0], *sides[1]}:
        return mask
    flat = mask.transpose(*sides[0], *sides[1]).values.reshape(
        [math.prod(mask.sizes[dim] for dim in dims) for dims in sides]
    )
    for axis, at in enumerate(every):
        levels = at.attrs["levels"]
        codes = [
            mask.indexes.get(name, pd.Index(own)).get_indexer(pd.Index(at[name].values))
            for name, own in levels.items()
        ]
        sizes = [mask.sizes[name] for name in levels]
        if any((own < 0).any() or own.max() >= n for own, n in zip(codes, sizes, strict=True)):
            raise OptionError(
                f"cells lack some of the run's labels of {', '.join(map(repr, levels))}; pass a "
                "mask over all of them"
            )
        if levels:
            flat = flat.take(np.ravel_multi_index(tuple(codes), tuple(sizes)), axis)
    kept = {at.dims[0]: mask[at.dims[0]] for at in every if at.dims[0] in mask.coords}
    return xr.DataArray(flat, kept, [at.dims[0] for at in every])


def _means(group: xr.Dataset, cells: tuple[xr.DataArray, xr.DataArray]) -> Lazy:
    """Mu of all draws at the cells, (chain, draw, cell), a block of draws and cells at a time."""
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


def _along_cells(asked: _Asked, values: Array, chunks: Any = None) -> Lazy:
    """Numbers of cells beside (chain, draw, cell), chunked alike."""
    return from_array(values[None, None], chunks=(1, 1, chunks or asked.mu.chunks[2]))


def _log_density(mu: Array, phi: Array, v: Array, weight: Array, law: Likelihood) -> Array:
    own: Any = phi if phi.size > 1 else phi.item()
    density = law.log_density(np.broadcast_to(v, mu.shape), mu, own) - np.log(law.spacing(own))
    return np.asarray(weight * density)


def _new_observations(
    mu: Array, phi: Array, rows: Array, columns: Array, chains: Array, law: Likelihood, seed: int
) -> Array:
    out, chain = np.empty(mu.shape), int(chains.item())
    for p, (row, column) in enumerate(zip(rows.flat, columns.flat, strict=True)):
        rng = generator(seed, chain, Stream.PREDICTION, int(row), int(column))
        own = phi[0, :, p if phi.shape[2] > 1 else 0]
        drawn: Any = own if own.size > 1 else own.item()
        out[0, :, p] = law.sample(rng, mu[0, :, p], drawn)
    return out


def _squares(run: Run, cells: tuple[xr.DataArray, xr.DataArray], given: Any) -> Array:
    """Squared uncertainties of the cells, (cell,)."""
    found = np.asarray(variances(run, cells, given, np.empty(cells[0].size)).compute())
    wrong = ~((found > 0) & np.isfinite(found))
    if wrong.any():
        raise DataError(
            f"{wrong.sum()} of {found.size} cells have no positive, finite uncertainty, the first "
            f"at row {cells[0].values[wrong][0]}, column {cells[1].values[wrong][0]}; pass them as "
            "uncertainty="
        )
    return found


def _weights(asked: _Asked, given: Any) -> Array:
    """Weights of the cells, (cell,); 1 in a run without."""
    size = asked.cells[0].size
    if asked.run.data.get("weighting") != "weights":
        if given is not None:
            raise OptionError(
                "weights are for runs that were given weights of cells; leave weights out"
            )
        return np.ones(size)
    kept = asked.run.observed("weights")
    if given is None and kept is None:
        raise OptionError(
            "a log-likelihood needs the weight of each of these cells, and the run did not keep "
            "those that it was given; pass them as weights="
        )
    found = _looked_up(kept, asked.cells) if given is None else np.asarray(given, np.float64)
    if found.shape not in ((), (size,)) or not (np.isfinite(found).all() and (found >= 0).all()):
        raise DataError(
            f"weights must be one finite number of at least 0, or one for each of the {size} "
            f"cells, got shape {found.shape}"
        )
    return np.broadcast_to(found, (size,))


def _own_values(asked: _Asked) -> NDArray[np.float64] | None:
    """What results keep of the data at the cells, NaN where that is missing."""
    kept = asked.run.observed("V")
    return None if kept is None else _looked_up(kept, asked.cells)


def _looked_up(kept: Any, cells: tuple[xr.DataArray, xr.DataArray]) -> NDArray[np.float64]:
    """Entries of a matrix of the results at cells."""
    rows, columns = (at.values for at in cells)
    found = kept.data
    picked = found[rows, columns] if isinstance(found, np.ndarray) else found.vindex[rows, columns]
    return np.asarray(picked, np.float64)


def _values(asked: _Asked, given: Any) -> tuple[NDArray[np.float64], bool]:
    """The values at the cells, none of them missing, and whether the run is known to have them."""
    rows, columns = asked.cells
    size, seen = rows.size, given is None
    if given is None:
        found, advice = _own_values(asked), "as V=, for example hold_out(...).values"
        if found is None:
            raise OptionError(
                "results keep small dense data alone, and these keep none; pass the matrix or the "
                "values at these cells as V="
            )
    elif np.ndim(given) == 1 and not isinstance(given, str):
        found, advice = np.asarray(given, np.float64), "without NaN"
        if found.size != size:
            raise DataError(f"V has {found.size} values for {size} cells; pass one for each")
    else:
        read = _of_matrix if asked.run.axes is None else _of_tensor
        (found, seen), advice = read(asked, given), "as V="
    missing = np.isnan(found)
    if missing.any():
        raise DataError(
            f"V has no value at {missing.sum()} of {size} cells, the first at row "
            f"{rows.values[missing][0]}, column {columns.values[missing][0]}; pass values of all "
            f"{advice}, or leave these cells out"
        )
    return np.asarray(found, np.float64), seen


def _of_matrix(asked: _Asked, V: Any) -> tuple[NDArray[np.float64], bool]:
    """Entries of any matrix that `sample` takes, and whether it has as many as the run's data."""
    about, every = asked.run.data, select(asked.run, None, None)
    apart = isinstance(V, xr.DataArray) and V.ndim > 2
    rows, columns = ([*at.attrs["levels"]] or at.dims[0] if apart else None for at in every)
    if getattr(V, "dims", None) == (every[1].dims[0], every[0].dims[0]):
        V = V.transpose()
    own = as_blocks(
        V,
        dtype="float64",
        unstored=about.get("unstored"),
        allow_empty=True,
        rows=rows,
        columns=columns,
    )
    try:
        keys = [(keys_of(at), labels) for at, labels in zip(every, own.labels.keys, strict=True)]
        labelled = [wanted is not None and known is not None for wanted, known in keys]
        shape = tuple(at.size for at in every)
        if any(a != b and not n for a, b, n in zip(own.shape, shape, labelled, strict=True)):
            raise DataError(
                f"V must have the shape of the run's data, {shape}, or one value for each of "
                f"the {asked.cells[0].size} cells, got shape {own.shape}"
            )
        same = own.total_observed == about.get("n_observed")
        places = [
            _places(*key)[at.values] if named else at.values
            for key, at, named in zip(keys, asked.cells, labelled, strict=True)
        ]
        there = (places[0] >= 0) & (places[1] >= 0)
        found = np.full(there.shape, np.nan)
        found[there] = own.values(*(at[there] for at in places))
        return found, same
    finally:
        if own is not V:
            own.close()


def _of_tensor(asked: _Asked, V: Any) -> tuple[NDArray[np.float64], bool]:
    """Entries of an array of the tensor's shape, and whether it has as many as the run's data."""
    about, axes = asked.run.data, asked.run.axes
    assert axes is not None
    if set(getattr(V, "dims", ())) == set(axes.names):
        V = V.transpose(*axes.names)
    stores_all = not (hasattr(V, "todense") or hasattr(V, "dask"))
    entries = entries_of(V, None if stores_all else about.get("unstored"))
    if tuple(entries.shape) != axes.sizes:
        raise DataError(
            f"V must have the shape of the run's data, {axes.sizes}, or one value for each of the "
            f"{asked.cells[0].size} cells, got shape {tuple(entries.shape)}"
        )
    for name, own in (entries.labels or {}).items():
        if name in axes.labels and not np.array_equal(own, axes.labels[name]):
            raise DataError(
                f"the labels of V along {name!r} are not those of the run; pass V in the run's "
                "order, or one value for each of the cells"
            )
    at = np.ravel_multi_index(tuple(entries.places), axes.sizes)
    wanted = asked.numbers[0] * math.prod(axes.sizes[1:]) + asked.numbers[1]
    zeros = entries.unstored == "zero"
    found = np.full(wanted.size, 0.0 if zeros else np.nan)
    order = np.argsort(at)
    place = np.minimum(np.searchsorted(at, wanted, sorter=order), max(at.size - 1, 0))
    stored = at[order[place]] == wanted if at.size else np.zeros(wanted.size, bool)
    found[stored] = entries.values[order[place[stored]]]
    observed = math.prod(axes.sizes) if zeros else at.size
    return found, observed == about.get("n_observed")


def _places(known: Any, labels: Any) -> NDArray[np.int64]:
    """Where the rows (or columns) of a run are in a matrix with these labels, -1 where nowhere."""
    found = match_labels(known, labels)
    if found.repeated != (None, None):
        raise DataError(
            f"the labels of V are not unique (they begin with {label_at(labels, 0)}), and in "
            "another order than those of the run; give V unique labels, or pass one value for each "
            "of the cells"
        )
    return found.at


def _tree(
    asked: _Asked, drawn: dict[str, Lazy], values: Array | None, data: str = OBSERVED
) -> xr.DataTree:
    """The groups, with the labels of the cells under the user's names."""
    labels: dict[Any, Any] = {"cell": ("cell", np.arange(asked.cells[0].size))}
    labels |= {name: ("cell", at) for name, at in zip(CELL_INDICES, asked.numbers, strict=True)}
    labels |= {
        str(name): ("cell", coord.values, coord.attrs)
        for at in asked.cells
        for name, coord in at.coords.items()
        if coord.shape == at.shape
    }
    along = {dim: asked.run.posterior[dim].values for dim in ("chain", "draw")}
    sampled = ("chain", "draw", "cell")
    groups = {"posterior": xr.Dataset({"mu": (sampled, asked.mu)}, labels | along)}
    for group, array in drawn.items():
        groups[group] = xr.Dataset({"V": (sampled, array)}, labels | along)
    if values is not None:
        groups[data] = xr.Dataset({"V": ("cell", values)}, labels)
    for dataset in groups.values():
        dataset.attrs = group_attrs(asked.run.attrs, dataset.dims)
    return tree_of(groups, group_attrs(asked.run.attrs, ()))
