"""What a ring is foreseen to send and to take, beside rings that run."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from daskfactor import PSGLD, SGHMC, GaussianMF, Gibbs, TweedieNMF, as_blocks, estimate_cost
from daskfactor.errors import OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.ring import RingExecutor
from daskfactor.executors.segment import Exchange
from daskfactor.executors.state import FactorBand
from daskfactor.executors.traffic import RingClock
from daskfactor.inference.base import checked_sampler
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.timing import _column, _drawing_plan, network_rate
from tests.cluster.support import cluster
from tests.refusals import refused

pytestmark = pytest.mark.cluster
WORKERS = 2


@pytest.fixture(scope="module")
def client():
    with cluster(WORKERS, processes=False) as client:
        yield client


@pytest.fixture
def sent(monkeypatch):
    """Bytes of arrays in every message from worker to worker."""
    found = []

    def send(self, address, parcel):
        band = parcel.band
        found.append(band.values.nbytes + sum(own.nbytes for own in band.arrays.values()))
        usual(self, address, parcel)

    usual = Exchange.send
    monkeypatch.setattr(Exchange, "send", send)
    return found


@pytest.mark.parametrize(
    ("model", "sampler", "more"),
    [
        (TweedieNMF(3), PSGLD(warm_start=1), 1.0),
        (GaussianMF(3), SGHMC(), 1.0),
        (TweedieNMF(3, dispersion=1.0), Gibbs(warm_start=1), 1.7),  # as if it always gathered
    ],
)
def test_bytes_are_those_that_a_ring_sends(model, sampler, more, client, sent):
    V = np.random.default_rng(0).poisson(3.0, (40, 61)).astype(np.float32)
    sampler = checked_sampler(model, sampler)
    with as_blocks(V, 4) as data:
        options = RunOptions(6, 0, 1, 2, 0, "draws", 1, "float32")
        setting = Setting(data, model, sampler, options, SerialExecutor())
        chain = sampler.chain(setting, 0)
        chain.start()
        (run,), plan = chain.tracks, _drawing_plan(setting, 6)
        column, rows = _column(setting), data.grid.cols.sizes
        seconds = np.full((4, 4), 1e-3)
        program = chain.program(run.track)
        clock = RingClock(plan, program, column, rows, [1] * WORKERS, seconds).run()
        executor = RingExecutor(client)
        executor.run(plan, program, run.state, data)
        executor.close()
    assert sum(sent) > 10 * V.shape[1] * 12
    assert sum(sent) <= clock.sent.sum() <= more * sum(sent)


class Program:
    """An operation that does nothing and changes every array."""


def even(blocks, cycles):
    """Plan cycles of equal blocks, in the one order in which every band has to travel."""
    with as_blocks(np.ones((blocks, blocks), np.float32), blocks) as data:
        options = RunOptions(cycles, 0, 1, 1, 0, "moments", 0, "float32")
        sampler = checked_sampler(TweedieNMF(1), PSGLD())
        setting = SimpleNamespace(data=data, sampler=sampler, options=options)
        return tuple(part for part in _drawing_plan(setting, cycles) if part.ops[0].action == 0)


def ring_seconds(workers, blocks, network, size):
    """Seconds of operations of 10 ms on one thread, and in a ring."""
    plan = even(blocks, 20)
    column = FactorBand(0, np.zeros((1, size), np.uint8))
    seconds = np.full((blocks, blocks), 0.01)
    ring = plan, Program(), column, [1] * blocks, [1] * workers, seconds, network
    return len(plan) * blocks * 0.01, RingClock(*ring).run().seconds


def test_time_is_that_of_the_slowest_of_threads_cards_and_bands():
    alone, none = ring_seconds(1, 8, math.inf, 1000)
    assert none == pytest.approx(alone)
    alone, free = ring_seconds(4, 8, math.inf, 1000)
    assert free == pytest.approx(alone / 4, rel=0.05)  # messages hide behind the second band
    alone, narrow = ring_seconds(4, 8, 1e6, 100_000)  # 0.1 s a band
    messages = alone / 0.01 * 0.1 / 4  # of one card, if every band left every time
    assert 0.7 * messages < narrow < 1.5 * messages


@pytest.mark.parametrize(
    ("network", "rate"),
    [
        *(("1 Gbit/s", 1.25e8), ("10gbit", 1.25e9), ("2.5 Gbps", 3.125e8)),
        *(("1.2 GB/s", 1.2e9), ("100 Mb/s", 1.25e7), (5e8, 5e8)),
    ],
)
def test_rates_of_networks(network, rate):
    assert network_rate(network) == pytest.approx(rate)


@pytest.mark.parametrize("network", ["fast", "10", 0, -1.0, math.nan, "10 Gbit per s", True])
def test_rates_that_are_none(network):
    refused(OptionError, "network is bytes a second", network_rate, network)


def test_what_the_network_limits():
    V, model = np.ones((4000, 2000), np.float32), TweedieNMF(20)
    known = {"draws": 20, "tune": 20, "blocks": 8, "workers": 4, "lanes": 1}
    wide = estimate_cost(V, model, **known, network="100 Gbit/s")
    tight = estimate_cost(V, model, **known, network="10 Mbit/s")
    assert (wide.sent, wide.worker) == (tight.sent, tight.worker)
    assert wide.network_data < wide.data < tight.network_data
    assert tight.network_workers == 2 < 4 < wide.network_workers
    assert tight.seconds > 3 * wide.seconds
    slow = estimate_cost(V, model, **known, network="100 Gbit/s", block_seconds=1.0)
    assert slow.cycle_seconds == pytest.approx(8 * 8 / 4, rel=0.4)
    assert estimate_cost(V, model, draws=20, tune=20).sent == 0
