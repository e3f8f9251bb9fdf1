"""Kernels of urns against plain loops, and their bits against other ways to the same ones."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from daskfactor.allocation import batches, placement, resampling
from daskfactor.allocation.batches import complete_network, run_batch, stretch_edges
from daskfactor.allocation.model import AllocationModel
from daskfactor.allocation.placement import place_counts
from daskfactor.allocation.resampling import MOVES, OFFSPRING, PURPOSES, SCHEMES, STATES, SWEEP
from daskfactor.allocation.urns import CHUNK, LANES, Particles, fill_uniforms, visit
from daskfactor.kernels.philox import philox4x32
from daskfactor.kernels.views import Workspace
from daskfactor.random import Stream, generator
from tests.allocation.cases import CASES, TOY, log_f, tensor
from tests.allocation.particles import (
    add,
    batch_of,
    compiled_of,
    crowded,
    plan_of,
    predictive,
    problems,
    walk,
)

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)


PROBLEMS = [
    *problems(40),
    ("tucker, larger", AllocationModel.tucker((2, 2, 2)), tensor((2, 2, 3), 5, 14)),
]
IDS = [name for name, *_ in PROBLEMS]
STILL = problems(600)
"""Of particles that do not move."""
PLAIN = {
    *("cp", "symmetric", "topics", "tables without hidden variables", "many components"),
    *("order 4", "one row", "symmetric, larger"),
}
ALIKE = {"one component", "tucker", "tables without hidden variables"}  # while tokens are few
ALMOST = 1 - 1e-6  # resamples whenever weights differ


def moving_plan(compiled, particles, moves=1, **changes):
    return plan_of(compiled, particles, moves=moves, **changes)


def moved(plan, batch=0):
    return run_batch(plan, batch, Workspace())


def uniforms(count, particle, batch, tag, seed=1):
    out = np.empty(count + count % 2)
    fill_uniforms(out, 0, particle, batch, tag, batches.make_key(seed))
    return out[:count]


def tokens_of(compiled):
    return np.repeat(np.arange(len(compiled.values), dtype=np.int32), compiled.values)


class Reference:
    """A batch by plain loops, from the definition."""

    def __init__(self, compiled, plan, batch):
        self.compiled, self.plan, self.batch = compiled, plan, batch
        P, T = plan.particles, compiled.total
        tokens = tokens_of(compiled)
        shared = generator(1, batch, Stream.SCHEDULE, plan.round).permutation(tokens)
        self.orders = np.tile(shared, (P, 1))
        self.tag = PURPOSES * plan.round
        if plan.separate_orders:
            self.orders = np.tile(tokens, (P, 1))
            key = batches.make_key(1)
            resampling.shuffle_orders(self.orders, batch, self.tag, key, np.empty(T + T % 2))
        self.C, self.D = np.zeros((P, compiled.cells), int), np.zeros((P, compiled.totals), int)
        self.z = np.zeros((P, T), int)
        self.logs, self.level, self.resampled = np.zeros(P), 0.0, 0
        self.known = plan.placement.constant - compiled.log_factor - compiled.constant

    def draw(self, p, t, uniform):
        m = self.orders[p, t]
        running = np.cumsum(predictive(self.compiled, m, self.C[p], self.D[p]))
        h = int(np.searchsorted(running[:-1], uniform * running[-1], side="right"))
        self.z[p, t] = h
        add(self.compiled, m, h, self.C[p], self.D[p])
        return math.log(running[-1])

    def sweep(self, tokens, number):
        for p in range(len(self.z)):
            tag = self.tag + MOVES + SWEEP * number
            for t, u in enumerate(uniforms(tokens, p, self.batch, tag)):
                add(self.compiled, self.orders[p, t], self.z[p, t], self.C[p], self.D[p], -1)
                self.draw(p, t, u)

    def resample(self, e):
        """By the weights of the particles, whose factors that never vary are still in."""
        plan, P = self.plan, len(self.z)
        weights = np.exp(self.logs - self.logs.max())
        mean, weights = weights.mean(), weights / weights.sum()
        if plan.resampling is None or 1 / (weights**2).sum() >= plan.least * P:
            return
        self.level += self.logs.max() + math.log(mean)
        offspring, parents = np.empty(P, np.int64), np.empty(P, np.int64)
        draws = uniforms(P, e, self.batch, self.tag + OFFSPRING)
        resampling.count_offspring(SCHEMES[plan.resampling], weights, draws, offspring)
        resampling.choose_parents(offspring, parents)
        for array in (self.C, self.D, self.z, self.orders):
            array[:] = array[parents]
        self.logs[:] = 0
        self.resampled += 1

    def run(self):
        edges, scale = self.plan.edges, np.log(self.compiled.values)
        moves, last = self.plan.moves, 0
        P = range(len(self.z))
        draws = [uniforms(self.compiled.total, p, self.batch, self.tag + STATES) for p in P]
        for e in range(len(edges) - 1):
            for p in P:
                for t in range(edges[e], edges[e + 1]):
                    log_u = self.draw(p, t, draws[p][t])
                    self.logs[p] += log_u - scale[self.orders[p, t]]
                    self.logs[p] -= log_known(self.compiled, self.orders[p], t)
            if edges[e + 1] == self.compiled.total:
                break
            self.resample(e)
            if moves and edges[e + 1] >= (1 + batches.GROWTH) * last:
                last = edges[e + 1]
                for s in range(moves):
                    self.sweep(last, e * moves + s + 1)
        return self


def log_known(compiled, order, t):
    """Log of what draws into urns that no hidden state changes add to token t."""
    found = 0.0
    for above in (True, False):
        rows = compiled.row if above else compiled.total_row
        columns = compiled.column if above else compiled.total_column
        alphas = compiled.alpha if above else compiled.alpha_total
        fixed = (columns == columns[:, :1]).all(axis=1)
        balls = {}
        for s in range(t + 1):
            for n in range(len(alphas)):
                if not fixed[compiled.group == compiled.group[n]].all():
                    continue
                place = rows[order[s], n] + columns[n, 0]
                if s == t:
                    log_factor = math.log(alphas[n] + balls.get(place, 0))
                    found += log_factor if above else -log_factor
                balls[place] = balls.get(place, 0) + 1
    return found


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("name", "model", "X"), PROBLEMS, ids=IDS)
def test_plain_loops(name, model, X, own):
    """Same uniforms, same allocations, before and after moves; particles of two turns."""
    compiled = compiled_of(X, model)
    P, batch, moves = LANES + 1, 3, 2
    plan = moving_plan(compiled, P, moves, separate_orders=own, unfold=True, least=ALMOST)
    assert (complete_network(plan.placement, True)[0].value.size > 0) == (name in PLAIN)
    found = moved(plan, batch)
    expected = Reference(compiled, plan, batch).run()
    np.testing.assert_array_equal(found.counts, expected.C)
    np.testing.assert_allclose(found.log_weights, expected.level + expected.logs, atol=1e-9)
    assert found.resampled.sum() == expected.resampled
    assert expected.resampled > 0 or name in ALIKE
    assert found.log_z == pytest.approx(np.logaddexp.reduce(found.log_weights) - math.log(P))
    weights = np.exp(found.log_weights - found.log_weights.max())
    means = weights / weights.sum() @ expected.C
    np.testing.assert_allclose(found.mean_counts, means, atol=1e-9)


def test_sweeps_longer_than_a_chunk():
    X = crowded(CHUNK + 45, 3, 4)
    compiled = compiled_of(X, AllocationModel.nmf(2))
    plan = moving_plan(compiled, 3, unfold=True, resampling="multinomial", least=ALMOST)
    found, expected = moved(plan), Reference(compiled, plan, 0).run()
    np.testing.assert_array_equal(found.counts, expected.C)
    assert found.resampled[plan.edges[1:] > CHUNK].any()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("name", "model", "X"), PROBLEMS, ids=IDS)
def test_without_resampling_nothing_moves(name, model, X, own):
    """Then particles are those that do not move: the same bits if they add up in one order."""
    compiled = compiled_of(X, model)
    plan = moving_plan(compiled, 9, separate_orders=own, unfold=True, resampling=None)
    found, other = moved(plan), moved(replace(plan, moves=0))
    np.testing.assert_array_equal(found.counts, other.counts)
    if "symmetric" in name:
        np.testing.assert_allclose(found.log_weights, other.log_weights, atol=1e-12)
    else:
        np.testing.assert_array_equal(found.log_weights, other.log_weights)
    np.testing.assert_allclose(found.mean_counts, other.mean_counts, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_fast_and_general_agree(name, monkeypatch):
    """Rows of a state by its tokens, rows that are counted, and counts that are looked up."""
    model, X = next(problem for other, *problem in PROBLEMS if other == name)
    compiled = compiled_of(X, model)
    fast = moved(moving_plan(compiled, 9, 2, unfold=True, least=ALMOST))
    monkeypatch.setattr(placement, "_is_simple", lambda *_: False)
    plan = moving_plan(compiled, 9, 2, unfold=True, least=ALMOST)
    followed = moved(plan)
    assert complete_network(plan.placement, True)[1]
    monkeypatch.setattr(batches, "_separate", lambda *_: False)
    assert complete_network(plan.placement, True)[0].value.size == 0
    for other in (followed, moved(replace(plan))):
        np.testing.assert_array_equal(fast.counts, other.counts)
        np.testing.assert_allclose(fast.log_weights, other.log_weights, atol=1e-11)
        np.testing.assert_array_equal(fast.resampled, other.resampled)
        np.testing.assert_allclose(fast.mean_counts, other.mean_counts, rtol=1e-11, atol=1e-12)


def test_pieces_of_work(monkeypatch):
    """A kernel that stops after every few tokens goes on as if it had not."""
    compiled = compiled_of(crowded(2 * CHUNK, 4), AllocationModel.nmf(3))
    plan = moving_plan(compiled, 2 * LANES + 1, 2, unfold=True)
    whole = moved(plan)
    assert whole.resampled.sum() > 3
    for work in (1.0, 5000.0):
        monkeypatch.setattr(batches, "WORK", work)
        np.testing.assert_equal(moved(plan), whole)


@pytest.mark.full
def test_states_beyond_a_byte():
    compiled = compiled_of(crowded(12, 5), AllocationModel.nmf(300))
    plan = moving_plan(compiled, 3, unfold=True, least=ALMOST)
    found, expected = moved(plan, 2), Reference(compiled, plan, 2).run()
    assert expected.resampled
    assert (expected.z > 255).any()
    np.testing.assert_array_equal(found.counts, expected.C)


def test_rounds_and_batches_differ():
    compiled = compiled_of(crowded(40, 6), AllocationModel.nmf(3))
    settings = [{"round": 0}, {"round": 1}, {"seed": 2}]
    found = [moved(moving_plan(compiled, 8, **changes)) for changes in settings]
    found.append(moved(moving_plan(compiled, 8), 1))
    assert len({one.log_z for one in found}) == 4


def posterior(compiled, order):
    """All states of tokens in an order, and their probabilities."""
    states = np.array(list(itertools.product(range(compiled.states), repeat=len(order))))
    logs = np.empty(len(states))
    for row, z in enumerate(states):
        C, D = np.zeros(compiled.cells, int), np.zeros(compiled.totals, int)
        for m, h in zip(order, z, strict=True):
            add(compiled, m, h, C, D)
        logs[row] = log_f(compiled, C)
    chances = np.exp(logs - logs.max())
    return states, chances / chances.sum()


def swept(compiled, net, order, states, seed):
    """The states of every particle after one sweep from ``states`` (P, T)."""
    P, T = states.shape
    plan = moving_plan(compiled, P)
    padded = 4 * -(-net.states // 4)
    crowd = Particles(
        tables=np.zeros((P, plan.placement.width), np.int32),
        values=np.zeros((P, padded)),
        balls=np.zeros((P, net.states), np.int32),
        states=states.astype(np.uint8),
        log_weights=np.zeros(P),
        orders=order[None].astype(np.int32),
    )
    crowd.values[:, : net.states] = net.value[0] if net.value.size else 0.0
    for t, m in enumerate(order):
        for p in range(P):
            put(net, crowd, p, m, states[p, t])
    sums = batches.make_buffers(plan)
    sums.w[:, :] = 0.0
    sums.running[:, 0] = 0.0
    rng = np.random.default_rng(seed)
    for p in range(0, P, LANES):
        sums.uniforms[:, :T] = rng.random((LANES, T))
        visit(net, crowd, (p, min(p + LANES, P)), (0, T), True, sums)
    assert (crowd.log_weights == 0).all()
    return crowd.states


def put(net, crowd, p, m, h):
    for at in net.place[m] + net.column[:, h]:
        crowd.tables[p, at] += 1
    if net.value.size > 0:
        crowd.balls[p, h] += 1
        crowd.values[p, h] = net.value[crowd.balls[p, h]]


INVARIANT = ["toy", "symmetric", "collider", "chain", "tied hidden roots", "topics"]


def problem_of(name):
    if name == "toy":
        return AllocationModel.nmf(2), TOY[:, :3]
    return next((model, X) for other, model, _, X in CASES if other == name)


@pytest.mark.parametrize("name", INVARIANT)
def test_a_sweep_leaves_the_posterior_as_it_is(name):
    """And no other law: neither under other pseudo-counts nor from other states."""
    model, X = problem_of(name)
    compiled = compiled_of(X, model)
    rng, P = np.random.default_rng(1), 20_000
    order = np.repeat(np.arange(len(compiled.values)), compiled.values)[:4]
    states, chances = posterior(compiled, order)
    start = states[rng.choice(len(states), P, p=chances)]
    net = complete_network(place_counts(compiled), True)[0]
    weights = compiled.states ** np.arange(len(order))[::-1]

    def p_value(net, start):
        end = swept(compiled, net, order, start, 2)
        assert (end != start).mean() > 0.05
        seen = np.bincount(end @ weights, minlength=len(states))
        many = P * chances >= 5
        seen = np.append(seen[many], seen[~many].sum())[: None if (~many).any() else -1]
        wanted = np.append(chances[many], chances[~many].sum())[: None if (~many).any() else -1]
        return float(stats.chisquare(seen, P * wanted).pvalue)

    assert p_value(net, start) > 1e-3
    assert p_value(net._replace(alpha=net.alpha + 0.3), start) < 1e-6
    assert p_value(net, np.zeros_like(start)) < 1e-6


# -- particles that do not move ----------------------------------------------------------


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


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("_", "model", "X"), STILL, ids=[name for name, *_ in STILL])
def test_plain_loops_of_particles_that_do_not_move(_, model, X, own):
    """Same uniforms, same allocations; particles of two turns."""
    compiled = compiled_of(X, model)
    P, batch = LANES + 1, 3
    found = batch_of(plan_of(compiled, P, separate_orders=own, unfold=True, resampling=None), batch)
    tokens = tokens_of(compiled)
    orders = np.tile(generator(1, batch, Stream.SCHEDULE, 0).permutation(tokens), (P, 1))
    if own:
        orders = np.tile(tokens, (P, 1))
        scratch = np.empty(len(tokens) + len(tokens) % 2)
        resampling.shuffle_orders(orders, batch, 0, batches.make_key(1), scratch)
    placement = plan_of(compiled, P).placement
    for p in range(P):
        log_z, counts = walk(compiled, orders[p], uniforms(len(tokens), p, batch, STATES))
        np.testing.assert_array_equal(found.counts[p], counts)
        assert found.log_weights[p] + placement.constant == pytest.approx(log_z, abs=1e-9)


@pytest.mark.full
def test_rows_of_many_tokens():
    """Tables of two and four bytes."""
    for total, kind in ((200, np.uint8), (40_000, np.uint16), (100_000, np.uint32)):
        X = np.array([[total // 2, total // 4], [0, total // 4]])
        plan = plan_of(compiled_of(X, AllocationModel.nmf(2)), 2, unfold=True)
        assert plan.placement.kind == kind
        found = batch_of(plan)
        np.testing.assert_array_equal(found.counts[:, :2].sum(axis=1), total)


def test_particles_do_not_depend_on_their_number():
    compiled = compiled_of(crowded(600), AllocationModel.nmf(3))
    few, many = (batch_of(plan_of(compiled, P, resampling=None, unfold=True)) for P in (3, 10))
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
    found = batch_of(plan_of(compiled, 1, resampling=None, unfold=True))
    order = generator(1, 0, Stream.SCHEDULE, 0).permutation(tokens_of(compiled))
    log_z, counts = walk(compiled, order, uniforms(len(order), 0, 0, STATES))
    np.testing.assert_array_equal(found.counts[0], counts)
    assert found.log_z + plan_of(compiled, 1).placement.constant == pytest.approx(log_z, rel=1e-12)


def test_orders_are_permutations():
    orders = np.tile(np.arange(7, dtype=np.int32), (20_000, 1))
    resampling.shuffle_orders(orders, 3, PURPOSES, KEY, np.empty(8))
    assert (np.sort(orders, axis=1) == np.arange(7)).all()
    for place in range(7):
        count = np.bincount(orders[:, place], minlength=7)
        assert stats.chisquare(count).pvalue > 1e-4
    pairs = np.bincount(7 * orders[:, 0] + orders[:, 1], minlength=49).reshape(7, 7)
    assert stats.chisquare(pairs[~np.eye(7, dtype=bool)]).pvalue > 1e-4
    assert resampling.ORDERS not in (STATES,)
