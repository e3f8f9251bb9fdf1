"""Factors that chains, descents and particles start from: of singular vectors, or random.

Leading singular vectors are those of data on a grid, missing entries filled in from a fit. The
solver is scipy's; what it is given are products of the data with a few vectors, summed block by
block on the engine: X = P(V - WH) + WH, P the observed entries, is never formed.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataError, OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.state import Array, ChainState
from daskfactor.inference.bands import pieces_of
from daskfactor.inference.dispersion import typical_value
from daskfactor.inference.multiplicative import Descent, run_updates, start_state
from daskfactor.kernels.views import BlockView, SparseBlock, Workspace
from daskfactor.models.gamma_factors import GammaFactors
from daskfactor.random import Stream, generator

Pair = tuple[Array, Array]
Side = Literal["rows", "columns"]

TOLERANCE: Final = 1e-6
"""Relative, of the squared singular values; blocks may be in single precision."""
SMALL: Final = 2
"""Matrices with fewer rows or columns than so many times the rank are taken whole."""
FILL_ITERATIONS: Final = 100
"""Iterations of the masked fit that fills in missing entries before a decomposition."""


@contextmanager
def silent() -> Iterator[None]:
    """Silence scikit-learn's warning that a descent was stopped: ``n_iter`` says so.

    Around calls of all lanes, not inside one: filters belong to the whole process.
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


class Singular(NamedTuple):
    """U (I, R), singular values (R,) in falling order, Vᵀ (R, J); X ≈ U diag(values) Vᵀ."""

    left: Array
    values: Array
    right: Array


def truncated_svd(
    executor: Executor,
    data: BlockedData,
    rank: int,
    seed: int = 0,
    fill: ChainState | None = None,
) -> Singular:
    r"""Return leading singular triplets, signs fixed by :func:`consistent_signs`.

    .. math:: X \approx U_R \Sigma_R V_R^\top

    Parameters
    ----------
    rank
        R, from 1 to min(I, J).
    fill
        Factors whose product stands in for missing entries; needed if there are any.

    Returns
    -------
    Singular
        In the order of the grid's rows and columns.

    Raises
    ------
    DataError
        If all values are zero.

    Notes
    -----
    Implicitly restarted Lanczos (ARPACK, by `scipy.sparse.linalg.svds`), which looks at the
    data some tens of times.
    """
    short = min(data.shape)
    if data.maximum == data.minimum == 0:
        raise DataError("all entries are zero, so there are no singular vectors; check the data")

    pieces: list[list[Array]] = []
    if fill is not None:
        filled = fill.gather("rows"), fill.gather("columns")
        pieces = [pieces_of(data.grid, factor, values) for factor, values in enumerate(filled)]

    def times(side: Side, vectors: Array) -> Array:
        """Return X x for ``"rows"``, Xᵀ y for ``"columns"``: (I, n) of (J, n), or the other way."""
        grid = data.grid
        inner = grid.cols if side == "rows" else grid.rows
        vectors = np.ascontiguousarray(vectors, data.dtype)
        parts = np.split(vectors, inner.offsets[1:-1])

        def one(band: int, work: Workspace) -> Array:
            del work
            total: Any = 0.0
            for other, x in enumerate(parts):
                row, col = (band, other) if side == "rows" else (other, band)
                factors = (pieces[0][row], pieces[1][col]) if pieces else None
                total = total + _product(data.view(row, col), side, x, factors)
            return np.asarray(total, dtype=np.float64)

        return np.concatenate(executor.map(one, range(grid.blocks), "singular-vectors"))

    if short < SMALL * rank + 2:
        result = dense_svd(times("rows", np.eye(data.shape[1])), rank)
    else:
        operator = sparse.linalg.LinearOperator(
            data.shape,
            matvec=lambda x: times("rows", x.reshape(-1, 1)).ravel(),
            rmatvec=lambda y: times("columns", y.reshape(-1, 1)).ravel(),
            dtype=np.float64,
        )
        first = generator(seed, 0, Stream.START, 2).standard_normal(short)
        triplets = sparse.linalg.svds(operator, k=rank, tol=TOLERANCE, v0=first, solver="arpack")
        left, values, right = (np.asarray(one, np.float64) for one in triplets)
        order = np.argsort(-values)
        result = Singular(left[:, order], values[order], right[order])
    return consistent_signs(result)


def dense_svd(matrix: Array, rank: int) -> Singular:
    """Return leading triplets of an array in memory, signs as LAPACK has them."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return Singular(left[:, :rank], values[:rank], right[:rank])


def consistent_signs(singular: Singular) -> Singular:
    r"""Turn each pair of singular vectors to where most of the data point.

    .. math:: s_u = \sum_j \mathrm{sign}(v_{rj}) v_{rj}^2, \quad
        s_v = \sum_i \mathrm{sign}(u_{ir}) u_{ir}^2

    and the one of larger size decides for both: inner products of the data's columns with
    u_r, once the other triplets are taken off, are σ_r v_r, so that no look at the data is
    needed.

    References
    ----------
    Bro, Acar and Kolda 2008, algorithm 1; Masood and Doshi-Velez, section 8.3.
    """
    by_right = (np.sign(singular.right) * singular.right**2).sum(axis=1)
    by_left = (np.sign(singular.left) * singular.left**2).sum(axis=0)
    sign = np.sign(np.where(np.abs(by_left) >= np.abs(by_right), by_left, by_right))
    sign[sign == 0] = 1.0
    return Singular(singular.left * sign, singular.values, singular.right * sign[:, None])


def _product(
    view: BlockView | SparseBlock, side: Side, x: NDArray[Any], fill: tuple[Any, Any] | None
) -> Array:
    """Return a block's completed values, or their transpose, times a few vectors."""
    if isinstance(view, BlockView):
        values: Any = view.block
        if fill is not None:
            values = np.where(np.isnan(values), fill[0] @ fill[1].T, values)
        product = (values if side == "rows" else values.T) @ x
        return np.asarray(product, dtype=np.float64)
    stored, low_rank = view.values, None
    if fill is not None:
        W, H = fill
        rows = np.repeat(np.arange(view.m), np.diff(view.indptr))
        if view.zeros:  # only what is stored as NaN is missing
            at = np.flatnonzero(np.isnan(stored))
            stored = stored.copy()
            stored[at] = np.einsum("ek,ek->e", W[rows[at]], H[view.indices[at]])
        else:
            stored = stored - np.einsum("ek,ek->e", W[rows], H[view.indices])
            low_rank = W @ (H.T @ x) if side == "rows" else H @ (W.T @ x)
    index = view.indices.astype(np.int32), view.indptr
    block = sparse.csr_array((stored, *index), shape=(view.m, view.n))
    product = (block if side == "rows" else block.T) @ x
    return np.asarray(product if low_rank is None else product + low_rank, dtype=np.float64)


SIZE: Final = 12
"""Rows and columns of a synthetic matrix, at least; more where the rank needs them."""
RESTARTS: Final = 5
"""Factorizations of every synthetic matrix."""
NOISE: Final = 0.05
"""Standard deviation of the noise, of the mean of the noiseless matrix."""
STREAM: Final = 7
"""Part of the address of the random numbers, so that no start of a fit shares them."""


def halves(singular: Singular, rank: int) -> tuple[Array, Array]:
    """Return U √Σ (I, R) and √Σ Vᵀ (R, J) of the leading triplets."""
    root = np.sqrt(singular.values[:rank])
    return singular.left[:, :rank] * root, singular.right[:rank] * root[:, None]


@lru_cache(maxsize=16)
def learn_transfer(rank: int, count: int, seed: int = 0) -> Pair:
    r"""Return transfer matrices from non-negative factorizations of small synthetic matrices.

    .. math:: Q_w = \arg\min_Q \|W - U\sqrt\Sigma\, Q\|_F, \quad
        Q_h = \arg\min_Q \|H - Q \sqrt\Sigma V^\top\|_F

    Synthetic matrices are products of uniform random factors of the rank, with Gaussian
    noise cut off at zero; each is factorized from five random starts. What was learnt is
    kept for the life of the process: the matrices of a seed serve all data.

    Parameters
    ----------
    rank
        Transfer rank R.
    count
        Number of pairs M.
    seed
        Of the synthetic matrices and the starts.

    Returns
    -------
    pair of ndarray
        All Q_w and all Q_h, (M, R, R) each, which nobody may write to.

    References
    ----------
    Masood and Doshi-Velez, algorithm 2 and section 6.1 (R = 3, twenty 12 x 12 matrices).
    """
    size = max(SIZE, 4 * rank)
    pairs: list[tuple[Any, Any]] = []
    problem = 0
    while len(pairs) < count:
        rng = generator(seed, problem, Stream.START, STREAM, rank)
        X = rng.random((size, rank)) @ rng.random((rank, size))
        X = np.maximum(X + NOISE * X.mean() * rng.standard_normal(X.shape), 0.0)
        basis, weights = halves(consistent_signs(dense_svd(X, rank)), rank)
        for _ in range(min(RESTARTS, count - len(pairs))):
            W, H = _factorize(X, rank, int(rng.integers(2**31)))
            turn = np.linalg.lstsq(basis, W, rcond=None)[0]
            pairs.append((turn, np.linalg.lstsq(weights.T, H.T, rcond=None)[0].T))
        problem += 1
    by_w, by_h = (np.stack(one) for one in zip(*pairs, strict=True))
    for one in (by_w, by_h):
        one.setflags(write=False)
    return by_w, by_h


def _factorize(X: Array, rank: int, seed: int) -> tuple[Array, Array]:
    """Factorize from a random start, W and H of equal length component by component."""
    from sklearn.decomposition import non_negative_factorization

    with silent():  # what it has reached will do
        W, H, _ = non_negative_factorization(
            X, n_components=rank, init="random", solver="cd", max_iter=200, random_state=seed
        )
    size: Any = np.linalg.norm(W, axis=0), np.linalg.norm(H, axis=1)
    usable = (size[0] > 0) & (size[1] > 0)
    ratio = np.where(usable, size[1], 1.0) / np.where(usable, size[0], 1.0)
    return W * np.sqrt(ratio), H / np.sqrt(ratio)[:, None]


PAD: Final = 1e-2
"""Entries of components beyond the transfer rank, of the mean of those that have one."""
LIFT: Final = 1e-2
"""Size of the entries that NNDSVDar puts in place of zeros, of the mean of the factor."""
ZERO: Final = 1e-6
"""Entries that count as zeros there, of the mean of the factor."""
POOL: Final = 32
"""Transfer matrices that further components are drawn from."""
PILOTS: Final = 2**20
"""Number of the first pilot run: what is drawn for particles is not drawn for pilots."""


def random_start(
    shape: tuple[int, int], n_components: int, mean: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    r"""Draw absolute values of normal numbers times :math:`\sqrt{\mathrm{mean}(V) / K}`.

    Source: Masood and Doshi-Velez, section 6.2, as scikit-learn has it.
    """
    size = np.sqrt(mean / n_components)
    W = size * np.abs(rng.standard_normal((shape[0], n_components)))
    return W, size * np.abs(rng.standard_normal((n_components, shape[1])))


def q_transform(
    singular: Singular, pairs: Sequence[Pair], n_components: int, rng: np.random.Generator
) -> Pair:
    r"""Return a start from singular vectors and pairs of transfer matrices.

    .. math:: W_0^t = |U \sqrt\Sigma\, Q_w^t|, \quad H_0^t = |Q_h^t \sqrt\Sigma V^\top|, \quad
        W_0 = \tfrac{1}{\sqrt T} [W_0^1 \dots W_0^T], \quad
        H_0 = \tfrac{1}{\sqrt T} [H_0^1; \dots; H_0^T]

    Usually T = 1. Components beyond those of all pairs are filled with small random entries;
    of more the first K are taken.

    Source: Masood and Doshi-Velez, algorithms 3 and 4.
    """
    basis, weights = halves(singular, len(pairs[0][0]))
    size = np.sqrt(len(pairs))
    W = np.hstack([np.abs(basis @ turn) for turn, _ in pairs])[:, :n_components] / size
    H = np.vstack([np.abs(turn @ weights) for _, turn in pairs])[:n_components] / size
    missing = n_components - W.shape[1]
    if missing > 0:
        more_w = PAD * W.mean() * rng.random((len(W), missing))
        more_h = PAD * H.mean() * rng.random((missing, H.shape[1]))
        W, H = np.hstack([W, more_w]), np.vstack([H, more_h])
    return W, H


def nndsvd(singular: Singular, n_components: int) -> tuple[Array, Array]:
    r"""Return the non-negative double singular value decomposition, with zeros.

    The larger of the positive and the negative part of every triplet,
    :math:`\sqrt{\sigma_k \|u^\pm\| \|v^\pm\|}` times both parts made unit vectors.

    Source: Boutsidis and Gallopoulos 2008, figure 1.
    """
    u, v = singular.left[:, :n_components], singular.right[:n_components].T
    sides = [(np.maximum(turn * u, 0), np.maximum(turn * v, 0)) for turn in (1.0, -1.0)]
    sizes = [np.linalg.norm(a, axis=0) * np.linalg.norm(b, axis=0) for a, b in sides]
    positive = sizes[0] >= sizes[1]
    W, Ht = (np.where(positive, above, below) for above, below in zip(*sides, strict=True))
    W[:, 0], Ht[:, 0] = np.abs(u[:, 0]), np.abs(v[:, 0])
    lengths, tiny = [np.linalg.norm(one, axis=0) for one in (W, Ht)], np.finfo(np.float64).tiny
    scale = np.sqrt(singular.values[:n_components] * lengths[0] * lengths[1])
    W, Ht = (x * scale / np.maximum(n, tiny) for x, n in zip((W, Ht), lengths, strict=True))
    return W, Ht.T


def lifted(factor: Array, rng: np.random.Generator) -> Array:
    """Replace zeros by small random entries, about a hundredth of the factor's mean.

    scikit-learn takes the data's mean, which has another unit than factors, so that there the
    start depends on the unit of the data.
    """
    size = factor.mean()
    drawn = LIFT * size * np.abs(rng.standard_normal(factor.shape))
    return np.where(factor <= ZERO * size, drawn, factor)


def fill_missing(
    executor: Executor, data: BlockedData, law: GammaFactors, seed: int
) -> ChainState | None:
    """Fit factors whose product fills in missing entries; None if no entry is missing.

    Source: Masood and Doshi-Velez, section 7.3.
    """
    if not data.n_missing:
        return None
    start = start_state(data, law, seed, 0, executor=executor)
    return run_updates(Descent(data, law, executor, start), FILL_ITERATIONS, 1e-3).state


def prepare_starts(
    executor: Executor,
    data: BlockedData,
    law: GammaFactors,
    kind: str,
    count: int,
    seed: int,
    transfer_rank: int = 3,
    stacked: bool = False,
) -> Callable[[int], Pair]:
    """Return a function that makes starting factors from a number, the same for the same seed.

    Singular vectors and transfer matrices, which all share, are computed once, here.

    Parameters
    ----------
    law
        What fills in missing entries, and has the number of components K.
    count
        Particles that will ask for a start.
    transfer_rank
        Of the Q-Transform; the data's smaller side is the most there can be.
    stacked
        Components beyond the transfer rank come from other transfer matrices: the first pair
        is the particle's own, the others are drawn. For multiplicative updates, which take
        hundreds of iterations to let small entries grow.

    Returns
    -------
    callable
        Of a number; W (I, K) and H (K, J) in the order of the grid and in the data's type.
    """
    width, shape, dtype, mean = law.n_components, data.shape, data.dtype, typical_value(data)
    rank = min(transfer_rank, *shape) if kind == "q_transform" else width
    if rank > min(shape) and kind != "random":
        raise OptionError(
            f'a start by "{kind}" takes one singular vector a component, {width} of them, and a '
            f"matrix of {shape[0]} x {shape[1]} has {min(shape)}; take fewer components or "
            '"q_transform"'
        )
    if kind != "random":
        singular = executor.retry_on_loss(
            lambda: truncated_svd(
                executor, data, rank, seed, fill_missing(executor, data, law, seed)
            )
        )
    if kind == "q_transform":
        parts = -(-width // rank) if stacked else 1
        pool = np.arange(max(POOL, parts)) if stacked else np.arange(1)
        transfer = list(zip(*learn_transfer(rank, max(count, len(pool)), seed), strict=True))

    def start(number: int) -> Pair:
        rng = generator(seed, number, Stream.START, 3)
        if kind == "random":
            W, H = random_start(shape, width, mean, rng)
        elif kind != "q_transform":
            W, H = nndsvd(singular, width)
            if kind == "nndsvdar":
                W, H = (lifted(one, rng) for one in (W, H))
        else:
            others = rng.permutation(pool[pool != number])[: parts - 1] if stacked else ()
            pairs = [transfer[other] for other in (number, *others)]
            W, H = q_transform(singular, pairs, width, rng)
        return np.ascontiguousarray(W, dtype), np.ascontiguousarray(H, dtype)

    return start
