"""Sets of pairs of factors, and their divergences, scores and Stein matrix under a posterior.

All models here have a log density of the form ℓ(d) + Σ log p(W) + Σ log p(H), d = Σ d_β(v|μ)
over the observed entries, so that the score is ℓ'(d) ∇d and a slope of the prior.

A band of W is taken against all the blocks it meets, every block being read once for all
particles, and the same for H. That computes each gradient twice, but allocates nothing larger
than a band of the particles: scores are reduced at once. A Stein matrix is summed over slabs
of coordinates: nothing of size particles² x dimension exists, nor are all scores in memory.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, NamedTuple, Self, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor
from daskfactor.inference.multiplicative import mean_floor
from daskfactor.inference.point import chosen_dispersion
from daskfactor.inference.singular import Pair, Side
from daskfactor.kernels import blockwise
from daskfactor.kernels.views import Sums, Workspace
from daskfactor.machine import memory_budget
from daskfactor.stein.kernel import IMQ, Block, assemble

Array = NDArray[Any]
Slab = tuple[slice, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
R = TypeVar("R")

SIDES: Final[tuple[Side, Side]] = ("rows", "columns")
NAMES: Final = {"rows": "W", "columns": "H"}
LOAD_SHARE: Final = 4
"""Lazy particles are read into memory if they take no more than one part in so many of it."""
TINY: Final = 1e-30
"""Value of θ below which the slope of a gamma prior, (shape - 1)/θ, stops growing."""
SLAB_BYTES: Final = 2**21
"""Bytes of the values of all particles in double precision at a time."""


def read(source: Any, index: Any) -> Array:
    """Read a part of an array; a lazy one in this thread, which may be a worker's."""
    part = source[index]
    if hasattr(part, "compute"):
        part = part.compute(scheduler="synchronous")
    return np.asarray(part)


def factors_of(tree: xr.DataTree) -> tuple[Any, Any]:
    """Return W (chain, draw, row, component) and H (chain, draw, component, column) of a run.

    They are arrays in memory, or lazy ones of a store.
    """
    group, draws = tree["posterior"].to_dataset(), ("chain", "draw")
    return (
        group["W"].transpose(*draws, ..., "component").data,
        group["H"].transpose(*draws, "component", ...).data,
    )


@dataclass(frozen=True)
class Particles:
    """M pairs of factors of some data, read band by band.

    Attributes
    ----------
    W, H
        Arrays (M, I, K) and (M, K, J) that can be sliced: NumPy, memory-mapped, zarr, dask,
        xarray.
    data
        Its grid cuts them into bands, and they are read in its type.
    ordered
        True if rows and columns are in the grid's order, False if in the caller's.
    shrink
        (M, K): divisors of columns of W, and factors of rows of H; None: one.
    """

    W: Any
    H: Any
    data: BlockedData
    ordered: bool = False
    shrink: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, W: Any, H: Any, data: BlockedData) -> Self:
        """Return particles in the caller's order.

        Raises
        ------
        OptionError
            If the shapes do not go together.
        """
        shapes = tuple(getattr(one, "shape", None) for one in (W, H))
        if any(shape is None or len(shape) != 3 for shape in shapes):
            raise OptionError(
                "particles must be a pair of arrays, W (particle, row, component) and H "
                f"(particle, component, column), got shapes {shapes[0]} and {shapes[1]}; stack the "
                "factors along a first axis"
            )
        (count, n_rows, width), (count_h, width_h, n_columns) = shapes  # type: ignore[misc]
        if (count, width) != (count_h, width_h) or 0 in (count, width):
            raise OptionError(
                f"W {shapes[0]} and H {shapes[1]} must have equally many particles and components, "
                "at least one: W is (particle, row, component), H (particle, component, column)"
            )
        if (n_rows, n_columns) != data.shape:
            raise OptionError(
                f"the particles are factors of a matrix of {n_rows} x {n_columns}, the data have "
                f"shape {data.shape[0]} x {data.shape[1]}; pass the data that they were fitted to"
            )
        return cls(W, H, data)

    @property
    def count(self) -> int:
        """Number of particles M."""
        return int(self.W.shape[0])

    @property
    def width(self) -> int:
        """Number of components K."""
        return int(self.W.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all particles in the type in which they are read."""
        return self.count * self.width * sum(self.data.shape) * self.data.dtype.itemsize

    def loaded(self) -> Self:
        """Return the particles in memory, if they are lazy and small."""
        lazy = [not isinstance(one, np.ndarray) for one in (self.W, self.H)]
        if not any(lazy) or self.nbytes > memory_budget(None) // LOAD_SHARE:
            return self
        return replace(self, W=read(self.W, slice(None)), H=read(self.H, slice(None)))

    def band(self, side: Side, number: int) -> Array:
        """Read one band of all particles: (M, rows of the band, K), each C-contiguous."""
        data, dtype = self.data, self.data.dtype
        bands, order = (
            (data.grid.rows, data.row_order) if side == "rows" else (data.grid.cols, data.col_order)
        )
        low, high = bands.offsets[number], bands.offsets[number + 1]
        at: Any = slice(low, high) if order is None or self.ordered else order[low:high]
        if side == "rows":
            values = read(self.W, (slice(None), at))
        else:
            values = read(self.H, (slice(None), slice(None), at)).swapaxes(1, 2)
        if self.shrink is not None:
            factor = 1.0 / self.shrink if side == "rows" else self.shrink
            values = np.array(values, dtype, order="C")
            values *= factor[:, None].astype(dtype)
            return values
        values = values.astype(dtype, copy=False)
        return values if values[0].flags.c_contiguous else np.ascontiguousarray(values)

    def checked(self, executor: Executor, simplex: bool) -> Self:
        """Check the particles; on the simplex, divide columns of W by their sums and keep every WH.

        Raises
        ------
        OptionError
            If a particle is not finite or not non-negative, or has a column of W that is all
            zero and cannot be put on the simplex.
        """

        def extremes(item: tuple[Side, int], work: Workspace) -> tuple[Array, ...]:
            del work
            values = self.band(*item)
            finite = np.asarray(np.isfinite(values).all(axis=(1, 2)))
            return values.min(axis=(1, 2)), finite, values.sum(axis=1, dtype=np.float64)

        blocks = self.data.grid.blocks
        items = [(side, number) for side in SIDES for number in range(blocks)]
        checks = executor.map(extremes, items, "check-particles")
        for side, bands in zip(SIDES, (checks[:blocks], checks[blocks:]), strict=True):
            least = np.min([one for one, _, _ in bands], axis=0)
            finite = np.all([one for _, one, _ in bands], axis=0)
            with np.errstate(invalid="ignore"):
                bad = np.flatnonzero(~(finite & (least >= 0)))
            if bad.size:
                raise OptionError(
                    f"{NAMES[side]} of particle {bad[0]} goes down to {least[bad[0]]:g} or holds "
                    "values that are not finite; factors must be finite and at least 0: leave out "
                    "particles that diverged"
                )
        if not simplex:
            return self
        sums = np.sum([one for _, _, one in checks[:blocks]], axis=0)
        _check_sums(sums, "particle", "leave that particle out")
        return replace(self, shrink=sums)


def _check_sums(sums: Array, what: str, advice: str) -> None:
    """Refuse sums of the columns of W, (M, K), that are zero."""
    zero = np.argwhere(~(sums > 0))
    if zero.size:
        number, component = zero[0]
        raise OptionError(
            f"component {component} of {what} {number} is zero in all of W, so that no scale puts "
            f"it on the simplex; {advice}"
        )


def on_simplex(W: Array, H: Array) -> tuple[Array, Array]:
    """Return factors of the same product with columns of W that add up to 1.

    A component that is zero in all of W gets a uniform column there, and a row of zeros in H.
    """
    sums = W.sum(axis=0, dtype=np.float64)
    dead = ~(sums > 0)
    W, H = W.astype(np.float64), H.astype(np.float64)
    W[:, dead], H[dead], sums[dead] = 1.0, 0.0, len(W)
    return W / sums, H * sums[:, None]


class BandScore(NamedTuple):
    """One band of all particles, and the terms of its scores.

    ``values`` (M, m, K); ``gradient`` of the negative divergence, of that shape; ``slope``
    (M,), its factor in the score; ``rate`` and ``excess`` of the prior, λ and a - 1;
    ``free`` (K,), zero for components that are constants.
    """

    values: Array
    gradient: Array
    slope: NDArray[np.float64]
    rate: float
    excess: float
    free: NDArray[np.float64]

    def slabs(self) -> Iterator[Slab]:
        """Yield a few rows at a time, in double precision.

        Their slice; values and scores, (M, rows, K); and the log prior Σ (a - 1) log θ - λ θ over
        the free entries, constants left out: (M,).
        """
        count, rows, width = self.values.shape
        step = max(1, SLAB_BYTES // (8 * count * width))
        for at in range(0, rows, step):
            part = slice(at, at + step)
            values = self.values[:, part].astype(np.float64)
            score = self.gradient[:, part] * -self.slope[:, None, None]
            score -= self.rate
            prior = -self.rate * (values * self.free).sum(axis=(1, 2))
            if self.excess:
                positive = np.maximum(values, TINY)
                score += self.excess / positive
                prior += self.excess * (np.log(positive) * self.free).sum(axis=(1, 2))
            score *= self.free
            yield part, values, score, prior


def add_up(parts: Iterable[tuple[Array, ...]]) -> tuple[Array, ...]:
    """Add up tuples of arrays in their order, one at a time."""
    return reduce(lambda total, part: tuple(map(np.add, total, part)), parts)


def products(band: BandScore) -> tuple[Array, ...]:
    """Return the sums over one band from which a Stein matrix is computed, in double precision.

    Gram matrix of the particles, inner products of scores with them and of scores, (M, M)
    each; sums of scores and of particles over rows, (M, K); the log prior, (M,). Particles
    and, for the second, scores are centred coordinate by coordinate first: only differences
    matter there, and small ones do not cancel out of large inner products.
    """

    def of_slab(values: Array, score: Array, prior: Array) -> tuple[Array, ...]:
        values -= values.mean(axis=0)
        sums = score.sum(axis=1), values.sum(axis=1)
        x, s = values.reshape(len(values), -1), score.reshape(len(score), -1)
        gram = s @ s.T
        s -= s.mean(axis=0)
        return x @ x.T, s @ x.T, gram, *sums, prior

    return add_up(of_slab(*slab) for _, *slab in band.slabs())


class Scores(NamedTuple):
    """Gradients of the log posterior density.

    W (M, I, K) and H (M, K, J) in the order of the grid's rows and columns, in the type of
    the particles; ``divergence`` (M,), Σ d_β; ``log_density`` (M,) up to a constant that all
    share.
    """

    W: Array
    H: Array
    divergence: NDArray[np.float64]
    log_density: NDArray[np.float64]


class Stein(NamedTuple):
    """A Stein matrix (M, M), its kernel, and statistics of the particles, (M,) each.

    ``log_density`` is up to a constant; ``divergence`` is Σ d_β.
    """

    matrix: Array
    kernel: IMQ
    log_density: Array
    divergence: Array


@dataclass(frozen=True)
class Posterior:
    """A posterior of some data, with the scores and Stein matrix of sets of particles.

    Attributes
    ----------
    executor, data
        Executor of passes over the data, and the data.
    model
        A model with `of_divergence` whose settings are numbers; under a
        `SILFNMF` columns of W add up to 1.
    kernel, tangent
        Options of the Stein discrepancy, see :func:`stein_discrepancy`.
    """

    executor: Executor
    data: BlockedData
    model: Any
    kernel: IMQ
    tangent: bool = False

    def resolve(self, seed: int = 0) -> Self:
        """Choose numbers for ``"auto"`` settings; a dispersion as for evidences, by a fit."""
        data, model, phi = self.data, self.model, math.nan
        if getattr(model, "dispersion", 1.0) == "auto":
            phi = chosen_dispersion(data, model, seed, self.executor)
        return replace(self, model=model.with_numbers(data.level, phi))

    @property
    def floor(self) -> float:
        """Smallest μ of the divergence; minus infinity for real-valued means."""
        law = self.model.likelihood
        return -math.inf if law.normal else mean_floor(self.data, law)

    def objectives(self, divergence: Array) -> Array:
        """Return the objectives of a `SILFNMF` at summed divergences."""
        return np.asarray(self.model.factor * divergence + 0.0)  # no -0.0

    def prior(self, side: Side) -> tuple[float, float]:
        """Return λ and a - 1 of a prior whose log density is (a - 1) log θ - λ θ."""
        rate, shape = self.model.priors[SIDES.index(side)]
        return rate, shape - 1.0

    def frozen(self, side: Side) -> NDArray[np.bool_]:
        """Return a mask of components that are constants, (K,)."""
        mask = self.model.frozen[SIDES.index(side)]
        return np.zeros(self.model.n_components, bool) if mask is None else mask

    def dimension(self, side: Side) -> int:
        """Count the coordinates of a factor in which scores are taken."""
        length = self.data.shape[SIDES.index(side)] - (self.tangent and side == "rows")
        return length * int((~self.frozen(side)).sum())

    def particles(self, W: Any, H: Any) -> Particles:
        """Return particles of arrays (M, I, K) and (M, K, J) in the grid's order."""
        return Particles(W, H, self.data, ordered=True)

    def in_double(self, W: Any, H: Any) -> Pair:
        """Return starts (M, I, K), (M, K, J) in double precision, on the simplex under a `SILFNMF`.

        Raises
        ------
        OptionError
            If a column of W that is to be on the simplex is all zero.
        """
        W, H = np.array(W, dtype=np.float64), np.array(H, dtype=np.float64)
        if self.model.simplex:
            sums = W.sum(axis=1)
            _check_sums(sums, "start", "pass a start that has some of it")
            W /= sums[:, None]
            H *= sums[:, :, None]
        return W, H

    def divergences(self, particles: Particles) -> NDArray[np.float64]:
        """Return Σ d_β(v|μ) over the observed entries, of every particle: (M,).

        Every block is read once; sums are taken in the blocks' order, whatever the executor.
        """
        # Mapped functions may go to other machines, so they must not refer to the executor.
        data, likelihood, floor = self.data, self.model.likelihood, self.floor
        blocks = data.grid.blocks

        def one_row(row: int, work: Workspace) -> NDArray[np.float64]:
            rows = particles.band("rows", row)
            sums = np.zeros((blocks, particles.count, 2))
            for col in range(blocks):
                columns = particles.band("columns", col)
                view = data.view(row, col)
                for *pair, out in zip(rows, columns, sums[col], strict=True):
                    blockwise.evaluate((view, likelihood, (*pair,), floor), out, work)
            return sums[..., 0]

        table = np.concatenate(self.executor.map(one_row, range(blocks), "divergence"))
        total: NDArray[np.float64] = -table.sum(axis=0)
        return total

    def over_bands(
        self,
        particles: Particles,
        slope: NDArray[np.float64],
        use: Callable[[BandScore], R],
    ) -> tuple[list[R], list[R]]:
        """Apply ``use`` to the scores of every band of W, and of every band of H.

        Parameters
        ----------
        slope
            (M,): ℓ' at the particles' divergences.
        use
            Called where the band was computed, with arrays that it may change.
        """
        data, likelihood, floor = self.data, self.model.likelihood, self.floor
        prior = {
            side: (*self.prior(side), (~self.frozen(side)).astype(np.float64)) for side in SIDES
        }
        blocks = data.grid.blocks

        def one(item: tuple[Side, int], work: Workspace) -> R:
            side, number = item
            by_rows = side == "rows"
            values = particles.band(side, number)
            gradient = np.zeros(values.shape, values.dtype)
            for other in range(blocks):
                others = particles.band("columns" if by_rows else "rows", other)
                view = data.view(number, other) if by_rows else data.view(other, number)
                for first, second, out in zip(values, others, gradient, strict=True):
                    pair = (first, second) if by_rows else (second, first)
                    sums = Sums.of(0 if by_rows else 1, 2, out)
                    blockwise.accumulate((view, likelihood, pair, floor), "score", sums, work)
            return use(BandScore(values, gradient, slope, *prior[side]))

        items = [(side, number) for side in SIDES for number in range(blocks)]
        results = self.executor.map(one, items, "gradient")
        return results[:blocks], results[blocks:]

    def scores(self, particles: Particles) -> Scores:
        r"""Return the scores of all particles as arrays, as large as the particles themselves.

        .. math:: \nabla \log p(W, H | V) = \ell'(d) \nabla d - \lambda + (a - 1) / \theta

        with :math:`\ell = -C\,\mathrm{SILF}(f)` for a :class:`SILFNMF`, -d/φ for a
        :class:`TweedieNMF`. Components that are constants have a score of 0.

        References
        ----------
        Masood and Doshi-Velez, equation 3 and section 5.
        """
        divergence = self.divergences(particles)
        value, slope, _ = self.model.of_divergence(divergence)

        def keep(band: BandScore) -> tuple[Array, NDArray[np.float64]]:
            prior = np.zeros(len(band.values))
            for part, _, score, log_prior in band.slabs():
                prior += log_prior
                band.gradient[:, part] = score
            return band.gradient, prior

        sides = self.over_bands(particles, slope, keep)
        rows, cols = (np.concatenate([one for one, _ in bands], axis=1) for bands in sides)
        prior = np.sum([one for bands in sides for _, one in bands], axis=0)
        return Scores(rows, cols.swapaxes(1, 2), divergence, value + prior)

    def stein_matrix(self, particles: Particles) -> Stein:
        """Return the kernelised Stein matrix of all particles, summed over bands in a fixed order.

        The same bits from every executor on the same grid.
        """
        divergence = self.divergences(particles)
        value, slope, _ = self.model.of_divergence(divergence)
        blocks, prior = [], np.zeros(particles.count)
        for side, bands in zip(SIDES, self.over_bands(particles, slope, products), strict=True):
            gram, cross, score, score_sums, value_sums, log_prior = add_up(bands)
            if self.tangent and side == "rows":  # less the column means
                rows = self.data.shape[0]
                means = score_sums / rows
                score = score - rows * means @ means.T
                cross = cross - (means - means.mean(axis=0)) @ value_sums.T
            blocks.append(Block.of(gram, cross, score, self.dimension(side)))
            prior += log_prior
        kernel = self.kernel.resolve(blocks[0].r2, blocks[1].r2)
        matrix = assemble((blocks[0], blocks[1]), kernel)
        return Stein(matrix, kernel, value + prior, divergence)
