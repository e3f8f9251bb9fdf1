r"""Rank the best columns of every row exactly, with an upper bound that excludes most cells.

Draws of a row are one long vector a (D blocks of K components), each block by the root of the
draw's weight, and so are those of a column, b: the posterior mean of a cell is a . b. With an
orthonormal basis P of a few directions that hold most of all such vectors,

.. math:: a \cdot b \le P'a \cdot P'b + |a - PP'a|\,|b - PP'b|,

which one product of short vectors gives for all cells of a block. Only cells whose bound reaches
the n-th best score of their row are looked at with all draws, in double precision. What rounding
can do is part of the bound. A quantile Q at level p of draws with mean m and variance s^2 is
bounded by

.. math:: Q \le m + s \sqrt{l / (1 - l)}, \qquad Q \le m / (1 - l) \text{ if no draw is negative},

with l = p (1 - 1/n), n the effective number of draws, since it is at most the mean of the part of
the distribution above l; and s by the spread of the factors around their means:

.. math:: s \le \tau_a |\bar b| + |\bar a| \tau_b + \kappa_a \kappa_b, \qquad
    \tau^2 = \sum_d w_d |\epsilon_d|^2, \quad \kappa^4 = \sum_d w_d |\epsilon_d|^4 .

Draws lie in memory or, beyond a limit, in a scratch file, a few draws of all rows at a time.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.storage import ArrayFile
from daskfactor.machine import single_threaded_blas
from daskfactor.recommender import best_entries as kernels

Array = NDArray[Any]
Wide = NDArray[np.float64]
Ints = NDArray[np.int64]

DIRECTIONS: Final = 3
"""Number of directions of the basis is `DIRECTIONS` times the components, plus `MORE`."""
MORE: Final = 32
SAMPLE_BYTES: Final = 2**26
"""Bytes of the largest sample of rows and columns that determines the basis."""
GROUP_BYTES: Final = 2**26
"""Approximate bytes of draws of one factor that are read together."""
ROW_BYTES: Final = 2**28
COLUMN_BYTES: Final = 2**26
"""Bytes of draws of the rows and of the columns of a block."""
TILE: Final = 256
"""Number of rows of a block that a thread processes at a time."""
LEAST: Final = 64
FEW: Final = 16
"""Number of rows up to which all cells are computed, which is faster than bounds."""
TINY: Final = 1e-6
"""Least length of the residual of a vector, as a share of its length."""


class Group(NamedTuple):
    """Some draws of a factor: their positions among all D, and the array (rows, draws * K)."""

    at: slice
    array: Any


class Score(NamedTuple):
    """Score that ranks columns: the mean (``level`` < 0) or a quantile, and its bound.

    The bound is ``mean_factor`` times the mean plus ``sd_factor`` times the standard deviation.
    """

    level: float
    mean_factor: float
    sd_factor: float


def score_of(by: str, levels: tuple[float, float], weights: Wide, nonnegative: bool) -> Score:
    """Return the score for ``"mean"``, ``"lower"`` or ``"upper"``."""
    if by == "mean":
        return Score(-1.0, 1.0, 0.0)
    level = levels[by == "upper"]
    low = level * (1.0 - float(np.square(weights).sum()))
    if nonnegative and by == "lower":
        return Score(level, 1.0 / (1.0 - low), 0.0)
    return Score(level, 1.0, float(np.sqrt(low / (1.0 - low))))


@dataclass
class Stack:
    """All draws of the rows of one factor, in groups of draws, in memory or in a scratch file.

    Attributes
    ----------
    length, width, draws
        Rows, components and draws.
    least
        Smallest entry.
    """

    length: int
    width: int
    draws: int
    dtype: Any
    file: ArrayFile
    groups: list[Group]
    least: float

    @classmethod
    def filled(
        cls,
        shape: tuple[int, int, int],
        dtype: Any,
        groups: Iterator[tuple[slice, Array]],
        file: ArrayFile,
    ) -> "Stack":
        """Return a stack of draws (draws, rows, K), which are passed a group at a time."""
        length, draws, width = shape
        members, least = [], np.inf
        for at, part in groups:
            turned = np.ascontiguousarray(part.transpose(1, 0, 2))
            members.append(Group(at, file.put(turned.reshape(-1))))
            least = min(least, float(part.min(initial=np.inf)))
        return cls(length, width, draws, dtype, file, members, least)

    def part(self, group: Group, rows: slice) -> Array:
        """Return some rows of a group, (rows, draws * K)."""
        width = (group.at.stop - group.at.start) * self.width
        flat = self.file.get(group.array, slice(rows.start * width, rows.stop * width))
        return flat.reshape(-1, width)

    def rows(self, rows: slice) -> Array:
        """Return some rows of all draws, (rows, D * K)."""
        if len(self.groups) == 1:
            return self.part(self.groups[0], rows)
        out = np.empty((rows.stop - rows.start, self.draws * self.width), self.dtype)
        for group in self.groups:
            of = slice(group.at.start * self.width, group.at.stop * self.width)
            out[:, of] = self.part(group, rows)
        return out

    def ordered(self, order: Ints, file: ArrayFile) -> "Stack":
        """Return a stack with its rows in another order."""
        everything = slice(0, self.length)
        groups = [
            Group(group.at, file.put(self.part(group, everything)[order].reshape(-1)))
            for group in self.groups
        ]
        return replace(self, file=file, groups=groups)

    def sampled(self, at: Ints) -> Wide:
        """Return some rows, (rows, D * K), in double precision."""
        everything = slice(0, self.length)
        parts = [self.part(group, everything)[at] for group in self.groups]
        return np.concatenate(parts, axis=1, dtype=np.float64)


def basis(stacks: tuple[Stack, Stack], roots: Wide) -> Wide:
    """Return orthonormal directions (D * K, r) that span most of the vectors of both factors.

    They come from a sample of rows of both by a randomised range finder with two power iterations.
    Any directions are valid; good ones make the bound tight.
    """
    total = roots.size * stacks[0].width
    count = min(total, DIRECTIONS * stacks[0].width + MORE)
    if count == total:
        return np.eye(total)
    rng = np.random.default_rng(0)
    most = max(LEAST, SAMPLE_BYTES // (16 * total))
    parts = []
    for stack in stacks:
        at = np.sort(rng.permutation(stack.length)[:most])
        part = stack.sampled(at) * np.repeat(roots, stack.width)
        parts.append(part / max(float(np.linalg.norm(part)), np.finfo(float).tiny))
    sample = np.concatenate(parts)
    directions = sample.T @ rng.standard_normal((sample.shape[0], count))
    for _ in range(2):
        directions = np.linalg.qr(directions)[0]
        directions = sample.T @ (sample @ directions)
    return np.asarray(np.linalg.qr(directions)[0])


class Short(NamedTuple):
    """Projected vectors and norms of all rows: P'a, |a|, |a - PP'a|, |mean|, tau, kappa."""

    within: Wide
    length: Wide
    rest: Wide
    mean: Wide
    tau: Wide
    kappa: Wide


def shortened(stack: Stack, P: Wide, weights: Wide, spread: bool) -> Short:
    """Project vectors on a basis; with ``spread``, also measure the spread of their draws."""
    everything, K = slice(0, stack.length), stack.width
    within = np.zeros((stack.length, P.shape[1]))
    square, mean = np.zeros(stack.length), np.zeros((stack.length, K))
    roots = np.sqrt(weights)
    for group in stack.groups:
        of = slice(group.at.start * K, group.at.stop * K)
        for rows in parts_of(stack.length, max(1, GROUP_BYTES // (8 * (of.stop - of.start)))):
            part = stack.part(group, rows) * np.repeat(roots[group.at], K)
            within[rows] += part @ P[of]
            square[rows] += np.einsum("it,it->i", part, part)
            if spread:
                drawn = part.reshape(len(part), -1, K)
                mean[rows] += np.einsum("idk,d->ik", drawn, roots[group.at])
    second, fourth = np.zeros((2, stack.length))
    for group in stack.groups if spread else ():
        part = stack.part(group, everything).reshape(stack.length, -1, K)
        for at, d in enumerate(range(group.at.start, group.at.stop)):
            far = np.square(part[:, at] - mean).sum(axis=1)
            second += weights[d] * far
            fourth += weights[d] * far**2
    inside = np.einsum("ir,ir->i", within, within)
    rest = np.sqrt(np.maximum(square - inside, 0.0) + TINY**2 * square)
    return Short(
        within, np.sqrt(square), rest, np.linalg.norm(mean, axis=1), np.sqrt(second), fourth**0.25
    )


def bounding(row: Short, column: Short, score: Score) -> tuple[Array, Array]:
    """Return vectors of rows and of columns whose products bound the scores, single precision."""
    m, s = score.mean_factor, score.sd_factor
    # Of r + 5 products and sums in single precision, and of the vectors before.
    slack = (row.within.shape[1] + 16) * 2.0**-22
    lengths = row.length + s * (row.mean + row.tau + row.kappa)
    others = column.length + s * (column.mean + column.tau + column.kappa)
    of_rows = [m * row.rest, m * slack * lengths]
    of_columns = [column.rest, others]
    if s:
        of_rows += [s * row.tau, s * row.mean, s * row.kappa]
        of_columns += [column.mean, column.tau, column.kappa]
    single = np.float32
    return (
        np.column_stack([m * row.within, *of_rows]).astype(single),
        np.column_stack([column.within, *of_columns]).astype(single),
    )


def parts_of(length: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of a length."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


class Best(NamedTuple):
    """The n best columns of every row, -1 if there are fewer, and their statistics.

    ``figures`` (rows, n, 4) are mean, standard deviation, lower and upper end, NaN if there
    is no column; ``looked`` is the number of cells that were computed from all draws.
    """

    columns: Ints
    figures: Wide
    looked: int


@dataclass
class Search:
    """Search for the n best columns by a score, with excluded columns for each row.

    Attributes
    ----------
    weights
        Masses of the draws, (D,), which add up to 1.
    starts, excluded
        Excluded columns of each row in ascending order, as compressed rows.
    threads
        Number of threads.
    on_rows
        Function that receives the number of finished rows.
    """

    score: Score
    n: int
    levels: tuple[float, float]
    weights: Wide
    starts: Ints
    excluded: Ints
    threads: int
    on_rows: Callable[[int], None]
    row_bytes: int = ROW_BYTES
    column_bytes: int = COLUMN_BYTES

    @property
    def equal(self) -> bool:
        """True if all draws have the same weight."""
        return bool((self.weights == self.weights[0]).all())

    def run(self, rows: Stack, columns: Stack, file: ArrayFile) -> Best:
        """Find the best columns of all rows."""
        with single_threaded_blas():
            P = basis((rows, columns), np.sqrt(self.weights))
            spread = self.score.sd_factor > 0
            short = [shortened(side, P, self.weights, spread) for side in (rows, columns)]
            of_rows, of_columns = bounding(short[0], short[1], self.score)
            # The columns that are likely the best come first: they rule out most others.
            likely = of_columns @ of_rows.mean(axis=0) + short[1].length
            order = np.argsort(-likely, kind="stable")
            of_columns = np.ascontiguousarray(of_columns[order])
            ordered = columns.ordered(order, file)
            del short
            best_columns = np.full((rows.length, self.n), -1, np.int64)
            figures = np.full((rows.length, self.n, 4), np.nan)
            looked, each = 0, self.weights.size * rows.width * np.dtype(rows.dtype).itemsize
            with ThreadPoolExecutor(self.threads) as pool:
                for part in parts_of(rows.length, max(LEAST, self.row_bytes // each)):
                    block = _Block(self, pool, rows.rows(part), of_rows[part], part, order)
                    looked += block.search(ordered, of_columns, best_columns[part], each)
                    block.describe(ordered, best_columns[part], figures[part], each)
                    self.on_rows(part.stop)
        return Best(best_columns, figures, looked)

    def search_all_cells(
        self, rows: Array, columns: Iterator[tuple[slice, Array]], shape: tuple[int, int]
    ) -> Best:
        """Find the best columns of a few rows, (D, R, K), by the means of all cells.

        ``columns`` yields a few draws (d, C, K) at a time.
        """
        count, (length, total) = self.weights.size, shape
        mu = np.empty((count, length, total))
        chosen = np.full((length, self.n), -1, np.int64)
        scores, figures = np.full(chosen.shape, -np.inf), np.full((*chosen.shape, 4), np.nan)
        levels = np.array(self.levels)
        one = np.ones((1, count))  # one factor, so that products are the means themselves
        room = np.empty(count), np.empty(count, np.int64)
        looked = 0
        with ThreadPoolExecutor(self.threads) as pool:
            for at, part in columns:
                each = list(parts_of(len(part), -(-len(part) // self.threads)))
                operands = rows[at], part, mu[at]
                parts = ([operand[e] for e in each] for operand in operands)
                list(pool.map(kernels.means_of_cells, *parts))
        for r in range(length):
            for cols in parts_of(total, TILE):
                block = np.ascontiguousarray(mu[:, r, cols].T)
                looked += kernels.search(
                    np.full((1, len(block)), np.inf, np.float32), one, block,
                    np.arange(cols.start, cols.stop), self.weights, self.score.level, self.equal,
                    self.starts[r : r + 2], self.excluded, scores[r : r + 1], chosen[r : r + 1],
                    *room,
                )  # fmt: skip
            best = chosen[r][chosen[r] >= 0]
            block = np.ascontiguousarray(mu[:, r, best].T)
            kernels.describe(
                one, block, np.zeros(best.size, np.int64), np.arange(best.size), self.weights,
                levels, self.equal, figures[r], *room,
            )  # fmt: skip
            self.on_rows(r + 1)
        return Best(chosen, figures, looked)


@dataclass
class _Block:
    """Rows of a search with all their draws, which are compared with blocks of columns."""

    search_: Search
    pool: ThreadPoolExecutor
    rows: Array
    bounds: Array
    part: slice
    order: Ints

    def search(self, columns: Stack, bounds: Array, best: Ints, each: int) -> int:
        """Update the best columns of these rows, ``best`` (rows, n), with all columns."""
        search = self.search_
        scores = np.full(best.shape, -np.inf)
        looked = 0
        for cols in parts_of(columns.length, max(LEAST, search.column_bytes // each)):
            block, numbers = columns.rows(cols), self.order[cols]
            turned = np.ascontiguousarray(bounds[cols].T)

            tile = partial(self._tile, block, turned, numbers, scores, best)
            looked += sum(self.pool.map(tile, parts_of(len(self.rows), TILE)))
        return looked

    def _tile(
        self, block: Array, turned: Array, numbers: Ints, scores: Wide, best: Ints, rows: slice
    ) -> int:
        """Update a few rows with a block of columns."""
        search, first = self.search_, self.part.start
        count = search.weights.size
        return kernels.search(
            self.bounds[rows] @ turned, self.rows[rows], block, numbers,
            search.weights, search.score.level, self.search_.equal,
            search.starts[first + rows.start : first + rows.stop + 1], search.excluded,
            scores[rows], best[rows], np.empty(count), np.empty(count, np.int64),
        )  # fmt: skip

    def describe(self, columns: Stack, best: Ints, figures: Wide, each: int) -> None:
        """Fill in the statistics of the best columns."""
        search, count = self.search_, self.search_.weights.size
        place = np.empty(self.order.size, np.int64)
        place[self.order] = np.arange(self.order.size)
        rows, ranks = np.nonzero(best >= 0)
        at = place[best[rows, ranks]]
        by_column = np.argsort(at, kind="stable")
        rows, ranks, at = rows[by_column], ranks[by_column], at[by_column]
        for cols in parts_of(columns.length, max(LEAST, search.column_bytes // each)):
            low, high = np.searchsorted(at, [cols.start, cols.stop])
            if low == high:
                continue
            block = columns.rows(cols)

            def tile(cells: slice, block: Array = block, cols: slice = cols) -> None:
                out = np.empty((cells.stop - cells.start, 4))
                kernels.describe(
                    self.rows, block, rows[cells], at[cells] - cols.start, search.weights,
                    np.array(search.levels), self.search_.equal, out, np.empty(count),
                    np.empty(count, np.int64),
                )  # fmt: skip
                figures[rows[cells], ranks[cells]] = out

            some = [
                slice(low + part.start, low + part.stop) for part in parts_of(high - low, TILE * 16)
            ]
            list(self.pool.map(tile, some))
