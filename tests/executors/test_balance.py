"""Workers of unequal speed: who gets how many bands, without a cluster."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.executors.balance import Balance, evenness
from daskfactor.executors.threads import share_bands

WORKERS = ["a", "b", "c", "d"]
SPEEDS = st.sampled_from([0.1, 0.5, 0.7, 1.0, 1.3, 2.0])


def time_of_round(counts, threads, speeds):
    return max(-(-n // t) / s for n, t, s in zip(counts, threads, speeds, strict=True))


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 3), SPEEDS), min_size=1, max_size=4),
    st.sampled_from([None, 1]),
)
def test_no_other_shares_are_done_sooner(blocks, workers, lanes):
    threads, speeds = zip(*workers, strict=True)
    counts = share_bands(blocks, threads, lanes, speeds)
    assert sum(counts) == blocks
    every = itertools.product(range(blocks + 1), repeat=len(workers))
    best = min(time_of_round(c, threads, speeds) for c in every if sum(c) == blocks)
    assert time_of_round(counts, threads, speeds) == pytest.approx(best)


@pytest.mark.parametrize(
    ("blocks", "speeds", "counts"),
    [
        (8, [1, 0.5], [5, 3]),
        (16, [0.5, 1], [5, 11]),
        (8, [1.02, 0.98], [4, 4]),
        (4, [1, 0.1], [4, 0]),
        (6, [1, 1, 1], [2, 2, 2]),
    ],
)
def test_slow_workers_get_fewer_bands(blocks, speeds, counts):
    assert share_bands(blocks, [1] * len(speeds), None, speeds) == counts


def segments(balance, count, blocks, speed, workers=2):
    """Shares of simulated segments, and the time of a round over that of a perfect division."""
    threads, found = dict.fromkeys(WORKERS[:workers], 1), []
    for number in range(count):
        shares = dict(zip(threads, balance.share(blocks, threads, None), strict=True))
        rates = {address: speed(number, address) for address in threads}
        busy = {a: 10 * n / rates[a] for a, n in shares.items() if n}
        balance.note({a: 10 * shares[a] for a in busy}, busy)
        found.append((shares, max(busy.values()) / (10 * blocks / sum(rates.values()))))
    return found


def test_a_straggler_costs_no_more_than_its_share():
    """At half speed of two: a third of the work, once two segments have been measured."""
    found = segments(Balance(), 6, 32, lambda number, address: 0.5 if address == "b" else 1.0)
    assert [shares["b"] for shares, _ in found] == [16, 16, 11, 11, 11, 11]
    assert found[1][1] == pytest.approx(1.5)
    assert found[-1][1] < 1.04  # of the grain of bands: 22 / 32 of the work takes 22, not 21.3


def test_a_worker_that_recovers_gets_its_bands_back():
    found = segments(
        Balance(), 30, 8, lambda number, a: 0.05 if a == "b" and 2 <= number < 6 else 1.0
    )
    counts = [shares["b"] for shares, _ in found]
    assert counts[:3] == [4, 4, 4]
    assert 0 in counts[3:8]
    assert counts[-1] == 4


def test_first_segments_and_noise_move_nothing():
    rng = np.random.default_rng(0)

    def speed(number, address):
        return 0.1 if number == 0 and address == "a" else float(1 + 0.1 * rng.uniform(-1, 1))

    found = segments(Balance(), 50, 12, speed, workers=4)
    assert {tuple(shares.values()) for shares, _ in found} == {(3, 3, 3, 3)}


def test_a_worker_that_joins_is_taken_to_be_like_the_others():
    balance = Balance()
    segments(balance, 4, 16, lambda number, address: 0.5 if address == "b" else 1.0)
    (shares, _), *_ = segments(balance, 1, 16, lambda number, address: 1.0, workers=3)
    assert shares == {"a": 7, "b": 4, "c": 5}


def test_how_even_seconds_are():
    assert evenness({"a": 2.0, "b": 4.0}, {"a": 1, "b": 2}) == 1.0
    assert evenness({"a": 3.0, "b": 1.0}, {"a": 1, "b": 1}) == pytest.approx(2 / 3)
    assert evenness({"a": 0.0}, {"a": 1}) == 1.0
