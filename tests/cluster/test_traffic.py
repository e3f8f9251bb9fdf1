"""What a ring is foreseen to send and to take, beside rings that run."""

import math

import numpy as np
import pytest

from daskfactor import (
    PSGLD,
    SGHMC,
    Cyclic,
    GaussianMF,
    Gibbs,
    Reshuffled,
    TweedieNMF,
    as_blocks,
    estimate_cost,
)
from daskfactor.errors import OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.ring import RingExecutor
from daskfactor.executors.segment import RingWorkerPlugin
from daskfactor.inference.chain import Chain
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.timing import HOP, Place, network_rate, time_of
from daskfactor.random import Stream, generator
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

    def send(self, segment, address, message):
        band = message.band
        found.append(band.values.nbytes + sum(own.nbytes for own in band.arrays.values()))
        usual(self, segment, address, message)

    usual = RingWorkerPlugin.send
    monkeypatch.setattr(RingWorkerPlugin, "send", send)
    return found


@pytest.mark.parametrize(
    ("model", "sampler", "more"),
    [
        (TweedieNMF(3), PSGLD(warm_start=1), 1.3),
        (GaussianMF(3), SGHMC(), 1.3),
        (TweedieNMF(3, dispersion=1.0), Gibbs(warm_start=1), 1.8),  # as if it always gathered
    ],
)
def test_bytes_are_about_those_that_a_ring_sends(model, sampler, more, client, sent):
    V = np.random.default_rng(0).poisson(3.0, (40, 61)).astype(np.float32)
    with as_blocks(V, 4) as data:
        options = RunOptions(6, 0, 1, 2, 0, "draws", 1, "float32")
        kernel = sampler.kernel(model, data)
        setting = Setting(data, model, kernel, options, SerialExecutor())
        chain = Chain(setting, 0)
        chain.start()
        (run,) = chain.tracks
        executor = RingExecutor(client)
        executor.run(drawing_plan(setting), chain.program(run.track), run.state, data)
        executor.close()
        place = Place("ring", WORKERS, 1, stored=False)
        estimate = 6 * time_of(setting, place, 1.0)["sent"]
    assert sum(sent) > 10 * V.shape[1] * 12
    assert 0.9 * sum(sent) <= estimate <= more * sum(sent)


def drawing_plan(setting):
    """Plan all cycles of a chain that draws in half of them."""

    def wanted(cycle):
        drawn = setting.options.draw_index(cycle) is not None
        return CycleOptions(record=drawn, keep=drawn, evaluate=drawn)

    return build_plan(
        setting.kernel.schedule,
        setting.data.n_observed,
        range(6),
        lambda cycle: generator(0, 0, Stream.SCHEDULE, cycle),
        wanted,
    )


@pytest.mark.parametrize("schedule", [Reshuffled(), Cyclic()])
def test_time_is_that_of_the_slowest_of_threads_cards_and_bands(schedule):
    def ring(workers, seconds=0.01, network=None):
        place = {"executor": "ring", "workers": workers, "lanes": 1, "network": network}
        known = place | {"blocks": 8, "block_seconds": seconds, "draws": 20, "tune": 20}
        return estimate_cost((800, 4000), TweedieNMF(20), PSGLD(schedule=schedule), **known)

    alone = ring(1)
    assert (alone.sent, alone.cycle_seconds) == (0, pytest.approx(64 * 0.01))
    free = ring(4)
    assert free.cycle_seconds == pytest.approx(alone.cycle_seconds / 4)  # messages hide behind it
    with_evaluation = 1.33  # a cycle and the evaluation of its draw, in units of a cycle
    narrow = ring(4, network=1e6)
    card = free.sent / 4 / 1e6 / with_evaluation
    assert narrow.cycle_seconds == pytest.approx(card, rel=0.1)
    assert card > 2 * free.cycle_seconds
    quick = ring(8, 1e-5)  # every band leaves its worker after every round
    assert 16 * HOP < with_evaluation * quick.cycle_seconds < 17 * HOP


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
