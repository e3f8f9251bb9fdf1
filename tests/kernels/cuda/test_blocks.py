"""Blocks of a part on a device, all at once, against each of them on a processor; drawn entries.

Both round, and sum in orders of their own. So what is computed is compared beside the sum of
absolute terms, closed sums of unstored zeros among them, of which rounding leaves about
sqrt(terms) eps.
"""

from functools import cache

import numpy as np
import pytest

from daskfactor.kernels import blockwise, polynomials, subsample
from daskfactor.kernels.cuda import blocks
from daskfactor.kernels.cuda.blocks import Part, Side, packed
from daskfactor.kernels.langevin import mean_share
from daskfactor.kernels.subsample import block_address, drawn_entries
from daskfactor.kernels.views import BlockView, Workspace
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels import problems
from tests.kernels.problems import compressed
from tests.pairwise import pairwise
from tests.tiers import tiered

FLOOR = 1e-6
K = 11
ROWS, COLS = np.array([0, 13, 14, 314]), np.array([0, 20, 27, 60])
"""Where bands begin: one of one row, and one of more rows than a thread adds up."""
BLOCKS = ((2, 1), (0, 2), (1, 0))
EVEN = np.array([0, 40, 80, 120]), np.array([0, 20, 40, 60]), ((0, 0), (1, 1), (2, 2))
"""Bands that are equally long, and in order: a factor is the stack of its bands."""
TOLERANCE = {"float32": 3e-6, "float64": 1e-13}
LAWS = {f"beta={beta}": Tweedie(beta) for beta in (2.0, 1.0, 0.5, 0.0, -1.0, 0.3, 2.5)}
LAWS |= {"negative-binomial": NegativeBinomial(0.7)}
CLOSED = ("beta=1.0", "beta=2.0")
"""Laws whose unstored zeros add up in a closed form."""

CASES = [(law, "dense", "float32", "float32", False) for law in LAWS]
CASES += [(law, "dense", "float64", "float64", False) for law in ("beta=1.0", "beta=0.3")]
CASES += [("beta=1.0", "dense", kind, "float32", False) for kind in ("uint8", "int64")]
CASES += [("beta=2.0", "dense", kind, "float32", False) for kind in ("float64", "bool")]
CASES += [(law, "dense", "float32", "float32", True) for law in ("beta=1.0", "beta=0.3")]
CASES += [(law, "missing", "float32", "float32", False) for law in LAWS]
CASES += [(law, "zero", dtype, dtype, False) for law in CLOSED for dtype in TOLERANCE]
CASES += [(law, "zero", "float32", "float32", True) for law in CLOSED]
CASES += [("beta=0.5", "missing", "float32", "float32", True)]
CASES += [("beta=0.5", form, "float32", "float32", True, EVEN) for form in ("dense", "missing")]
CASES += [("beta=1.0", "zero", "float32", "float32", True, EVEN)]


def spelled(case):
    return "-".join(case[:4]) + "-weights" * case[4] + "-even" * len(case[5:])


SPELLED = {spelled(case): case for case in CASES}
QUICK = {f"{law}-missing-float32-float32" for law in ("beta=0.3", "beta=2.0")}
QUICK |= {"negative-binomial-dense-float32-float32", "beta=1.0-dense-float32-float32-weights"}
QUICK |= {"beta=2.0-zero-float32-float32", "beta=1.0-zero-float32-float32-weights"}
QUICK |= {"beta=1.0-zero-float32-float32-weights-even"}
"""Each form of blocks under two laws: closed sums, bare products, a power, and a dispersion."""
EACH = pytest.mark.parametrize("case", tiered(SPELLED, QUICK.__contains__))
OF_DENSE = [name for name, own in SPELLED.items() if own[1] == "dense"]
DENSE = pytest.mark.parametrize("case", tiered(OF_DENSE, QUICK.__contains__))


@cache
def problem_of(case):
    """Return a problem that several tests read and none changes."""
    return Problem(*SPELLED[case])


class Problem:
    """Blocks of a part, factors, and all that is known of their cells."""

    def __init__(self, law, form, values, dtype, weighed, grid=(ROWS, COLS, BLOCKS)):
        rng, (ROWS, COLS, BLOCKS) = np.random.default_rng(0), grid
        self.law, self.dtype = LAWS[law], np.dtype(dtype)
        shape = ROWS[-1], COLS[-1]
        self.W = (rng.gamma(2.0, size=(shape[0], K)) + 0.01).astype(dtype)
        self.H = (rng.gamma(2.0, size=(shape[1], K)) / (2 * K) + 0.01).astype(dtype)
        V = rng.poisson(rng.gamma(2.0, size=shape)).astype(float)
        V += 0.05 if law in ("beta=0.0", "beta=-1.0") else 0.0
        kind = np.dtype(values)
        V = V.astype(kind)
        if kind.kind == "f":
            V[rng.random(shape) < 0.1] = np.nan
        weights = rng.gamma(2.0, size=shape).astype(dtype) if weighed else None
        self.rows, self.cols = (
            Side(own[at].astype(np.int64), (own[at + 1] - own[at]).astype(np.int64), int(own[-1]))
            for own, at in zip((ROWS, COLS), map(np.array, zip(*BLOCKS, strict=True)), strict=True)
        )
        self.zeros = None if form == "dense" else form == "zero"
        stored = rng.random(shape) < 0.3
        if form != "dense":
            V[~stored] = 0.0 if self.zeros else np.nan
        if weighed and self.zeros:
            weights[~stored] = 1.0
        self.V = V.astype(float)
        self.spans = [(slice(ROWS[i], ROWS[i + 1]), slice(COLS[j], COLS[j + 1])) for i, j in BLOCKS]
        self.views = [
            dense(V, weights, rows, cols)
            if form == "dense"
            else sparse(V[rows, cols], stored[rows, cols], weights, rows, cols, self.zeros)
            for rows, cols in self.spans
        ]
        inside = np.zeros(shape, bool)
        for span in self.spans:
            inside[span] = True
        mu = np.maximum(self.W.astype(float) @ self.H.T.astype(float), FLOOR)
        entry, numbers = self.law.entry(polynomials), tuple(self.law.numbers)
        v = np.nan_to_num(self.V)
        w = np.vectorize(lambda v, mu: float(entry.weight(v, mu, *numbers)))(v, mu)
        self.terms = inside * (v + mu) * w * (1.0 if weights is None else weights)
        self.mu = mu

    def part(self, device):
        arrays = packed(self.views, self.rows, self.cols, self.dtype, device.pinned)
        there = {name: device.put(own) for name, own in arrays.items()}
        return Part(self.rows, self.cols, there, self.zeros)

    def put(self, device):
        return device.put(self.W), device.put(self.H)

    def bounds(self):
        """Sums of absolute terms times the other factor, one for each entry of W and H."""
        return self.terms @ self.H.astype(float), self.terms.T @ self.W.astype(float)

    def each(self, function):
        """Call a function with each block, its factors, and where these are."""
        for view, (rows, cols) in zip(self.views, self.spans, strict=True):
            function(view, (self.W[rows].copy(), self.H[cols].copy()), (rows, cols))


def dense(V, weights, rows, cols):
    own = None if weights is None else np.ascontiguousarray(weights[rows, cols])
    shape = rows.stop - rows.start, cols.stop - cols.start
    return BlockView(V, rows.start, cols.start, *shape, own)


def sparse(V, stored, weights, rows, cols, zeros):
    """Compressed rows of what is stored, observed zeros among it where others are missing."""
    block = compressed(np.where(stored, V, 0.0 if zeros else np.nan).astype(V.dtype), zeros)
    at = np.repeat(np.arange(block.m), np.diff(block.indptr)), block.indices
    return block._replace(weights=None if weights is None else weights[rows, cols][at])


def assert_close(found, wanted, bounds, dtype):
    assert found.dtype == wanted.dtype == dtype
    off = np.abs(found.astype(float) - wanted) / np.maximum(bounds, 1e-300)
    assert off.max() < TOLERANCE[dtype.name], off.max()


def gradients_here(problem, curved=False):
    """Gradients, and sums with those of curvatures, by blocks on a processor."""
    out = [np.zeros_like(own) for own in (problem.W, problem.H)]
    curvatures = [np.ones_like(own) for own in out] if curved else None

    def add(view, factors, spans):
        own = tuple(kept[span].copy() for kept, span in zip(curvatures or out, spans, strict=True))
        more = (own,) if curved else ()
        block = view, problem.law, factors, FLOOR
        found = blockwise.gradient(block, 2.5, Workspace(), *more)
        for n, span in enumerate(spans):
            out[n][span] = found[n]
            if curved:
                curvatures[n][span] = own[n]

    problem.each(add)
    return out, curvatures


@EACH
def test_gradients_are_those_of_each_block_and_curvatures_are_added(stand_in, case):
    problem = problem_of(case)
    part, factors = problem.part(stand_in), problem.put(stand_in)
    curvatures = tuple(stand_in.put(np.ones_like(own)) for own in (problem.W, problem.H))
    for more in ((), (curvatures,)):
        block = part, problem.law, factors, FLOOR
        found = blockwise.gradient(block, 2.5, Workspace(), *more)
        wanted, curved = gradients_here(problem, curved=bool(more))
        for own, exact, bounds in zip(found, wanted, problem.bounds(), strict=True):
            assert_close(stand_in.take(own), exact, 2.5 * bounds, problem.dtype)
    for own, exact, bounds in zip(curvatures, curved, problem.bounds(), strict=True):
        assert_close(stand_in.take(own), exact, 1.0 + bounds, problem.dtype)
        assert (stand_in.take(own) > 1.0).mean() > 0.7


@EACH
def test_multiplicative_updates_are_those_of_each_block(stand_in, case):
    problem = problem_of(case)
    part, factors = problem.part(stand_in), problem.put(stand_in)
    for factor, like in enumerate((problem.W, problem.H)):
        wanted = [np.zeros_like(like) for _ in range(2)]

        def add(view, factors, spans, factor=factor, wanted=wanted):
            own = tuple(total[spans[factor]].copy() for total in wanted)
            problems.multiplicative(view, problem.law, factor, factors, FLOOR, own, Workspace())
            for total, more in zip(wanted, own, strict=True):
                total[spans[factor]] = more

        problem.each(add)
        found = tuple(stand_in.zeros(like.shape, like.dtype) for _ in range(2))
        problems.multiplicative(part, problem.law, factor, factors, FLOOR, found, Workspace())
        for own, exact in zip(found, wanted, strict=True):
            assert_close(stand_in.take(own), exact, problem.bounds()[factor], problem.dtype)


def assert_slopes(device, problem, factor, law=None):
    """One side's gradient and the fits of its rows are those of each block."""
    law, like = law or problem.law, (problem.W, problem.H)[factor]
    by_column = bool(law.numbers) and np.ndim(law.numbers[0]) == 1
    out = np.full_like(like, 7.0), np.full(len(like), 3.0)
    mine, alone = tuple(map(device.put, out)), device.put(out[0])
    told = law.at(device.put(law.numbers[0]))[0] if by_column else law
    part, placed, work = problem.part(device), problem.put(device), Workspace()
    problems.slope(part, told, factor, placed, FLOOR, mine, work)
    problems.slope(part, told, factor, placed, FLOOR, (alone, None), work)
    np.testing.assert_array_equal(device.take(mine[0]), device.take(alone))

    def add(view, factors, spans):
        own = law.at(law.numbers[0][spans[1]])[0] if by_column else law
        sums = tuple(total[spans[factor]] for total in out)
        problems.slope(view, own, factor, factors, FLOOR, sums, work)

    problem.each(add)
    for found, exact in zip(map(device.take, mine), out, strict=True):
        off = np.abs(found.astype(float) - exact).max() / np.abs(exact).max()
        assert off < TOLERANCE[problem.dtype.name], off


SLOPED = [("beta=1.0", "dense"), ("beta=0.5", "dense"), ("beta=2.0", "dense")]
SLOPED += [("beta=1.0", "zero"), ("beta=2.0", "zero"), ("beta=1.0", "missing")]
SLOPED += [("beta=0.5", "missing")]


@pytest.mark.quick(
    "of0-float32-False",
    "of3-float64-False",
    "of4-float32-False",
    "of5-float64-True",
    "of6-float32-False",
)
@pairwise(of=SLOPED, dtype=list(TOLERANCE), weighed=[False, True])
def test_slopes_of_one_side_and_fits_of_its_rows(stand_in, of, dtype, weighed, monkeypatch):
    """Dense blocks also in tiles of a few lines: fits of columns are added up over these."""
    law, form = of
    problem = Problem(law, form, dtype, dtype, weighed)
    for tile in (2**30, 600) if form == "dense" else (2**30,):
        monkeypatch.setattr(blocks, "TILE_BYTES", tile)
        for factor in (0, 1):
            assert_slopes(stand_in, problem, factor)


@pytest.mark.quick("missing-float32", "dense-float64")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["dense", "missing"])
def test_slopes_where_every_column_has_its_own_dispersion(stand_in, form, dtype):
    problem, law = Problem("negative-binomial", form, dtype, dtype, False), NegativeBinomial
    for factor in (0, 1):
        assert_slopes(stand_in, problem, factor, law(np.linspace(0.1, 3.0, COLS[-1])))


@pytest.mark.parametrize("form", ["dense", "zero"])
def test_a_share_counts_for_slopes_and_fits(stand_in, form):
    problem = Problem("beta=1.0", form, "float64", "float64", False)
    for factor in (0, 1):
        assert_slopes(stand_in, problem, factor, problem.law.shared(0.25))


def cells_of(problem, count):
    """Some cells of each block, by where they are in it, and running moments of their means."""
    rng, found = np.random.default_rng(4), []
    for rows, cols in problem.spans:
        m, n = rows.stop - rows.start, cols.stop - cols.start
        at = np.unique(rng.integers(0, m * n, 6))
        mean, m2 = (rng.gamma(2.0, size=at.size).astype(problem.dtype) for _ in range(2))
        found.append(((at // n).astype(np.int32), (at % n).astype(np.int32), mean, m2, count))
    return found


@EACH
def test_fits_and_monitored_cells_are_those_of_each_block(stand_in, case):
    problem, out, there = problem_of(case), np.array([3.0, 5.0]), np.array([3.0, 5.0])
    cells, wanted = cells_of(problem, 4), []
    given = iter(cells)

    def add(view, factors, spans):
        rows, cols, mean, m2, count = next(given)
        own = (rows, cols), mean.copy(), m2.copy(), count
        problems.evaluate(view, problem.law, factors, FLOOR, out, own, Workspace())
        wanted.append(own[1:3])

    problem.each(add)
    put = stand_in.put
    at = tuple(
        put(np.concatenate([own[n] + span[n].start for own, span in places]).astype(np.int64))
        for n, places in enumerate([list(zip(cells, problem.spans, strict=True))] * 2)
    )
    mean, m2 = (put(np.concatenate([own[n] for own in cells])) for n in (2, 3))
    told = problem.put(stand_in), FLOOR, there, (at, mean, m2, 4), Workspace()
    problems.evaluate(problem.part(stand_in), problem.law, *told)
    inside = problem.terms > 0
    deviance = np.abs(problem.law.deviance(problem.V, problem.mu))[inside]
    bound = np.nansum(deviance) + (problem.terms * problem.mu).sum()
    assert np.abs(there - out).max() < TOLERANCE[problem.dtype.name] * bound
    assert np.abs(there - [3.0, 5.0]).min() > 1.0
    for own, exact in zip((mean, m2), zip(*wanted, strict=True), strict=True):
        tolerance = 10 * TOLERANCE[problem.dtype.name]
        np.testing.assert_allclose(stand_in.take(own), np.concatenate(exact), rtol=tolerance)


def test_fits_without_cells_are_the_same(stand_in):
    problem, sums = Problem(*CASES[1]), []
    for cells in (None, cells_of(problem, 4)[0]):
        out = np.zeros(2)
        if cells is not None:
            put = stand_in.put
            at = tuple(put(own.astype(np.int64)) for own in cells[:2])
            cells = at, put(cells[2]), put(cells[3]), 4
        told = problem.put(stand_in), FLOOR, out, cells, Workspace()
        problems.evaluate(problem.part(stand_in), problem.law, *told)
        sums.append(out)
    np.testing.assert_array_equal(*sums)


@DENSE
def test_tiles_of_few_rows_give_the_same_sums(stand_in, case, monkeypatch):
    problem, results = problem_of(case), []
    line = len(BLOCKS) * problem.cols.most * problem.dtype.itemsize
    for rows in (10**6, 7):
        monkeypatch.setattr(blocks, "TILE_BYTES", rows * line)
        part, factors, fit = problem.part(stand_in), problem.put(stand_in), np.zeros(2)
        curvatures = tuple(stand_in.zeros(own.shape, own.dtype) for own in factors)
        block = part, problem.law, factors, FLOOR
        found = blockwise.gradient(block, 2.5, Workspace(), curvatures)
        problems.evaluate(part, problem.law, factors, FLOOR, fit, None, Workspace())
        results.append([*map(stand_in.take, (*found, *curvatures)), fit])
    whole, tiled = results
    bounds = [2.5 * own for own in problem.bounds()] + list(problem.bounds())
    for own, exact, bound in zip(tiled, whole, bounds, strict=False):
        assert_close(own, exact, bound, problem.dtype)
    np.testing.assert_allclose(tiled[-1], whole[-1], rtol=TOLERANCE[problem.dtype.name])


@EACH
def test_sums_have_the_same_bits_every_time(stand_in, case):
    problem = problem_of(case)
    part = problem.part(stand_in)
    once, again = (
        blockwise.gradient((part, problem.law, problem.put(stand_in), FLOOR), 1.0, Workspace())
        for _ in range(2)
    )
    for one, other in zip(once, again, strict=True):
        np.testing.assert_array_equal(stand_in.take(one), stand_in.take(other))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["even", "zero", "nan"])
def test_shares_of_components_are_those_of_each_block(stand_in, dtype, kind):
    problem = Problem("beta=1.0", "dense", "float32", dtype, False)
    if kind == "zero":
        problem.W[ROWS[1] : ROWS[2]] = 0.0
    if kind == "nan":
        problem.W[ROWS[1] : ROWS[2]] = np.nan
    evenness = np.array([0.5, 1.0, 2.0]), 0.25
    wanted = [np.zeros(side.size, dtype) for side in (problem.rows, problem.cols)]
    for b, spans in enumerate(problem.spans):
        share = mean_share(problem.W[spans[0]], problem.H[spans[1]])
        wanted[0][spans[0]] = share * evenness[0][b]
        wanted[1][spans[1]] = share * 0.25
    part = problem.part(stand_in)
    found = blockwise.mean_shares(problem.put(stand_in), evenness, lambda: part)
    for own, exact in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(stand_in.take(own), exact)


def test_a_diverged_factor_shows_in_gradients(stand_in):
    for case in (CASES[1], ("beta=1.0", "zero", "float32", "float32", False)):
        problem = Problem(*case)
        problem.W[20, 3] = np.nan
        block = problem.part(stand_in), problem.law, problem.put(stand_in), FLOOR
        found = stand_in.take(blockwise.gradient(block, 1.0, Workspace())[0])
        assert np.isnan(found[20]).all()
        assert np.isfinite(np.delete(found, 20, axis=0)).all() or case[1] != "dense"


# -- entries that are drawn ----------------------------------------------------------------

KEY, ITERATION, NUMBERS = np.array([3, 5], np.uint32), 11, np.array([2, 3, 7])
COUNTS = np.array([200, 0, 91])
"""Draws of three blocks, more than one of them has cells."""
FORMS = ["dense", "missing", "zero"]


def each_drawn(problem):
    """Blocks that entries are drawn of, with their spans and what is drawn."""
    for view, spans, count, number in zip(
        problem.views, problem.spans, COUNTS.tolist(), NUMBERS.tolist(), strict=True
    ):
        if count:
            yield view, spans, (count, block_address(KEY, ITERATION, number))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_drawn_entries_are_those_of_each_block(stand_in, form, weighed):
    problem = Problem("beta=1.0", form, "float32", "float32", weighed)
    part, found = problem.part(stand_in), []
    drawn = blocks._drawn(part, problem.dtype, COUNTS, block_address(KEY, ITERATION, NUMBERS))
    got = {name: stand_in.take(own) for name, own in drawn.arrays.items()}
    for view, spans, draws in each_drawn(problem):
        for rows, cols, values, weights in drawn_entries(view, *draws):
            first = rows + spans[0].start, cols + spans[1].start, values.copy()
            found.append((*first, weights.copy() if weighed else np.ones(len(values))))
    rows, cols, values, weights = map(np.concatenate, zip(*found, strict=True))
    order = np.argsort(rows, kind="stable")
    turned = np.argsort(cols[order], kind="stable")
    by_row, by_column = (
        np.repeat(np.arange(side.size), np.diff(got[name]))
        for side, name in ((part.rows, "indptr"), (part.cols, "starts"))
    )
    for own, wanted in (
        *((by_row, rows[order]), (by_column, cols[order][turned]), (got["cols"], cols[order])),
        *((got["places"], turned), (got["rows"], rows[order][turned])),
        (got["values"], values[order].astype(np.float32)),
        (got.get("weights"), weights[order].astype(np.float32) if weighed else None),
    ):
        np.testing.assert_array_equal(own, wanted)


@pairwise(form=FORMS, weighed=[False, True], curved=[False, True])
def test_what_drawn_entries_add(stand_in, form, weighed, curved):
    problem = Problem("beta=1.0", form, "float64", "float64", weighed)
    factors = problem.W, problem.H
    sums = [np.full_like(own, 7.0) for own in (*factors, *factors)]
    put = [stand_in.put(own) for own in sums]
    draws = COUNTS, block_address(KEY, ITERATION, NUMBERS)
    more = ((put[2], put[3]), 0.3) if curved else None
    block = problem.part(stand_in), problem.law, problem.put(stand_in), FLOOR
    blockwise.add_subsample(block, draws, 1.5, tuple(put[:2]), more)
    for view, spans, draw in each_drawn(problem):
        own = [array[span] for array, span in zip(sums, spans * 2, strict=True)]
        pair = tuple(array[span] for array, span in zip(factors, spans, strict=True))
        gathered = ((own[2], own[3]), 0.3) if curved else None
        block = view, problem.law, pair, FLOOR
        subsample.add_subsample(block, draw, 1.5, (own[0], own[1]), gathered)
    for ours, theirs in zip(put, sums, strict=True):
        np.testing.assert_allclose(stand_in.take(ours), theirs, rtol=1e-12, atol=1e-12)
