"""The kernel of Pólya urns against plain loops, and its bits against its own other ways."""

import numpy as np
import pytest
from scipy import stats

from daskfactor.allocation.batches import make_key, stretch_edges
from daskfactor.kernels.philox import philox4x32
from daskfactor.kernels.resampling import ORDERS, PURPOSES, STATES, shuffle_orders
from daskfactor.kernels.urns import CHUNK, LANES, fill_uniforms
from daskfactor.models.allocation import AllocationModel
from daskfactor.random import Stream, generator
from tests.allocation.particles import batch_of, compiled_of, crowded, plan_of, problems, walk

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)


PROBLEMS = problems(600)
IDS = [name for name, *_ in PROBLEMS]


def test_uniforms_are_philox_words():
    out = np.empty(6)
    fill_uniforms(out, 3, 5, 7, 9, KEY)
    for pair in range(3):
        w = [int(word) for word in philox4x32(3 + pair, 5, 7, 9, int(KEY[0]), int(KEY[1]))]
        for half in range(2):
            bits = (w[2 * half] << 32 | w[2 * half + 1]) >> 11
            assert out[2 * pair + half] == bits / 2**53
    assert fill_uniforms(out, 2**32 - 1, 0, 0, 0, KEY) is None


def test_uniforms_are_uniform():
    out = np.empty(100_000)
    fill_uniforms(out, 0, 1, 2, 3, KEY)
    assert stats.kstest(out, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 5 / np.sqrt(out.size)


def uniforms_of(tokens, particle, batch, purpose, seed=1):
    out = np.empty(tokens + tokens % 2)
    fill_uniforms(out, 0, particle, batch, purpose, make_key(seed))
    return out[:tokens]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("_", "model", "X"), PROBLEMS, ids=IDS)
def test_plain_loops(_, model, X, own):
    """Same uniforms, same allocations; particles of two turns, light and dense rows."""
    compiled = compiled_of(X, model)
    P, batch = LANES + 1, 3
    found = batch_of(plan_of(compiled, P, own=own, keep=True, resampling=None), batch)
    tokens = np.repeat(np.arange(len(compiled.values), dtype=np.int32), compiled.values)
    orders = np.tile(generator(1, batch, Stream.SCHEDULE, 0).permutation(tokens), (P, 1))
    if own:
        orders = np.tile(tokens, (P, 1))
        scratch = np.empty(len(tokens) + len(tokens) % 2)
        shuffle_orders(orders, batch, 0, make_key(1), scratch)
    placement = plan_of(compiled, P).placement
    for p in range(P):
        log_z, counts = walk(compiled, orders[p], uniforms_of(len(tokens), p, batch, STATES))
        assert found.counts is not None
        np.testing.assert_array_equal(found.counts[p], counts)
        assert found.log_weights[p] + placement.constant == pytest.approx(log_z, abs=1e-9)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("_", "model", "X"), PROBLEMS, ids=IDS)
def test_where_counts_are_kept_does_not_matter(_, model, X, own):
    compiled = compiled_of(X, model)
    settings = {"own": own, "keep": True, "least": 0.9}
    dense, light, mixed = (
        batch_of(plan_of(compiled, 9, limit, **settings)) for limit in (0, 10**6, 3)
    )
    for other in (light, mixed):
        assert other.log_z == dense.log_z
        for name in ("log_weights", "ess", "resampled", "counts"):
            np.testing.assert_array_equal(getattr(other, name), getattr(dense, name))
        np.testing.assert_allclose(other.mean_counts, dense.mean_counts, rtol=1e-12)


def test_states_beyond_a_byte():
    """Slots of two bytes."""
    compiled = compiled_of(crowded(80, 3), AllocationModel.nmf(300))
    plans = [plan_of(compiled, 6, limit, keep=True, least=0.9) for limit in (0, 10**6)]
    assert [j.placement.kind for j in plans] == [np.uint8, np.uint16]
    dense, light = (batch_of(plan) for plan in plans)
    np.testing.assert_array_equal(dense.counts, light.counts)
    assert dense.log_z == light.log_z


def test_rows_of_many_tokens():
    """Tables of two and four bytes."""
    for total, kind in ((200, np.uint8), (40_000, np.uint16), (100_000, np.uint32)):
        X = np.array([[total // 2, total // 4], [0, total // 4]])
        plan = plan_of(compiled_of(X, AllocationModel.nmf(2)), 2, keep=True)
        assert plan.placement.kind == kind
        found = batch_of(plan)
        assert found.counts is not None
        np.testing.assert_array_equal(found.counts[:, :2].sum(axis=1), total)


def test_particles_do_not_depend_on_their_number():
    compiled = compiled_of(crowded(600), AllocationModel.nmf(3))
    few, many = (batch_of(plan_of(compiled, P, resampling=None, keep=True)) for P in (3, 10))
    assert few.counts is not None
    assert many.counts is not None
    np.testing.assert_array_equal(few.counts, many.counts[:3])
    np.testing.assert_array_equal(few.log_weights, many.log_weights[:3])


def test_long_stretches():
    """Uniforms come in chunks; a stretch may be longer than one, and end anywhere."""
    X = crowded(256 * CHUNK + 777)
    compiled = compiled_of(X, AllocationModel.nmf(2))
    edges = stretch_edges(int(X.sum()))
    assert np.diff(edges).max() > CHUNK
    assert (edges[:-1] % 2 == 0).all()
    assert edges[-1] == X.sum()
    found = batch_of(plan_of(compiled, 1, resampling=None, keep=True))
    order = generator(1, 0, Stream.SCHEDULE, 0).permutation(
        np.repeat(np.arange(len(compiled.values), dtype=np.int32), compiled.values)
    )
    log_z, counts = walk(compiled, order, uniforms_of(len(order), 0, 0, STATES))
    assert found.counts is not None
    np.testing.assert_array_equal(found.counts[0], counts)
    assert found.log_z + plan_of(compiled, 1).placement.constant == pytest.approx(log_z, rel=1e-12)


def test_orders_are_permutations():
    orders = np.tile(np.arange(7, dtype=np.int32), (20_000, 1))
    shuffle_orders(orders, 3, PURPOSES, KEY, np.empty(8))
    assert (np.sort(orders, axis=1) == np.arange(7)).all()
    for place in range(7):
        count = np.bincount(orders[:, place], minlength=7)
        assert stats.chisquare(count).pvalue > 1e-4
    pairs = np.bincount(7 * orders[:, 0] + orders[:, 1], minlength=49).reshape(7, 7)
    assert stats.chisquare(pairs[~np.eye(7, dtype=bool)]).pvalue > 1e-4
    assert ORDERS not in (STATES,)
