"""Transfer matrices: how factors of small synthetic matrices follow from singular vectors."""

import warnings
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState
from daskfactor.inference.multiplicative import typical_value
from daskfactor.random import Stream, generator
from daskfactor.stein.singular import Singular, consistent_signs, truncated_svd, whole_svd

Array = NDArray[Any]

SIZE: Final = 12
"""Rows and columns of a synthetic matrix, at least; more where the rank needs them."""
RESTARTS: Final = 5
"""Factorizations of every synthetic matrix."""
NOISE: Final = 0.05
"""Standard deviation of the noise, of the mean of the noiseless matrix."""
STREAM: Final = 7
"""Part of the address of the random numbers, so that no start of a fit shares them."""


class Transfer(NamedTuple):
    """Pairs of matrices: W ≈ U √Σ Q_w, H ≈ Q_h √Σ Vᵀ; (M, R, R) each."""

    w: Array
    h: Array


def halves(found: Singular, rank: int) -> tuple[Array, Array]:
    """U √Σ (I, R) and √Σ Vᵀ (R, J) of the leading triplets."""
    root = np.sqrt(found.values[:rank])
    return found.left[:, :rank] * root, found.right[:rank] * root[:, None]


@lru_cache(maxsize=16)
def learn_transfer(rank: int, count: int, seed: int = 0) -> Transfer:
    r"""Transfer matrices from non-negative factorizations of small synthetic matrices.

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
    Transfer
        Two arrays (M, R, R), which nobody may write to.

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
        basis, weights = halves(consistent_signs(whole_svd(X, rank)), rank)
        for _ in range(min(RESTARTS, count - len(pairs))):
            W, H = _factorize(X, rank, int(rng.integers(2**31)))
            pairs.append(
                (
                    np.linalg.lstsq(basis, W, rcond=None)[0],
                    np.linalg.lstsq(weights.T, H.T, rcond=None)[0].T,
                )
            )
        problem += 1
    found = Transfer(*(np.stack(one) for one in zip(*pairs, strict=True)))
    for one in found:
        one.setflags(write=False)
    return found


def _factorize(X: Array, rank: int, seed: int) -> tuple[Array, Array]:
    """One factorization from a random start, W and H of equal length component by component."""
    from sklearn.decomposition import non_negative_factorization
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what it has reached will do
        W, H, _ = non_negative_factorization(
            X, n_components=rank, init="random", solver="cd", max_iter=200, random_state=seed
        )
    size: Any = np.linalg.norm(W, axis=0), np.linalg.norm(H, axis=1)
    usable = (size[0] > 0) & (size[1] > 0)
    ratio = np.where(usable, size[1], 1.0) / np.where(usable, size[0], 1.0)
    return W * np.sqrt(ratio), H / np.sqrt(ratio)[:, None]


Start = Literal["q_transform", "random", "nndsvd", "nndsvdar"]

STARTS: Final[tuple[Start, ...]] = get_args(Start)
PAD: Final = 1e-2
"""Entries of components beyond the transfer rank, of the mean of those that have one."""
LIFT: Final = 1e-2
"""What NNDSVDar puts in place of zeros, of the mean of the factor."""
ZERO: Final = 1e-6
"""Entries that count as zeros there, of the mean of the factor."""
POOL: Final = 32
"""Transfer matrices that further components are drawn from."""
PILOTS: Final = 2**20
"""Number of the first pilot run: what is drawn for particles is not drawn for pilots."""


class Starts:
    """Starting factors of numbered particles, each a function of seed and number alone."""

    def __init__(
        self,
        data: BlockedData,
        n_components: int,
        kind: Start,
        seed: int,
        singular: Singular | None = None,
        transfer: Transfer | None = None,
        stacked: bool = False,
    ) -> None:
        self.shape, self.dtype = data.shape, data.dtype
        self.mean = typical_value(data)
        self.n_components, self.kind, self.seed = n_components, kind, seed
        self.singular, self.transfer, self.stacked = singular, transfer, stacked

    def __call__(self, number: int) -> tuple[Array, Array]:
        """W (I, K) and H (K, J) in the order of the grid and in the data's type."""
        rng = generator(self.seed, number, Stream.START, 3)
        if self.singular is None:
            W, H = random_start(self.shape, self.n_components, self.mean, rng)
        elif self.transfer is None:
            W, H = nndsvd(self.singular, self.n_components)
            if self.kind == "nndsvdar":
                W, H = (lifted(one, rng) for one in (W, H))
        elif self.stacked:
            W, H = several(self.singular, self.transfer, number, self.n_components, rng)
        else:
            pair = self.transfer.w[number], self.transfer.h[number]
            W, H = q_transform(self.singular, pair, self.n_components, rng)
        return np.ascontiguousarray(W, self.dtype), np.ascontiguousarray(H, self.dtype)


def prepare_starts(
    executor: Executor,
    data: BlockedData,
    n_components: int,
    kind: Start,
    count: int,
    seed: int,
    transfer_rank: int = 3,
    fill: ChainState | None = None,
    stacked: bool = False,
) -> Starts:
    """Do once what all starts of a kind share: singular vectors, transfer matrices.

    Parameters
    ----------
    count
        Particles that will ask for a start.
    transfer_rank
        Of the Q-Transform; the data's smaller side is the most there can be.
    fill
        Factors that fill in missing entries, if there are any.
    stacked
        Components beyond the transfer rank come from other transfer matrices, see `several`.
    """
    if kind == "random":
        return Starts(data, n_components, kind, seed)
    if kind == "q_transform":
        rank = min(transfer_rank, *data.shape)
        singular = truncated_svd(executor, data, rank, seed, fill)
        least = max(POOL, parts(n_components, rank)) if stacked else 1
        transfer = learn_transfer(rank, max(count, least), seed)
        return Starts(data, n_components, kind, seed, singular, transfer, stacked)
    short = min(data.shape)
    if n_components > short:
        raise OptionError(
            f'start="{kind}" takes one singular vector a component, {n_components} of them, and a '
            f"matrix of {data.shape[0]} x {data.shape[1]} has {short}; take fewer components or "
            'start="q_transform"'
        )
    singular = truncated_svd(executor, data, n_components, seed, fill)
    return Starts(data, n_components, kind, seed, singular)


def random_start(
    shape: tuple[int, int], n_components: int, mean: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    r"""Absolute values of normal numbers times :math:`\sqrt{\mathrm{mean}(V) / K}`.

    Source: Masood and Doshi-Velez, section 6.2, as scikit-learn has it.
    """
    size = np.sqrt(mean / n_components)
    W = size * np.abs(rng.standard_normal((shape[0], n_components)))
    return W, size * np.abs(rng.standard_normal((n_components, shape[1])))


def q_transform(
    found: Singular, pair: tuple[Array, Array], n_components: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    r"""Start from singular vectors and a pair of transfer matrices.

    .. math:: W_0 = |U \sqrt\Sigma\, Q_w|, \quad H_0 = |Q_h \sqrt\Sigma V^\top|

    Components beyond the transfer rank are filled with small random entries; of a larger
    transfer rank the first K are taken.

    Source: Masood and Doshi-Velez, algorithms 3 and 4.
    """
    rank = len(pair[0])
    basis, weights = halves(found, rank)
    W, H = np.abs(basis @ pair[0])[:, :n_components], np.abs(pair[1] @ weights)[:n_components]
    missing = n_components - W.shape[1]
    if missing > 0:
        more_w = PAD * W.mean() * rng.random((len(W), missing))
        more_h = PAD * H.mean() * rng.random((missing, H.shape[1]))
        W, H = np.hstack([W, more_w]), np.vstack([H, more_h])
    return W, H


def parts(n_components: int, rank: int) -> int:
    """Transfer matrices of a rank that it takes to have enough components."""
    return -(-n_components // rank)


def several(
    found: Singular, transfer: Transfer, number: int, n_components: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    r"""Start from several pairs of transfer matrices side by side, scaled to one product.

    .. math:: W_0 = \tfrac{1}{\sqrt T} [W_0^1 \dots W_0^T], \quad
        H_0 = \tfrac{1}{\sqrt T} [H_0^1; \dots; H_0^T]

    The first pair is the particle's own, the others are drawn. For multiplicative updates,
    which take hundreds of iterations to let small entries grow.
    """
    rank = transfer.w.shape[1]
    count = parts(n_components, rank)
    pool = np.arange(max(POOL, count))
    others = rng.permutation(pool[pool != number])[: count - 1]
    halves_of = [
        q_transform(found, (transfer.w[n], transfer.h[n]), rank, rng) for n in (number, *others)
    ]
    W = np.hstack([one for one, _ in halves_of]) / np.sqrt(count)
    H = np.vstack([one for _, one in halves_of]) / np.sqrt(count)
    return W[:, :n_components], H[:n_components]


def nndsvd(found: Singular, n_components: int) -> tuple[Array, Array]:
    r"""Non-negative double singular value decomposition, with zeros.

    The larger of the positive and the negative part of every triplet,
    :math:`\sqrt{\sigma_k \|u^\pm\| \|v^\pm\|}` times both parts made unit vectors.

    Source: Boutsidis and Gallopoulos 2008, figure 1.
    """
    W, H = np.zeros((len(found.left), n_components)), np.zeros((n_components, found.right.shape[1]))
    for k in range(n_components):
        u, v = found.left[:, k], found.right[k]
        parts = [(np.maximum(turn * u, 0), np.maximum(turn * v, 0)) for turn in (1.0, -1.0)]
        if k == 0:
            parts = [(np.abs(u), np.abs(v))]
        sizes = [float(np.linalg.norm(a) * np.linalg.norm(b)) for a, b in parts]
        best = int(np.argmax(sizes))
        if not sizes[best] > 0:
            continue
        a, b = parts[best]
        scale = np.sqrt(found.values[k] * sizes[best])
        W[:, k], H[k] = scale * a / np.linalg.norm(a), scale * b / np.linalg.norm(b)
    return W, H


def lifted(factor: Array, rng: np.random.Generator) -> Array:
    """Zeros replaced by small random entries, about a hundredth of the factor's mean.

    scikit-learn takes the data's mean, which has another unit than factors, so that there the
    start depends on the unit of the data.
    """
    size = factor.mean()
    drawn = LIFT * size * np.abs(rng.standard_normal(factor.shape))
    return np.where(factor <= ZERO * size, drawn, factor)
