"""`simulate`: tokens drawn from an allocation model at a cost that follows their number."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.layout import distinct
from daskfactor.checks import whole_number
from daskfactor.errors import OptionError
from daskfactor.models.allocation import AllocationModel
from daskfactor.random import Stream, generator, resolve_seed

LARGEST_TABLE = 2**20
"""Cells of a table that is drawn and given back."""
LARGEST_TENSOR = 2**63 - 1
LARGEST_TOTAL = 10**8

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Simulated:
    """Data of an allocation model, with what they were made from.

    Attributes
    ----------
    counts : sparse.COO of int64
        X, the tokens by their observed variables.
    allocation : sparse.COO of int64
        S, the tokens by all variables.
    dims
        The variables along the axes of ``allocation``: the observed ones as in ``counts``,
        then the hidden ones.
    tables
        θ by the first variable that draws from it, with its parents along the first axes
        and itself along the last; tables of more than 2^20 cells are left out.
    """

    counts: Any
    allocation: Any
    dims: tuple[str, ...]
    tables: Mapping[str, NDArray[np.float64]]


def simulate(
    model: AllocationModel,
    shape: Sequence[int] | None = None,
    *,
    total: int | None = None,
    random_seed: int | None = None,
) -> Simulated:
    r"""Draw counts, their allocation and the tables from an allocation model.

    .. math:: \lambda \sim \mathrm{Gamma}(a, b), \quad T \sim \mathrm{Poisson}(\lambda), \quad
        i_n^\tau \sim \mathrm{Pólya\ urn}(\alpha_n, i_{pa(n)}^\tau), \quad
        \theta_n \mid S \sim \mathrm{Dirichlet}(\alpha_n + C_n)

    Tokens are drawn from urns, without their tables, so that time and memory follow the
    number of tokens and not the shape; small tables are drawn afterwards, given the tokens,
    which is the same joint law.

    Parameters
    ----------
    model
        Its concentrations decide how uneven the tables are: a total of 1 for a table of
        many cells puts most tokens into a few of them.
    shape
        Sizes of the data; may be left out if the model's ``observed`` has them.
    total
        Number of tokens T. If left out it is drawn from the model, with the mean a / b: one
        token under the defaults.
    random_seed
        Any whole number; the same seed gives the same data.

    Returns
    -------
    Simulated
        ``counts``, ``allocation``, ``dims`` and ``tables``.

    Raises
    ------
    OptionError
        If the shape is not known, or the tensors would have 2^63 cells or more.
    ModelError
        If the model does not fit the shape.

    References
    ----------
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", forward process.
    """
    if getattr(model, "evidence_data", None) != "counts" or isinstance(model, type):
        raise OptionError(f"model must be an AllocationModel(...), got {model!r}")
    sizes = model.sizes(_checked_shape(model, shape))
    alphas = model.pseudo_counts([sizes[name] for name in model.dims])
    rng = generator(resolve_seed(random_seed), 0, Stream.SIMULATION)
    if total is None:
        mean = rng.gamma(model.total_shape) / model.rate
        total = int(rng.poisson(mean)) if mean < LARGEST_TOTAL else math.ceil(mean)
    if whole_number("total", total, 0) > LARGEST_TOTAL:
        raise OptionError(
            f"{total:.3g} tokens are more than can be drawn one by one, {LARGEST_TOTAL:,}; give a "
            "smaller total, or a larger rate to the model"
        )
    tokens = _draw_tokens(model, sizes, alphas, total, rng)
    dims = (*model.dims, *model.hidden)
    tables = {
        group[0]: _draw_table(model, group, tokens, sizes, alphas[group[0]], rng)
        for group in model.groups
        if math.prod(sizes[name] for name in model.network.family(group[0])) <= LARGEST_TABLE
    }
    return Simulated(_tensor(tokens, model.dims, sizes), _tensor(tokens, dims, sizes), dims, tables)


def _checked_shape(model: AllocationModel, shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is None:
        if not isinstance(model.observed, Mapping):
            raise OptionError(
                f"the sizes of the observed variables {', '.join(model.dims)} are not known; give "
                "shape, or a mapping of names to sizes as the model's observed"
            )
        shape = tuple(model.observed.values())
    if not isinstance(shape, Sequence | np.ndarray):
        raise OptionError(f"shape must be a list of sizes such as (20, 30), got {shape!r}")
    sides = tuple(whole_number("every size in shape", side, 1) for side in shape)
    if (cells := math.prod(sides) * model.n_hidden_states) > LARGEST_TENSOR:
        raise OptionError(
            f"the tensor of all variables would have 10^{math.log10(cells):.0f} cells, and only "
            "2**63 can be numbered; choose a smaller shape"
        )
    return sides


def _draw_tokens(
    model: AllocationModel,
    sizes: Mapping[str, int],
    alphas: Mapping[str, float],
    total: int,
    rng: np.random.Generator,
) -> dict[str, IntArray]:
    """The values of every variable, (T,) each."""
    shared = {name: group for group in model.groups for name in group}
    tokens: dict[str, IntArray] = {}
    for name in model.network.order:
        earlier = [other for other in shared[name] if other in tokens]
        families = [model.network.parents[other] for other in (*earlier, name)]
        parents = np.concatenate([_stacked(tokens, family, total) for family in families], axis=1)
        drawn = np.concatenate([tokens[other] for other in earlier] or [np.zeros(0, np.int64)])
        tokens[name] = _from_urns(distinct(parents)[1], drawn, sizes[name], alphas[name], rng)
    return tokens


def _from_urns(
    urn: IntArray, drawn: IntArray, size: int, alpha: float, rng: np.random.Generator
) -> IntArray:
    """Draws from Pólya urns, of which the first ``drawn`` are known.

    The n-th draw from an urn is new, uniform over the values, with probability
    A / (A + n), A = alpha size, and else the value of one of the n draws before it.
    """
    count, known = len(urn), len(drawn)
    order = np.argsort(urn, kind="stable")
    starts = np.flatnonzero(np.diff(urn[order], prepend=-1))
    lengths = np.diff(starts, append=count)
    begin = np.repeat(starts, lengths)
    before = np.arange(count) - begin
    total = alpha * size
    new = rng.random(count) * (total + before) < total
    source = np.where(new, np.arange(count), begin + rng.integers(0, np.maximum(before, 1)))
    values = rng.integers(0, size, count)
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    values[place[:known]], source[place[:known]] = drawn, place[:known]
    while not np.array_equal(further := source[source], source):
        source = further
    return values[source][place[known:]]


def _draw_table(
    model: AllocationModel,
    group: tuple[str, ...],
    tokens: Mapping[str, IntArray],
    sizes: Mapping[str, int],
    alpha: float,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """A table given the tokens: Dirichlet(alpha + counts) for every parent configuration."""
    shape = tuple(sizes[name] for name in model.network.family(group[0]))
    weights = np.full(shape, alpha)
    for name in group:
        np.add.at(weights, tuple(tokens[axis] for axis in model.network.family(name)), 1.0)
    # Gamma variables of a small shape underflow; their logarithms do not.
    logs = np.log(rng.standard_gamma(weights + 1.0)) + np.log1p(-rng.random(shape)) / weights
    table = np.exp(logs - logs.max(axis=-1, keepdims=True))
    table /= table.sum(axis=-1, keepdims=True)
    return np.asarray(table, np.float64)


def _stacked(tokens: Mapping[str, IntArray], names: Sequence[str], total: int) -> IntArray:
    return np.stack([tokens[name] for name in names] or [np.zeros(total, np.int64)])


def _tensor(tokens: Mapping[str, IntArray], names: Sequence[str], sizes: Mapping[str, int]) -> Any:
    """Tokens counted, as an array of the sparse package."""
    import sparse

    coords, where = distinct(np.stack([tokens[name] for name in names]))
    counts = np.bincount(where, minlength=coords.shape[1]).astype(np.int64)
    shape = tuple(sizes[name] for name in names)
    return sparse.COO(coords, counts, shape, has_duplicates=False, sorted=True)
