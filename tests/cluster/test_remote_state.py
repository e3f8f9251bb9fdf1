"""Bands that stay in the workers: what a state does is what a local one does, to the bit."""

import gc
import os
import signal
import time
from functools import partial

import dask
import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.data.grid import Block
from daskfactor.errors import EngineError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.base import StateLost
from daskfactor.executors.state import ChainState, FactorBand
from daskfactor.executors.store import StatePart, size_of
from tests.cluster import dying
from tests.cluster.programs import Killer, chain, kill_one, oracle
from tests.cluster.support import EXECUTORS, IMPATIENT, beside, cluster, executing, named, same
from tests.executors.mixer import HoardingMixer, Mixer, bits, hoard
from tests.refusals import refused
from tests.tiers import tiered

pytestmark = pytest.mark.cluster


def content(state):
    """Values and arrays of all bands."""
    return [
        (band.values.tobytes(), sorted((n, a.tobytes()) for n, a in band.arrays.items()))
        for band in state.copy().local().bands()
    ]


def held_bytes(client):
    """Bytes of the parts of states on all workers, once they are told of all that is not wanted."""

    def here(dask_worker):
        parts = [own for own in dask_worker.data.values() if isinstance(own, StatePart)]
        arrays = {id(a): size_of(a) for part in parts for a in part.arrays.values()}
        return sum(arrays.values())  # parts may share arrays

    gc.collect()
    return sum(client.run(here).values())


def settled(client, expected):
    until = time.monotonic() + 10
    while (found := held_bytes(client)) != expected:
        assert time.monotonic() < until, f"{found} bytes in the workers, not {expected}"
        time.sleep(0.05)


@pytest.mark.parametrize(("factors", "blocks"), [(2, 4), (3, 3)])
def test_arrays_of_every_kind_stay_where_they_are(executor, factors, blocks):
    """Some are constant, some needed late, some never; some are copied, some taken."""

    def run(made, changed):
        kept = []

        class Hoarding:
            def run(self, plan, program, state, data, on_done):
                if isinstance(state, ChainState) and not state.names(0):
                    hoard(state)
                    state = made.distribute(state)
                kept.append((state.copy(), content(state)))
                if changed:
                    state.each(add, factors - 1)
                return made.run(plan, program, state, data, on_done)

        after = chain(Hoarding(), HoardingMixer(), factors=factors, blocks=blocks, cycles=2)
        assert all(content(state) == before for state, before in kept)
        return after.local()

    for changed in (False, True):
        assert bits(run(executor, changed)) == bits(run(SerialExecutor(), changed))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("factors", [2, 3])
def test_a_state_is_made_of_bands_of_any_number_of_factors(executor, factors, shared):
    def band(factor, number):
        values = np.full((2, 3), 10.0 * factor + number)
        return FactorBand(2 * number, values, {"twice": 2 * values}, {"moments": factor})

    made = executor.state_from_bands(4, band, shared, factors)
    here = SerialExecutor().state_from_bands(4, band, shared, factors)
    assert (made.n_factors, made.blocks) == (here.n_factors, here.blocks) == (factors, 4)
    assert content(made) == content(here)
    for found, wanted in zip(made.local().bands(), here.bands(), strict=True):
        assert (found.offset, found.counts) == (wanted.offset, wanted.counts)


def add(band, by=1.0):
    """Change a band in place, and give it another array in place of one."""
    band.values += np.float32(by)
    band.arrays["more"] = band.values * 2
    band.arrays.pop("idle", None)
    return float(band.values[0, 0])


def look(band, power):
    """Change nothing."""
    return float((band.values**power).sum()), band.offset


def test_each_meets_bands_where_they_are(executor, here):
    state = oracle(segments=1)
    held = executor.distribute(state.copy())
    before = held.copy()
    powers = range(1, 9)
    assert held.each(look, None, powers) == state.each(look, None, powers)
    size = held_bytes(here)
    assert before.copy().each(look, None, powers) == state.each(look, None, powers)
    settled(here, size)  # what a call only looked at is not kept twice
    for change in (partial(add, by=0.5), add):
        assert held.each(change, 1) == state.each(change, 1)
    assert bits(held.local()) == bits(state)
    assert held.names(1) == {"more"}
    assert held.names(0) == set()
    assert bits(before.local()) == bits(oracle(segments=1))


def fail(band):
    band.values[:] = 0
    raise EngineError("on purpose")


def test_an_error_in_each_comes_back(executor):
    held = executor.distribute(oracle(segments=1))
    refused(EngineError, "on purpose", held.each, fail)


def test_a_copy_is_a_way_back(executor):
    state = executor.distribute(oracle(segments=1))
    way_back = state.copy()
    both = [chain(Continued(executor, own), cycles=2) for own in (state, way_back.copy())]
    assert bits(both[0].local()) == bits(both[1].local())
    assert bits(way_back.local()) == bits(oracle(segments=1))


class Continued:
    """Begins a chain with a state of its own."""

    def __init__(self, executor, state):
        self.executor, self.state = executor, state

    def run(self, plan, program, state, data, on_done):
        self.state = self.executor.run(plan, program, self.state, data, on_done)
        return self.state


@pytest.mark.quick("tasks")
@named
def test_what_no_state_has_any_more_is_dropped(name, here):
    local = oracle(segments=1)
    local.clear_records()
    with executing(here, name) as executor:
        state = executor.distribute(local)
        first = held_bytes(here)
        after = chain(Continued(executor, state), cycles=2)
        after.clear_records()
        del state
        settled(here, first)
    settled(here, 0)


@pytest.mark.quick("ring")
@named
def test_bands_go_with_a_client_that_dies(name, client):
    """The scheduler notices, and has the workers release its keys."""
    with beside(client) as own:
        executor = EXECUTORS[name](own, patience=IMPATIENT)
        held = executor.distribute(oracle(segments=1))
        assert held_bytes(client) > 0
    settled(client, 0)
    refused(EngineError, "lost its scheduler", held.gather, "rows")


class Saving:
    """Goes back to where it saved its state, as a run does."""

    def __init__(self, executor):
        self.executor, self.lost = executor, 0

    def run(self, plan, program, state, data, on_done):
        saved = state.local()
        while True:
            try:
                held = self.executor.distribute(saved)
                return self.executor.run(plan, program, held, data, on_done).local()
            except StateLost:
                self.lost += 1


@pytest.mark.full
@pytest.mark.parametrize("factors", tiered([2, 3], lambda factors: factors == 3))
@named
def test_lost_bands_are_told(name, factors, tmp_path):
    spots = frozenset(spot[: 1 + factors] for spot in [(5, 2, 1, 0), (9, 1, 3, 3)])
    killer = Killer(str(tmp_path), spots)
    with cluster(2, processes=True) as client, executing(client, name) as executor:
        saving = Saving(executor)
        assert bits(chain(saving, killer, factors=factors)) == bits(oracle(factors=factors))
        assert saving.lost == 2
        held = executor.distribute(oracle())
        for pid in client.run(os.getpid).values():
            os.kill(pid, signal.SIGKILL)
        refused(StateLost, None, held.each, look, 0, range(4))
        refused(StateLost, None, held.gather, "rows")
        refused(StateLost, None, chain, Continued(executor, held), Mixer(fail_at=Block(9, 9)))


@pytest.mark.full
@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_goes_back_to_its_last_checkpoint(stored, tmp_path):
    """On the disk of the client if it has no store; the bits are those of a run without losses."""
    run = partial(dying.sampled, model=dfac.TweedieNMF(2), monitor=(np.arange(3), np.arange(3)))
    kills, scratch = [], dask.config.set({"temporary-directory": str(tmp_path)})
    store = str(tmp_path / "run.zarr") if stored else None
    with scratch, cluster(2, processes=True) as client, executing(client) as executor:

        def strike(event):
            if event.phase not in kills and event.done * 2 > event.total:
                kills.append(event.phase)
                if event.phase in ("warm start", "tune", "draw"):
                    kill_one(client)

        found = run(executor=executor, callback=strike, store=store)
        assert executor.report.lost_segments >= 2
    assert same(found, run())
    assert not list(tmp_path.glob("daskfactor-*"))
