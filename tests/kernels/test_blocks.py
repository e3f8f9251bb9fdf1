"""Kernels of dense and sparse blocks against their definition, and what one of them may get wrong.

A kernel is compiled for every law, kind of block, K and dtype: not every combination is tried.
Factors are float32 unless somebody asks for more, so all laws are tried in it.
"""

import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.kernels import blockwise, dense, sparse, views
from daskfactor.kernels.blockwise import SLAB, observed_values
from daskfactor.kernels.sparse import CHUNK
from daskfactor.kernels.views import BlockView, SparseBlock, Workspace
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels import problems, reference
from tests.kernels.problems import FLOOR, assert_close, everything, sparse_block, written_out
from tests.pairwise import pairwise
from tests.tiers import tiered

BETAS = (2.0, 1.0, 0.5, 0.0, -1.0, 0.3, 3.0)
K = 11
ZEROS = [(1.0, "zero"), (2.0, "zero")]
CHIEF = [(1.0, "dense"), (0.3, "dense"), (1.0, "missing"), *ZEROS]
CHIEF_RULES = pytest.mark.parametrize(("beta", "kind"), CHIEF)
SLOPES = {(0.5, "gaps"), (0.5, "missing"), *CHIEF} - {(0.3, "dense")}
"""Laws of which gradients of one side are compiled, too."""
SINGLE, DOUBLE = (np.float32, 1e-5), (np.float64, 1e-12)
CASES = [(beta, kind, *SINGLE) for beta in BETAS for kind in ("gaps", "missing")]
CASES += [(beta, "dense", *SINGLE) for beta in BETAS if beta > 0]
CASES += [(beta, "full", *SINGLE) for beta in BETAS]
CASES += [(*rule, *SINGLE) for rule in ZEROS] + [(*rule, *DOUBLE) for rule in CHIEF]


def is_quick(case):
    """Every law in one kind of blocks, and chief ones in all."""
    beta, kind, *real = case
    return (*real,) == DOUBLE or kind == "zero" or (kind == "missing") == (beta in (0.5, 0.3, -1.0))


EACH = pytest.mark.parametrize(("beta", "kind", "dtype", "tolerance"), tiered(CASES, is_quick))


def block_of(kind, dtype=np.float32, m=53, n=31, **options):
    """Sparse beside what is missing or zeros, or dense: with zeros and gaps, with gaps, or full."""
    if kind == "full":
        options["density"] = 1.1
    block = sparse_block(dtype, m, n, kind in ("dense", "zero"), **options)
    return block if kind in ("missing", "zero") else problems.dense_view(block, dtype)


def problem(kind, dtype=np.float32, m=20, n=10, components=K, **options):
    return block_of(kind, dtype, m, n, **options), *problems.factor_pair(dtype, m, n, components)


def check(block, W, H, beta, tolerance, **options):
    """All that kernels give is what the definition says."""
    told = {name: own for name, own in options.items() if name in ("scale", "floor")}
    wanted = reference.everything(written_out(block), W, H, beta, **told)
    assert_close(everything(block, Tweedie(beta), W, H, **options), wanted, tolerance)


def gradients(block, W, H, beta=1.0):
    """What one of the kernels gives, where others need not be compiled."""
    found = blockwise.gradient((block, Tweedie(beta), (W, H), FLOOR), 1.7, Workspace())
    return {f"gradient {side}": own.copy() for side, own in zip("WH", found, strict=True)}


def tiles_of(patch, rows):
    """Have dense blocks visited a few rows at a time."""
    if rows is not None:
        patch.setattr(views, "tile_rows", lambda m, *_: min(m, rows))


@EACH
def test_kernels_equal_their_twins(beta, kind, dtype, tolerance, monkeypatch):
    tiles_of(monkeypatch, 16)
    block, *factors = problem(kind, dtype, 53, 31)
    assert kind not in ("missing", "zero") or block.values.size > CHUNK
    check(block, *factors, beta, tolerance, slopes=(beta, kind) in SLOPES, cells=True)


@pairwise(
    real=[SINGLE, DOUBLE],
    shape=[(1, 1, 1), (1, 9, 2), (9, 1, 4), (7, 5, 3), (5, 7, 20), (130, 3, 1), (700, 40, 3)],
    tile=[1, 4, None],
    kind=["dense", "full"],
)
def test_odd_shapes_of_dense_blocks(real, shape, tile, kind, monkeypatch):
    (dtype, tolerance), m = real, shape[0]
    tiles_of(monkeypatch, tile)
    check(*problem(kind, dtype, *shape), 1.0, tolerance, slopes=True, cells=True)
    corner = BlockView(written_out(block_of(kind, dtype, *shape[:2]), dtype), 0, 0, m, shape[1])
    check(corner, *problems.factor_pair(dtype, *shape), 1.0, tolerance)


@pytest.mark.parametrize("beta", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("rows", [16, None])
def test_what_updates_divide_by_in_a_complete_block_has_a_closed_form(beta, rows, monkeypatch):
    tiles_of(monkeypatch, rows)
    block, *factors = problem("full", np.float64, 53, 31)
    factors = tuple(factors)
    for factor, theta in enumerate(factors):
        sums = {known: (np.zeros_like(theta), np.zeros_like(theta)) for known in (False, True)}
        for known, out in sums.items():
            view, work = block._replace(complete=known), Workspace()
            problems.multiplicative(view, Tweedie(beta), factor, factors, FLOOR, out, work)
        for one, other in zip(*sums.values(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13)


@CHIEF_RULES
@settings(max_examples=30, deadline=None)
@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    tile=st.integers(1, 45),
    density=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    held_out=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_any_block(beta, kind, size, tile, density, held_out, seed):
    """Rows and columns without an entry, blocks without any, and full ones."""
    made = {"density": density, "held_out": held_out, "seed": seed}
    with pytest.MonkeyPatch.context() as patch:
        tiles_of(patch, tile)
        check(*problem(kind, np.float64, *size, **made), beta, 1e-11)


@pytest.mark.parametrize("components", [1, 8, 17, 64, 300])
def test_any_number_of_components_of_sparse_blocks(components):
    block, W, H = problem("missing", m=40, n=23, components=components)
    wanted = reference.everything(written_out(block), W, H, 1.0)
    assert_close(gradients(block, W, H), wanted, 1e-5)


@EACH
def test_a_block_without_entries_adds_nothing(beta, kind, dtype, tolerance):
    """Stored and missing, or not stored; zeros' part is taken back everywhere."""
    options = {"held_out": 1.1, "density": 1.1 if kind in ("dense", "zero") else 0.0}
    block, W, H = problem(kind, dtype, 9, 7, **options)
    if kind == "full":
        block.block[:] = np.nan
    size = np.abs(W @ (H.T @ H)).max()
    for name, own in everything(block, Tweedie(beta), W, H).items():
        np.testing.assert_allclose(own, 0 if "gradient" in name else 7, atol=tolerance * size)
    if kind == "zero":
        check(sparse_block(dtype, 9, 7, True, density=0.0), W, H, beta, tolerance)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_missing_values_that_slipped_through(beta):
    """Stored NaN where unstored entries are missing anyway: nothing, not NaN everywhere."""
    block, *factors = problem("missing")
    block.values[::3] = np.nan
    check(block, *factors, beta, 1e-5)


def test_types_of_indices_and_data_do_not_matter():
    block, W, H = problem("missing", m=30)
    wide = {"indptr": block.indptr.astype(np.int64), "indices": block.indices.astype(np.int32)}
    wide = block._replace(**wide)
    whole = np.rint(written_out(sparse_block(np.float32, 30, 10, True, held_out=0.0)))
    dense = [BlockView(whole.astype(dtype), 0, 0, 30, 10) for dtype in (np.int64, np.float32)]
    for pair in ((block, wide), dense):
        one, other = (gradients(own, W, H) for own in pair)
        for name, own in one.items():
            np.testing.assert_array_equal(own, other[name])


def test_the_last_column_of_a_block_as_wide_as_uint16_goes():
    n = 65536
    indptr, indices = np.array([0, 2], np.int32), np.array([0, n - 1], np.uint16)
    block = SparseBlock(indptr, indices, np.array([1.0, 2.0], np.float32), 1, n, False)
    W, H = np.ones((1, K), np.float32), np.ones((n, K), np.float32)
    GH = gradients(block, W, H, 2.0)["gradient H"]
    expected = np.zeros_like(GH)
    expected[0], expected[-1] = 1.7 * (1 - K), 1.7 * (2 - K)
    np.testing.assert_allclose(GH, expected, rtol=1e-6)


def shifted(array, offset):
    """A copy of an array that starts ``offset`` bytes beyond a cache line."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    result = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def test_bits_of_sparse_blocks_depend_on_the_content_alone():
    block, W, H = problem("zero", m=64, n=37)
    results = []
    for offset in (0, 0, 4, 20):
        moved = block._replace(values=shifted(block.values, offset))
        results.append(everything(moved, Tweedie(1.0), shifted(W, offset), shifted(H, offset)))
    for other in results[1:]:
        for name, own in results[0].items():
            np.testing.assert_array_equal(own, other[name])


@CHIEF_RULES
def test_gradient_is_the_slope_of_the_log_likelihood(beta, kind):
    block, W, H = problem(kind, np.float64, 6, 5, density=0.7)
    found, width = everything(block, Tweedie(beta), W, H, scale=1.0), 1e-5
    for factor, gradient in ((W, found["gradient W"]), (H, found["gradient H"])):
        fits = []
        for sign in (1, -1):
            factor[2, 1] += sign * width
            fits.append(everything(block, Tweedie(beta), W, H)["fit"][0])
            factor[2, 1] -= sign * width
        np.testing.assert_allclose((fits[0] - fits[1]) / (2 * width), gradient[2, 1], rtol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "missing"])
def test_means_below_the_floor(kind):
    """Floored where entries are stored, but for monitored means; the data of beta = 1 need it."""
    block, W, H = problem(kind, m=12, n=9)
    W[0] = W[3] = 0
    W[4] = 1e-42  # denormal
    check(block, W, H, 1.0, 1e-5, cells=True)
    assert np.isfinite(everything(block, Tweedie(1.0), W, H)["fit"]).all()


def test_no_floor_for_real_valued_factors():
    block, W, H = problem("missing", m=12, n=9)
    check(block, W - W.mean(), H, 2.0, 1e-5, floor=-np.inf)


@CHIEF_RULES
def test_a_diverged_factor_shows(beta, kind):
    block, W, H = problem(kind)
    W[4, 1] = np.nan
    found = everything(block, Tweedie(beta), W, H)
    assert np.isnan(found["gradient W"]).any() or np.isnan(found["gradient H"]).any()
    assert np.isnan(found["gradient W"][4]).all() or kind != "dense"
    assert np.isnan(found["fit"]).all()


@pytest.mark.parametrize("kind", ["dense", "missing"])
def test_read_only_data(kind):
    block, *factors = problem(kind)
    for part in (block.array,) if kind == "dense" else block[:3]:
        part.flags.writeable = False
    wanted = reference.everything(written_out(block), *factors, 1.0)
    assert_close(gradients(block, *factors), wanted, 1e-5)


@pytest.mark.parametrize("kind", ["dense", "zero"])
def test_threads_do_not_share_scratch(kind):
    problems = [problem(kind, m=200, n=40, seed=seed) for seed in range(4)]
    alone = [everything(block, Tweedie(1.0), *factors) for block, *factors in problems]

    def work(block, W, H):
        return [everything(block, Tweedie(1.0), W, H) for _ in range(15)]

    with ThreadPoolExecutor(len(problems)) as pool:
        together = pool.map(work, *zip(*problems, strict=True))
    for wanted, results in zip(alone, together, strict=True):
        for found in results:
            assert_close(found, wanted, 1e-5 if kind == "dense" else 0.0)


def test_kernels_are_made_once():
    what, whole = ("score", None, False), (Tweedie(1), Tweedie(1.0))
    assert len({dense.accumulation(law, *what) for law in whole}) == 1
    assert len({sparse.accumulation(law, False, 2, 5, False, *what) for law in whole}) == 1


@pairwise(
    beta=BETAS,
    real=[(np.float32, 2e-6), (np.float64, 1e-13)],
    distance=[-1.0, 0.0, 1e-3, 0.02, 0.05, 0.3, 0.5, 1.0, 30.0],
)
def test_deviance_has_no_cancellation(beta, real, distance):
    """One row, K = 1: mu is exactly W; the twin computes in extended precision."""
    (dtype, tolerance), out = real, np.zeros(2)
    distance = max(distance, -0.5) if beta <= 0 else distance  # no zeros
    mu = np.array([[0.37, 1.0, 250.0]]).astype(dtype)
    v = (mu.astype(float) * (1 + distance)).astype(dtype)
    view, factors = BlockView(v, 0, 0, 1, 3), (np.ones((1, 1), dtype), mu.T.copy())
    problems.evaluate(view, Tweedie(beta), factors, FLOOR, out, None, Workspace())
    exact = reference.deviance(v, mu, beta).sum()
    slack = np.finfo(np.longdouble).eps * 1e3 * float(np.abs(v).max() ** max(beta, 1))
    assert abs(-out[0] - exact) <= max(tolerance * exact, slack)


def test_buffers_of_a_workspace_serve_both_kinds_in_turn():
    (block, W, H), law, work = problem("zero", m=150, n=90), Tweedie(1.0), Workspace()
    first = blockwise.gradient((block, law, (W, H), FLOOR), 1.0, work)
    kept = [own.copy() for own in first]
    view = problems.dense_view(block, np.float32)
    blockwise.gradient((view, law, (W, H), FLOOR), 1.0, work)
    again = blockwise.gradient((block, law, (W, H), FLOOR), 1.0, work)
    assert again[0].dtype == W.dtype
    for one, other, wanted in zip(first, again, kept, strict=True):
        assert np.shares_memory(one, other)
        np.testing.assert_array_equal(other, wanted)


@pytest.mark.parametrize("kind", ["dense", "zero"])
def test_a_share_multiplies_what_a_block_adds(kind):
    """Gradients, curvatures, both sides' updates and slopes with their fits: 0.3 of all of them."""
    block, W, H = problem(kind, m=53, n=31)
    own, whole = (
        everything(block, law, W, H, start=0.0, slopes=True)
        for law in (Tweedie(1.0).shared(0.3), Tweedie(1.0))
    )
    del own["fit"]
    assert all(np.abs(whole[name]).max() > 1 for name in own)
    assert_close({name: each / 0.3 for name, each in own.items()}, whole, 1e-5)


@pytest.mark.parametrize(("beta", "kind"), [(1.0, "missing"), *ZEROS])
def test_memory_grows_with_rows_and_columns_only(beta, kind):
    m = n = 20_000
    rng = np.random.default_rng(0)
    indptr = np.minimum(np.arange(m + 1), 1000).astype(np.int32)
    values = rng.gamma(2.0, size=1000).astype(np.float32)
    indices = rng.integers(0, n, 1000).astype(np.uint16)
    block = SparseBlock(indptr, indices, values, m, n, kind == "zero")
    W, H = problems.factor_pair(np.float32, m, n, K)
    everything(*problem(kind, m=5, n=5)[:1], Tweedie(beta), W[:5], H[:5])  # compiles
    tracemalloc.start()
    everything(block, Tweedie(beta), W, H)
    assert sum(own[2] for own in observed_values(block)) == (kind == "zero") * (m * n - 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Arrays of a dozen results; a tile of one row in ten would be 160 MB.
    assert peak < 20 * (W.nbytes + H.nbytes) + 30e6


@pytest.mark.parametrize("kind", ["missing", "zero"])
def test_observed_values(kind):
    block = sparse_block(np.float32, 150, 90, kind == "zero")
    values, _, unstored, columns = zip(*observed_values(block, by_column=True), strict=True)
    found, expected = np.concatenate(values), written_out(block)
    assert found.dtype == np.float64
    totals = np.bincount(np.concatenate(columns), found, expected.shape[1])
    np.testing.assert_allclose(totals, np.nansum(expected, axis=0))
    assert found.size + sum(unstored) == np.count_nonzero(~np.isnan(expected))
    assert not any(np.isnan(part).any() for part in values)


def test_observed_values_of_a_dense_block_in_slabs():
    array = np.arange(2.0 * SLAB).reshape(4, -1)
    array[1, 5] = np.nan
    slabs = list(observed_values(BlockView(array, 1, 0, 3, array.shape[1]), by_column=True))
    assert [values.size for values, *_ in slabs] == [SLAB - 1, SLAB // 2]
    assert all(zeros == 0 for _, _, zeros, _ in slabs)
    assert [columns[0] for *_, columns in slabs] == [0, 0]
    expected = array[1:][~np.isnan(array[1:])]
    np.testing.assert_array_equal(np.concatenate([values for values, *_ in slabs]), expected)


def test_index_types():
    assert views.index_type(65536) == np.uint16
    assert views.index_type(65537) == views.pointer_type(2**31 - 1) == np.int32
    assert views.pointer_type(2**31) == np.int64


# -- workspaces ----------------------------------------------------------------------------


@given(
    m=st.integers(1, 10_000),
    n=st.integers(1, 200_000),
    K=st.integers(1, 500),
    itemsize=st.sampled_from([4, 8]),
)
def test_tile_rows(m, n, K, itemsize):
    rows = views.tile_rows(m, n, K, itemsize)
    assert 1 <= rows <= min(m, 512)
    assert rows * n * itemsize <= max(views.TILE_BYTES, 16 * n * itemsize)
    if 48 * n * K <= views.UNPACKED_TERMS:
        assert rows * n * K <= views.UNPACKED_TERMS


def buffers(workspace, m, n, K, dtype=np.float32):
    tiles, gradients = workspace.tiles(m, n, K, dtype), workspace.gradients((m, n), K, dtype)
    return [*tiles, *gradients, *workspace.sums(2, K, 3, dtype)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shapes_and_dtype_of_buffers(dtype):
    found = buffers(Workspace(), 30, 20, 4, dtype)
    shapes = [(30, 20), (30, 20), (2, 20), (30, 4), (20, 4), (3, 4), (4, 4), (2, 4, 4), (64, 4)]
    assert [b.shape for b in found] == shapes
    assert [b.dtype for b in found] == [dtype] * 7 + [np.float64] * 2
    assert all(b.flags.c_contiguous and b.ctypes.data % 64 == 0 for b in found)


def test_memory_is_reused_and_grows_once():
    workspace = Workspace()
    shapes = (300, 200), (30, 20), (300, 200)
    large, small, again = (buffers(workspace, *shape, 16) for shape in shapes)
    for a, b, c in zip(large, small, again, strict=True):
        assert np.shares_memory(a, b)
        assert np.shares_memory(a, c)
    for one, other in itertools.combinations(large, 2):
        assert not np.shares_memory(one, other)


def test_another_dtype_starts_new_buffers():
    workspace = Workspace()
    one, _ = workspace.gradients((30, 20), 4, np.float32)
    other, _ = workspace.gradients((30, 20), 4, np.float64)
    assert other.dtype == np.float64
    assert not np.shares_memory(one, other)
