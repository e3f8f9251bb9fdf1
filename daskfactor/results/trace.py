"""Traces: the result of a run as one xarray tree, from memory or a run store, and its draws.

Draws of a sampler have no weights: each counts as much as any other. Those of a run of
particles have probability masses, and many of them are zero.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import dask
import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import ModelError, OptionError, StoreError, StoreFormatError
from daskfactor.models import model_from_dict
from daskfactor.results.files import SEAL, Counts, counts_of, read_marker
from daskfactor.results.places import View, view_of
from daskfactor.results.root import INDEX, LIBRARY, nodes_of, read_root
from daskfactor.results.schema import (
    GROUP_ATTRS,
    MOMENTS,
    MONITOR,
    SAMPLE_DIMS,
    STEIN,
    WARMUP,
    factor_dims,
    planned_draws,
)
from daskfactor.results.stacks import indexed, plain

if TYPE_CHECKING:
    from daskfactor.results.zarr_stores import CheckedStore

Array = NDArray[Any]
Trace = xr.DataTree | str | PathLike[str]
Weights = NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., Any])

_READ_BYTES: Final = 2**23
NOT_PER_CHAIN: Final = ("share", "discrepancy", "discrepancy_equal")
"""Variables without a dimension of chains or of draws, in groups of a tree that have these."""
NOT_PER_DRAW: Final = ("share_by_chain",)


def open_run(path: str | PathLike[str], snapshot: str | None = None) -> xr.DataTree:
    """Open the run at ``path`` lazily: the draws that its last checkpoint vouches for.

    Works while the run is still going on and after it was killed. With chains at
    different lengths the tree holds the largest full rectangle of draws. Of particles
    there are those that are finished; ``lp``, ``weight`` and the group ``stein`` are left
    out until all of them are.

    Parameters
    ----------
    path
        Local path of a run store, a URL that one was written to (``s3://``, ``gs://``, ``az://``,
        ``memory://``), or one that fsspec knows of a local run that was copied there. Credentials
        are taken from the environment.
    snapshot
        An earlier checkpoint of a run that was written to a URL, by its id: of the commits that
        ``icechunk.Repository.ancestry(branch="main")`` lists, or one that the message lists about
        an id that is unknown. Left out, the newest. Older ones expire: the newest six stay, and
        those of the last ten minutes while the run goes on.

    Returns
    -------
    DataTree
        Backed by dask: nothing but coordinates has been read.

    Raises
    ------
    StoreError
        If there is nothing at ``path``.
    StoreFormatError
        If what is there is not a run store, is damaged or of a newer version.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> from tempfile import mkdtemp
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> store = mkdtemp() + "/run.zarr"
    >>> run = {"tune": 10, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), draws=10, store=store, **run)
    >>> dfac.open_run(store)["posterior"].sizes["draw"]
    10
    """
    if not isinstance(path, str | PathLike):
        raise OptionError(
            f"open_run takes the path of a run store, got a {type(path).__name__}; a result in "
            "memory is a trace already"
        )
    return committed_tree(view_of(path, snapshot), None)


def committed_tree(view: View, counts: Counts | None) -> xr.DataTree:
    """Open a run's tree, cut to ``counts`` or to what its newest checkpoint vouches for."""
    document = read_root(view)
    if counts is None:
        chains = nodes_of(document)["sample_stats/lp"]["shape"][0]
        counts = counts_of(_marker(view, document), chains)
    store: Any = checked_store(view, document)
    try:
        tree = xr.open_datatree(store, engine="zarr", chunks={}, consolidated=True)
    except StoreError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise StoreFormatError(
            f"{view.name} cannot be read as a run store of {LIBRARY} ({error}); "
            "check the path, or restore it from a copy"
        ) from error
    tree = indexed(trimmed(tree, counts))
    store.partial |= {
        name
        for name in (MOMENTS, MONITOR)
        if name in tree.children and bool((tree[name]["count"] == 0).any())
    }
    return tree


def _marker(view: View, document: dict[str, Any]) -> dict[str, Any]:
    """Read what a run store's newest checkpoint vouches for."""
    try:
        return read_marker(view)
    except StoreFormatError as error:
        if SEAL in document[INDEX]:
            raise
        raise StoreFormatError(
            f"{view.name} was written by xarray, as trace.to_zarr does, and not by {LIBRARY}: open "
            f"it with xarray.open_datatree({view.name!r}, engine='zarr'), and pass the result "
            "wherever a trace is taken"
        ) from error


def checked_store(view: View, document: dict[str, Any]) -> "CheckedStore":
    """Open the chunks of a run store to read them, each as it was written."""
    from daskfactor.results.zarr_stores import CheckedStore

    checked = [
        name
        for name, node in nodes_of(document).items()
        if any(codec["name"] == "crc32c" for codec in node.get("codecs", ()))
    ]
    run = document["attributes"].get("trace_id")
    return CheckedStore(view.chunks(), view.name, checked, run)


def trimmed(tree: xr.DataTree, counts: Counts) -> xr.DataTree:
    """Cut a tree to the draws that all of the chains have that have most, and what belongs to them.

    Parameters
    ----------
    tree
        A run store at its full planned size.
    counts
        Draws that its checkpoint vouches for.
    """
    draws, chains = _rectangle(counts.draws)
    # Particles have no weights yet before their group is described, which comes last.
    stein = tree.children.get(STEIN)
    weighed = stein is not None and set(stein.attrs) - set(GROUP_ATTRS)
    unweighted = stein is not None and not (weighed and draws == stein.sizes["draw"])
    warmup = min((counts.warmup_draws[chain] for chain in chains), default=0)
    groups: dict[str, Any] = {}
    for name, node in tree.children.items():
        cut: dict[str, Any] = {"draw": slice(planned_draws(name, draws))}
        if name == WARMUP:  # elsewhere it may be the user's own dimension
            cut = {"warmup_draw": slice(warmup)}
        if len(chains) < len(counts.draws):
            cut["chain"] = chains
        dataset = node.to_dataset()
        if unweighted and name == STEIN:
            continue
        if unweighted and name == "sample_stats":
            dataset = dataset.drop_vars(["lp", "weight"], errors="ignore")
        dataset = dataset.isel(cut, missing_dims="ignore")
        # Moments are rewritten in place; a count of 0 says that this was cut short.
        if "count" in dataset:
            dataset["count"] = dataset["count"].compute(scheduler="synchronous")
            if not bool((dataset["count"] > 0).any()):
                continue
        groups[name] = dataset
    cut_down = xr.DataTree.from_dict(groups)
    cut_down.attrs = dict(tree.attrs)
    return cut_down


def _rectangle(draws: tuple[int, ...]) -> tuple[int, list[int]]:
    """Draws and chains of the largest block of draws that every chain in it has."""
    ordered = sorted(draws, reverse=True)
    height = max(range(len(ordered)), key=lambda at: ((at + 1) * ordered[at], at))
    least = ordered[height]
    return least, [chain for chain, count in enumerate(draws) if count >= least]


def reads_here(function: F) -> F:
    """Let a function read a trace that is a path by threads of this process.

    A Dask client that is about may have no workers, or none that see the path.
    """

    @wraps(function)
    def reading(trace: Trace, *args: Any, **options: Any) -> Any:
        if not isinstance(trace, str | PathLike):
            return function(trace, *args, **options)
        with dask.config.set(scheduler="threads"):
            return function(trace, *args, **options)

    return cast("F", reading)


def as_tree(trace: Any) -> xr.DataTree:
    """The tree of a trace given as such or as the path of a run store, stacks without index."""
    group = _group_of(trace)
    if group is not None:
        raise OptionError(
            f"a trace is the whole result of a run, and this is its group {group!r} alone; pass "
            f"trace, not trace[{group!r}]"
        )
    if isinstance(trace, xr.DataTree):
        return plain(_with_sample_dims(trace))
    if isinstance(trace, str | PathLike):
        return plain(open_run(trace))
    if isinstance(trace, xr.Dataset) and {"W", "H"} <= set(trace.data_vars):
        raise OptionError(
            "a trace has draws, and this is the point estimate of daskfactor.optimize, which has "
            f"none{_prediction_of(trace)}; for intervals and alignment pass the result of "
            "daskfactor.sample"
        )
    raise OptionError(
        "a trace is the result of daskfactor.sample or the path of its store, got "
        f"{'None' if trace is None else type(trace).__name__}"
    )


def _group_of(given: Any) -> str | None:
    """Name the group of a trace that was passed alone; None for anything else."""
    if not isinstance(given, xr.DataTree | xr.Dataset) or len(getattr(given, "children", ())):
        return None
    if isinstance(given, xr.DataTree) and given.parent is not None:
        return str(given.name)
    return "posterior" if {"W", "H"} <= set(given.data_vars) and "draw" in given.dims else None


def _with_sample_dims(tree: xr.DataTree) -> xr.DataTree:
    """Return a trace with the dimensions that taking one chain, or one draw, has dropped.

    Raises
    ------
    OptionError
        If the posterior lacks one of them and does not say which chain or draw was taken.
    """
    groups = {name: node.to_dataset() for name, node in tree.children.items()}
    whole = {name: _with_dims(group) for name, group in groups.items()}
    lost = {"chain", "draw"} - set(whole["posterior"].dims) if "posterior" in whole else set()
    if lost:
        raise OptionError(
            f"the posterior of a trace has the dimensions chain and draw, and this one has no "
            f"{' and no '.join(sorted(lost))}; keep it, as trace.sel(chain=[0]) does"
        )
    if all(whole[name] is group for name, group in groups.items()):
        return tree
    found = xr.DataTree.from_dict(whole)
    found.attrs = dict(tree.attrs)
    return found


def _with_dims(group: xr.Dataset) -> xr.Dataset:
    """Return a group with dimensions of length 1 for the chain or draw that was taken of it."""
    taken = [dim for dim in SAMPLE_DIMS if dim in group.coords and not group[dim].dims]
    if not taken:
        return group
    alone = {name: group[name].drop_vars(taken) for name in NOT_PER_CHAIN if name in group}
    per_chain = {name: group[name].drop_vars(taken) for name in NOT_PER_DRAW if name in group}
    dims = [dim for dim in taken if dim == "chain"]
    alone |= {name: own.expand_dims(dims) for name, own in per_chain.items()}
    group = group.drop_vars(list(alone)).expand_dims(taken).assign(alone)
    return group.transpose(*SAMPLE_DIMS, ..., missing_dims="ignore")


def _prediction_of(point: xr.Dataset) -> str:
    """Say how the data are predicted from a point estimate."""
    kind = _several(point)
    if kind is None:
        return ": its prediction is point['W'] @ point['H']"
    return f" and is of {kind}, whose factors W and H hold one after another"


@contextmanager
def describes_run() -> Iterator[None]:
    """Turn errors of reading attributes that a run has into one that says so."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(
            "this trace does not say its model and its data (attributes 'model', 'dispersion', "
            "'data'); pass the result of daskfactor.sample or the path of its store"
        ) from error


def stored_model(result: xr.DataTree | xr.Dataset) -> Any:
    """Return what a run says of its model, without frozen values; None: factors from elsewhere."""
    stored = result.attrs.get("model", "{}")
    try:
        return model_from_dict(json.loads(stored) if isinstance(stored, str) else stored)
    except (ModelError, TypeError, ValueError):
        return None


def _several(result: xr.DataTree | xr.Dataset) -> str | None:
    """Name what a run is of; None: of one matrix."""
    model = stored_model(result)
    if model is None or not (model.tensor or model.joins):
        return None
    return "a tensor" if model.tensor else "several matrices"


def require_matrix(result: xr.DataTree | xr.Dataset, verb: str) -> None:
    """Refuse what is not of one matrix, where a verb takes W and H for its two factors.

    Raises
    ------
    OptionError
        If the run, or the point estimate, is of a tensor or of several matrices.
    """
    kind = _several(result)
    if kind is None:
        return
    placed = json.loads(result.attrs.get("data", "{}")).get("placed")
    if placed is None:
        raise OptionError(
            f"{verb} takes the result of one matrix, and this is the point estimate of {kind}; "
            "pass view(run, name) of a run of daskfactor.sample"
        )
    if "offsets" in placed:
        names, which = list(placed["factors"]), "axis"
        way = "which has all other axes in row-major order as columns, "
    else:
        names, which, way = [own["name"] for own in placed["relations"]], "name", ""
    raise OptionError(
        f"{verb} takes a run of one matrix, and this is a run of {kind}: pass view(run, {which}), "
        f"{way}with one of {', '.join(names)}"
    )


def has_draws(tree: xr.DataTree) -> bool:
    """Whether a run kept draws of the factors, and not of hyperparameters alone."""
    return "posterior" in tree.children and "W" in tree["posterior"].data_vars


def require_draws(trace: Trace, purpose: str, other: str = "") -> xr.DataTree:
    """The tree of a trace that holds draws.

    Raises
    ------
    OptionError
        If the run kept no draws, or has none yet.
    """
    tree = as_tree(trace)
    if not has_draws(tree):
        raise OptionError(
            f"this run kept moments only, but {purpose} needs its draws; run again with "
            f'keep="draws"{other}'
        )
    if tree["posterior"].sizes["draw"] == 0:
        raise OptionError(f"this run has no draws yet, but {purpose} needs some; resume it first")
    return tree


def as_draws(result: Trace | xr.Dataset, purpose: str) -> xr.DataTree:
    """Return a trace that holds draws, or a point estimate as a trace of one draw.

    Raises
    ------
    OptionError
        If a trace has no draws; if a Dataset lacks factors, or has draws of them.
    """
    if not isinstance(result, xr.Dataset):
        return require_draws(result, purpose)
    expected = "a Dataset must be the point estimate of daskfactor.optimize"
    if not {"W", "H"} <= set(result.data_vars):
        got = ", ".join(map(str, result.data_vars)) or "nothing"
        raise OptionError(f"{expected}, with W and H, got {got}")
    if "draw" in result.dims:
        raise OptionError(f"{expected}, and this one has draws; pass the whole trace")
    group = result[["W", "H"]].drop_attrs(deep=False)
    tree = xr.DataTree.from_dict({"posterior": group.expand_dims(chain=[0], draw=[0])})
    tree.attrs = dict(result.attrs)
    return tree


def is_particles(tree: xr.DataTree) -> bool:
    """Whether the draws of a trace are particles, weighted already or not yet."""
    if "sample_stats" not in tree.children:
        return False
    return bool({"weight", "n_iter"} & set(tree["sample_stats"].data_vars))


def kept_beside(tree: xr.DataTree, name: str) -> xr.DataArray | None:
    """Return the data, ``"V"``, or the ``"weights"`` of their cells, if the results keep them."""
    if "observed_data" not in tree.children or name not in tree["observed_data"].data_vars:
        return None
    return tree["observed_data"].to_dataset()[name]


def draw_weights(tree: xr.DataTree) -> Weights | None:
    r"""Probability masses of the draws, or None where all draws count alike.

    .. math:: w_{cd} \ge 0, \qquad \sum_{cd} w_{cd} = 1

    Parameters
    ----------
    tree
        A trace with draws; of a part of a run, masses are taken anew to add up to 1.

    Returns
    -------
    ndarray of float64 or None
        (chain, draw), in the order of ``posterior``.

    Raises
    ------
    StoreFormatError
        If they are no masses, or are not those of the draws.
    OptionError
        If all draws that are there have mass 0.

    References
    ----------
    Masood and Doshi-Velez, section 4.
    """
    if "sample_stats" not in tree.children or "weight" not in tree["sample_stats"].data_vars:
        return None
    found = tree["sample_stats"]["weight"].transpose("chain", "draw")
    if "posterior" in tree.children:
        draws = tree["posterior"].to_dataset()
        labels = {dim: draws[dim] for dim in ("chain", "draw") if dim in draws.coords}
        try:
            found = found.sel(labels).transpose("chain", "draw")
        except KeyError as error:
            raise StoreFormatError(
                "draws and weights of this trace have different labels; relabel posterior and "
                "sample_stats alike"
            ) from error
    masses = np.asarray(found.values, dtype=np.float64)
    if masses.size == 0:
        return None
    if not (np.isfinite(masses).all() and masses.min() >= 0):
        raise StoreFormatError(
            "the weights of this trace must be finite and at least 0, got a smallest of "
            f"{masses.min():g}; restore sample_stats['weight'] as it was"
        )
    if not masses.sum() > 0:
        raise OptionError(
            "the draws of this trace have weights that are all 0, so that nothing is known of "
            "them together; take some that have weight"
        )
    return np.asarray(masses / masses.sum())


def draw_masses(trace: Trace) -> xr.DataArray:
    """Probability mass of every draw, adding up to 1; equal for a run whose draws have none.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store. Of a selection of its draws the masses
        are made to add up to 1 again.

    Returns
    -------
    DataArray
        (chain, draw).

    Raises
    ------
    OptionError
        If there are no draws, or their masses are all 0.
    StoreFormatError
        If they are no masses, or not those of the draws.
    """
    tree = require_draws(trace, "a mass of every draw")
    group = tree["posterior"].to_dataset()
    found = draw_weights(tree)
    if found is None:
        shape = group.sizes["chain"], group.sizes["draw"]
        found = np.full(shape, 1.0 / prod(shape))
    labels = {dim: group[dim].values for dim in ("chain", "draw")}
    return xr.DataArray(found, labels, ("chain", "draw"), name="weight")


def relative(group: xr.Dataset, weights: Weights | None) -> Weights:
    """Masses of draws (chain, draw) in units of the largest: exactly 1 each where all are equal."""
    if weights is None:
        return np.ones((group.sizes["chain"], group.sizes["draw"]))
    return np.asarray(weights / weights.max())


class Running:
    """Mean, and sum of squared deviations, of numbers that come one after another (West 1979).

    Attributes
    ----------
    total
        Mass so far.
    mean, square
        Of the shape of the numbers, double precision.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.total = 0.0
        self.mean, self.square = np.zeros((2, *shape))

    def add(self, values: Array, mass: float = 1.0) -> None:
        """Take one more; one without mass is as good as none."""
        if mass == 0.0:
            return
        self.total += mass
        delta = values - self.mean
        self.mean += delta / (self.total / mass)
        if mass != 1.0:
            delta *= mass
        self.square += delta * (values - self.mean)


def effective_number(weights: ArrayLike) -> float:
    r"""How many draws of equal weight spread as much mass: :math:`1 / \sum_m w_m^2`.

    Parameters
    ----------
    weights
        Probability masses, any shape, adding up to 1.

    Returns
    -------
    float
        Between 1 and the number of draws.

    Notes
    -----
    Kish 1965, section 11.7.
    """
    return float(1.0 / np.sum(np.square(np.asarray(weights, dtype=np.float64))))


def over_chains(tree: xr.DataTree, values: xr.Dataset) -> xr.Dataset:
    """Mean over chains, by the mass of each where draws have weights."""
    weights = draw_weights(tree)
    if weights is None:
        return values.mean("chain")
    masses = xr.DataArray(weights.sum(axis=1), dims="chain")
    kept = np.flatnonzero(masses > 0)  # of a chain without mass there are no means
    return values.isel(chain=kept).weighted(masses[kept]).mean("chain")


def check_weights(weights: NDArray[np.floating[Any]]) -> None:
    """Refuse weights that are no probability masses.

    Raises
    ------
    StoreFormatError
        If one is negative or not finite, or if they do not add up to 1 within 1e-6.
    """
    whole = weights.size > 0 and bool(np.isfinite(weights).all())
    if not (whole and weights.min() >= 0 and abs(weights.sum() - 1.0) <= 1e-6):
        least = weights.min() if weights.size else np.nan
        raise StoreFormatError(
            f"weights of particles must be at least 0 and add up to 1, got a smallest of {least:g} "
            f"and a sum of {weights.sum():g}; write them anew, divided by their sum"
        )


@reads_here
def expectation(
    trace: Trace,
    function: Callable[[Array, Array], ArrayLike],
    chain: int | None = None,
) -> NDArray[np.float64]:
    r"""Posterior expectation of any function of the factors.

    .. math:: \hat f = \frac1T \sum_t f(W^{(t)}, H^{(t)}), \qquad
        \hat f = \sum_m w_m f(W_m, H_m), \qquad
        \hat f = 2\,\hat f_{\rm fine} - \hat f_{\rm coarse}

    the second for particles, where those of weight 0 are not read; the third where the
    trace has ``posterior_coarse``: the Richardson-Romberg estimate, free of the leading
    bias of the step size.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store; read a few draws at a time.
    function
        Called with W (I, K) and H (K, J); returns numbers of one shape.
    chain
        One chain (its label), or all of them.

    Returns
    -------
    array of float64
        Of the shape that the function returns.

    Raises
    ------
    OptionError
        If there are no draws, no such chain, or none of its draws has any weight.

    References
    ----------
    Şimşekli et al. 2017, equation 11; Masood and Doshi-Velez, section 4.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> total = dfac.expectation(trace, lambda W, H: (W @ H).sum())  # of the mean's cells
    >>> bool(0.8 < total / V.sum() < 1.2)
    True
    """
    tree = require_draws(trace, "an expectation")
    require_matrix(tree, "expectation")
    fine = _mean(tree["posterior"].to_dataset(), function, chain, draw_weights(tree))
    if "posterior_coarse" not in tree.children or tree["posterior_coarse"].sizes["draw"] == 0:
        return fine
    return 2.0 * fine - _mean(tree["posterior_coarse"].to_dataset(), function, chain)


def _mean(
    group: xr.Dataset,
    function: Callable[[Array, Array], ArrayLike],
    chain: int | None,
    weights: Weights | None = None,
) -> NDArray[np.float64]:
    mean, total = np.zeros(()), 0.0
    for (W, H), mass in each_weighted_draw(group, chain, weights):
        total += mass
        mean = mean + (np.asarray(function(W, H), dtype=np.float64) - mean) / (total / mass)
    if total == 0:
        raise OptionError(
            f"no draw of chain {chain!r} has any weight, so that it has no expectation; leave "
            "chain= out"
        )
    return mean


def each_weighted_draw(
    group: xr.Dataset, chain: Any, weights: Weights | None
) -> Iterator[tuple[tuple[Array, Array], float]]:
    """Draws that have mass, in units of the largest; those without are not read.

    Parameters
    ----------
    group
        With the factors.
    chain
        One chain (its label), or None for all of them.
    weights
        (chain, draw), or None where all draws count alike.
    """
    for (W, H), masses in weighted_batches(group, chain, weights):
        yield from zip(zip(W, H, strict=True), masses.tolist(), strict=True)


def weighted_batches(
    group: xr.Dataset, chain: Any, weights: Weights | None
) -> Iterator[tuple[tuple[Array, Array], NDArray[np.float64]]]:
    """Yield draws that have mass, a few at a time: factors (d, ...) and masses (d,)."""
    masses = relative(group, weights)
    labels = group["chain"].values.tolist()
    for at in _chain_positions(group, chain):
        kept = np.flatnonzero(masses[at] > 0)
        part = group if kept.size == masses.shape[1] else group.isel(draw=kept)
        done = 0
        for W, H in batches_of_draws(part, labels[at]):
            yield (W, H), masses[at][kept[done : done + len(W)]]
            done += len(W)


def factors_of(group: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """W (chain, draw, row, component) and H (chain, draw, component, column) of a group.

    Raises
    ------
    StoreFormatError
        If it holds none.
    """
    row, column = factor_dims(group)
    W = group["W"].transpose("chain", "draw", row, "component")
    return W, group["H"].transpose("chain", "draw", "component", column)


def each_draw(group: xr.Dataset, chain: int | None) -> Iterator[tuple[Array, Array]]:
    """Every draw of the factors, read a block of draws at a time."""
    for W, H in batches_of_draws(group, chain):
        yield from zip(W, H, strict=True)


def batches_of_draws(group: xr.Dataset, chain: int | None) -> Iterator[tuple[Array, Array]]:
    """Yield all draws of the factors, a few at a time: (d, I, K) and (d, K, J)."""
    W, H = factors_of(group)
    size = (prod(W.shape[2:]) + prod(H.shape[2:])) * W.dtype.itemsize
    step = max(1, _READ_BYTES // size)
    for at in _chain_positions(group, chain):
        for start in range(0, W.sizes["draw"], step):
            part = (at, slice(start, start + step))
            yield W[part].values, H[part].values


def _chain_positions(group: xr.Dataset, chain: int | None) -> list[int]:
    labels = group["chain"].values.tolist()
    if chain is None:
        return list(range(len(labels)))
    if chain not in labels:
        raise OptionError(f"there is no chain {chain!r}; this trace has the chains {labels}")
    return [labels.index(chain)]


FLOOR: Final = 0.1
"""Least share of the fine chain's value that an extrapolated positive number keeps."""


def extrapolated_moments(
    fine: tuple[Any, Any], coarse: tuple[Any, Any], nonnegative: bool
) -> tuple[Any, Any]:
    """Mean and variance free of the bias of first order in ε: 2 fine - coarse, each.

    A variance is no expectation of a function, but its bias has an expansion in
    ε all the same. Noise can make the combination negative where the truth is
    not; both are kept at a tenth of the fine chain's value or more.

    Parameters
    ----------
    fine, coarse
        Mean and variance from each chain; NumPy or dask arrays.
    nonnegative
        Whether the mean cannot be negative.

    Notes
    -----
    Şimşekli et al. 2017, equation 11.
    """
    mean, variance = 2.0 * fine[0] - coarse[0], 2.0 * fine[1] - coarse[1]
    if nonnegative:
        mean = np.maximum(mean, FLOOR * fine[0])
    return mean, np.maximum(variance, FLOOR * fine[1])
