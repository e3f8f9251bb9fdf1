"""An executor that checks what equal bits on every executor rest on, one operation at a time.

It is serial and runs in this process. A seed cuts a plan into segments between cycles, and
decides for each of them how bands get from operation to operation (shared by threads, copied by
tasks, sent around a ring), how many workers a ring has, and which of the operations that may
start goes next. Bands, tasks' results and programs are pickled wherever they may have to be.
"""

import itertools
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from daskfactor.errors import DaskfactorError
from daskfactor.executors.base import Executor, local_workspace, run_operation
from daskfactor.executors.plan import Action, ops_by_row
from daskfactor.executors.segment import SegmentRun, make_segment_tasks
from daskfactor.executors.state import (
    CELLS,
    ChainState,
    Portion,
    factor_name,
    join_portions,
    without_records,
)
from daskfactor.executors.store import ArrayRequest, Carried, pack, unpack
from daskfactor.executors.tasks import build_graph, group_rounds, join_outputs, split_state
from daskfactor.executors.threads import BandScheduler
from daskfactor.kernels.steps import accumulate_moments
from daskfactor.machine import single_threaded_blas

WAYS = ("threads", "tasks", "ring")
MOMENTS = ("mean", "m2")


class AuditError(DaskfactorError):
    """An operation, or what moves bands, breaks a rule that equal bits rest on."""


def fail_if(wrong, sentence):
    if wrong:
        raise AuditError(sentence)


def fingerprint(array):
    return hash((array.dtype.str, array.shape, array.tobytes()))


def fingerprints(band):
    """Return what tells a band's values, under "", and its arrays."""
    return {name: fingerprint(a) for name, a in {"": band.values, **band.arrays}.items()}


def pickled(value):
    return pickle.loads(pickle.dumps(value, protocol=5))


def pickled_state(state):
    """Return a state each part of which has been pickled apart, as parts are sent."""
    factors = [list(map(pickled, bands)) for bands in state.factors]
    for band, own in zip(state.bands(), [band for bands in factors for band in bands], strict=True):
        lost = fingerprints(band) != fingerprints(own) or band.counts != own.counts
        fail_if(lost, f"pickling changes the band that begins at {band.offset}")
    return ChainState(factors, pickled(state.cells), pickled(state.evaluations))


def poison(workspace):
    """Fill buffers with NaN: nobody may count on what another operation left there."""
    for flat in workspace._flat.values():
        if flat.dtype.kind == "f":
            flat[:] = np.nan


def spoil(state, work):
    """Fill what a plan may change with NaN: the state was given away and must not be used again."""
    ops = [part.ops[0] for part in work.plan]
    declares = hasattr(work.program, "changes")
    names = {name for op in ops for name in work.program.changes(op)} if declares else None
    for band in state.bands():
        changed = [a for name, a in band.arrays.items() if names is None or name in names]
        for array in (band.values, *changed):
            if array.dtype.kind == "f" and array.flags.writeable:
                array[:] = np.nan


def named(at):
    return f"{factor_name(at[0])} band {at[1]}"


class Ledger:
    """What every band of a segment has to be, by the operations that were done on it."""

    def __init__(self, plan, state):
        self.rounds = {key_of(op): n for n, part in enumerate(plan) for op in part.ops}
        self.total = len(plan)
        bands = {(f, n): band for f, own in enumerate(state.factors) for n, band in enumerate(own)}
        self.done = dict.fromkeys(bands, 0)
        self.prints = {at: fingerprints(band) for at, band in bands.items()}
        self.draws = {at: list(map(fingerprint, band.draws)) for at, band in bands.items()}
        self.sums = {at: dict(band.sums) for at, band in bands.items()}
        self.counts = {at: dict(band.counts) for at, band in bands.items()}
        self.cells = {block: self.print_of(cells) for block, cells in state.cells.items()}
        self.known = frozenset().union(*(band.arrays for band in bands.values()))

    @staticmethod
    def print_of(cells):
        return cells.count, fingerprint(cells.mean), fingerprint(cells.m2)

    def begin(self, op, bands, cells):
        """Check that an operation may start, and that it meets what was left for it."""
        number = self.rounds.get(key_of(op))
        fail_if(number is None, f"the plan has no such operation: {op}")
        for at, band in zip(enumerate(op.block), bands, strict=True):
            done = self.done[at]
            late = f"out of order: {named(at)} has been through {done}, not {number} rounds"
            fail_if(done != number, late)
            for name, own in fingerprints(band).items():
                old = f"stale: {named(at)} has not the {name or 'values'!r} last left for it"
                fail_if(self.prints[at].get(name) != own, old)
            fail_if(band.counts != self.counts[at], f"stale: counts of {named(at)}")
        stale = cells is not None and self.cells[op.block] != self.print_of(cells)
        fail_if(stale, f"stale: monitored cells of block {tuple(op.block)}")

    def end(self, op, bands, cells):
        """Note what an operation left."""
        for at, band in zip(enumerate(op.block), bands, strict=True):
            self.done[at] += 1
            self.prints[at] |= fingerprints(band)
            self.counts[at] = dict(band.counts)
        if cells is not None:
            self.cells[op.block] = self.print_of(cells)

    def close(self, state):
        """Check that a segment left what its operations did, and nothing else."""
        for f, own in enumerate(state.factors):
            for n, band in enumerate(own):
                at, who = (f, n), f"of {named((f, n))} at the end of the segment"
                fail_if(self.done[at] != self.total, f"not all operations {who}")
                left = fingerprints(band)
                lost = {k for k in self.prints[at] if k in self.known | {""}} - set(left)
                fail_if(lost, f"lost: {sorted(lost)} {who}")
                other = sorted(k for k, v in left.items() if self.prints[at].get(k) != v)
                fail_if(other, f"stale: {other} {who}")
                fail_if(list(map(fingerprint, band.draws)) != self.draws[at], f"draws {who}")
                fail_if(not same_sums(band.sums, self.sums[at]), f"sums {who}")
                fail_if(band.counts != self.counts[at], f"counts {who}")
        cells = {block: self.print_of(own) for block, own in state.cells.items()}
        fail_if(cells != self.cells, "monitored cells at the end of the segment")


def key_of(op):
    return op.action, tuple(op.block), op.cycle, op.iteration


def same_sums(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(own, other[key], equal_nan=True) for key, own in one.items()
    )


class Audited:
    """A program whose operations see what they declare, and are checked."""

    def __init__(self, program, ledger):
        self.program, self.ledger = program, ledger
        self.made = set()

    def __getattr__(self, name):
        return getattr(self.program, name)  # `touches` and `changes`, if it has them

    def update(self, op, data, bands, workspace):
        self._watch(op, data, bands, None, workspace)

    def evaluate(self, op, data, bands, cells, workspace):
        found = self._watch(op, data, bands, cells, workspace)
        at = (found.cycle, tuple(found.block))
        fail_if(at != (op.cycle, tuple(op.block)), f"a record of {at} was made in {op}")
        return found

    def _watch(self, op, data, bands, cells, workspace):
        self.ledger.begin(op, bands, cells)
        names = self._names(op)
        shown = [self._shown(band, names[0]) for band in bands]
        before = [pickled(band) for band in shown]
        watched = None if cells is None else cells.count
        poison(workspace)
        if op.action == Action.UPDATE:
            found = self.program.update(op, data, tuple(shown), workspace)
        else:
            found = self.program.evaluate(op, data, tuple(shown), cells, workspace)
        for at, band, own, old in zip(enumerate(op.block), bands, shown, before, strict=True):
            self._check_arrays(op, at, band, own, old, names[1])
            self._check_records(op, at, own, old, names[1])
            check_memory(at, own, workspace)
            hidden = {k: a for k, a in band.arrays.items() if k not in old.arrays}
            band.values, band.arrays = own.values, hidden | own.arrays
            band.counts, band.draws, band.sums = own.counts, own.draws, own.sums
        if watched is not None:
            counted = cells.count - watched
            due = int(op.options.record)
            fail_if(counted != due, f"lost: moments of cells of block {tuple(op.block)}")
        self.ledger.end(op, bands, cells)
        return found

    def _names(self, op):
        """Return the arrays that an operation may read and write; None: all."""
        if not hasattr(self.program, "touches"):
            return None, None
        changes = set(self.program.changes(op)) | self.made
        return set(self.program.touches(op)) | changes, changes

    @staticmethod
    def _shown(band, names):
        arrays = {k: a for k, a in band.arrays.items() if names is None or k in names}
        return replace(band, arrays=arrays)

    def _check_arrays(self, op, at, band, own, old, changes):
        who = f"{named(at)} in {op.action.name.lower()} of {tuple(op.block)}, cycle {op.cycle}"
        kind = own.values.dtype, own.values.shape, own.offset
        fail_if(kind != (old.values.dtype, old.values.shape, old.offset), f"another kind of {who}")
        still = op.action == Action.UPDATE or fingerprint(own.values) == fingerprint(old.values)
        fail_if(not still, f"undeclared write: an evaluation moved {who}")
        for name in set(own.arrays) | set(old.arrays):
            sides = old.arrays.get(name), own.arrays.get(name)
            was, now = (None if array is None else fingerprint(array) for array in sides)
            if changes is None or name in changes or was == now:
                continue
            new = was is None and name not in band.arrays and name not in self.ledger.known
            fail_if(not new, f"undeclared write: {name!r} of {who}")
            self.made.add(name)

    def _check_records(self, op, at, own, old, changes):
        who = f"{named(at)} in {tuple(op.block)}, cycle {op.cycle}"
        draws = own.draws[len(old.draws) :]
        due = int(op.action == Action.UPDATE and op.last and op.options.keep)
        fail_if(len(draws) != due, f"{len(draws)} draws of {who}, {due} due")
        for draw in draws:
            other = fingerprint(draw) != fingerprint(own.values)
            fail_if(other, f"a draw is not what is left of {who}")
        self.ledger.draws[at] += map(fingerprint, draws)
        sums = {key: own.sums[key] for key in own.sums if key not in old.sums}
        kept = {key: own.sums.get(key) for key in old.sums}
        fail_if(not same_sums(kept, old.sums), f"earlier sums of {who}")
        for key in sums:
            cycle = key[0] if isinstance(key, tuple) else key
            fail_if(cycle != op.cycle, f"a record of cycle {cycle} was made in {who}")
        self.ledger.sums[at] |= sums
        if changes is None or not {*MOMENTS} <= set(old.arrays):
            return
        due = int(op.action == Action.UPDATE and op.last and op.options.record)
        counted = own.counts.get("moments", 0) - old.counts.get("moments", 0)
        fail_if(counted != due, f"lost: {due - counted} moments of {who}")
        if due:
            moments = [old.arrays[name] for name in MOMENTS]
            accumulate_moments(own.values, own.counts["moments"], *moments)
        for name in MOMENTS:
            other = fingerprint(own.arrays[name]) != fingerprint(old.arrays[name])
            fail_if(other, f"lost: a moment in {name!r} of {who}")


def check_memory(at, band, workspace):
    """Check that no array of a band is another's memory, or a buffer."""
    own = {"values": band.values, **band.arrays}
    own |= {f"draw {n}": draw for n, draw in enumerate(band.draws)}
    items = list(own.items())
    for n, (name, array) in enumerate(items):
        for other, its in [*items[:n], *workspace._flat.items()]:
            shared = array.size and np.may_share_memory(array, its)
            fail_if(shared, f"shared: {name} and {other} of {named(at)} are the same memory")


class Here:
    """Metadata and arrays of a state whose bands are all in this process."""

    def __init__(self, state):
        self.state, self.blocks, self.monitored = state, state.blocks, tuple(state.cells)

    def names(self, factor):
        return self.state.names(factor)

    def request(self, key, changes):
        return ArrayRequest(key, "part", "here", changes)

    def carried(self, address, replaced):
        return Carried()

    def fetch(self, requests):
        return {request.key: self.value(request.key).copy() for request in requests}

    def value(self, key):
        if key.factor == CELLS:
            return self.state.cells[key.number]
        band = self.state.factors[key.factor][key.number]
        return band.arrays[key.name] if key.name else without_records(band, ())


class Member(SegmentRun):
    """A worker of a ring to which all bands come as bytes, its own ones too."""

    def receive(self, message):
        super().receive(message._replace(band=pickled(message.band)))


class Network:
    """Workers of a ring in one thread; a generator decides who moves and what arrives next."""

    def __init__(self, work, state, counts, kind=SegmentRun):
        self.mail = []
        self.state = state
        shares = {str(rank): count for rank, count in enumerate(counts)}
        here, lanes = Here(state), [1] * len(counts)
        tasks = make_segment_tasks(work, here, shares, lanes, "run", work.report_progress, 0.01)
        post = SimpleNamespace(send=lambda _, to, message: self.mail.append((int(to), message)))
        self.workers = [kind(task, post) for task in tasks]
        for worker in self.workers:
            worker.begin(here.fetch(worker.task.requests))

    def step(self, worker, row=None):
        """Have a worker do an operation: that of a row, or the one that it would choose."""
        op = worker.scheduler.take(0) if row is None else take_row(worker.scheduler, row)
        assert op is not None
        before = len(self.mail)
        worker.scheduler.finish(op, *worker.operate(op))
        assert all(rank != worker.task.rank for rank, _ in self.mail[before:])

    def run(self, rng, any_row=False):
        """Do all operations and deliver all messages; ``any_row``: in any admissible order."""
        while any(worker.scheduler.remaining for worker in self.workers):
            each = [(own, row) for own in self.workers for row in ready_rows(own.scheduler)]
            able = [(own, row if any_row else None) for own, row in each]
            assert able or self.mail, "nobody can go on"
            choice = int(rng.integers(len(able) + len(self.mail)))
            if choice < len(able):
                self.step(*able[choice])
            else:
                rank, message = self.mail.pop(choice - len(able))
                message = message._replace(band=pickled(message.band))
                for _ in range(int(rng.integers(1, 3))):  # now and then twice
                    self.workers[rank].receive(message)

    def result(self):
        return join_portions(self.state, [worker.result() for worker in self.workers])


def ready_rows(scheduler):
    """Return the rows whose next operation has all of its bands."""
    return [
        row
        for row, number in scheduler.position.items()
        if number < len(scheduler.ops[row]) and scheduler._needs[row] <= scheduler.ready
    ]


def take_row(scheduler, row):
    """Take the next operation of a row, as `BandScheduler.take` does of the row it prefers."""
    scheduler._running.add(row)
    return scheduler.ops[row][scheduler.position[row]]


class AuditExecutor(Executor):
    """Runs plans as an adversary would, and checks every operation.
    A seed decides all that executors may decide, among them the ways that bands go."""

    name = "audit"

    def __init__(self, seed=0, ways=WAYS):
        super().__init__()
        self.rng, self.ways = np.random.default_rng(seed), ways
        self.segments = []

    def _run(self, work, state):
        assert work.placement is None, "a device's bands are not audited"
        done = 0
        with single_threaded_blas():
            for plan in self._cut(work.plan):
                given, state = state, pickled_state(state)
                spoil(given, replace(work, plan=plan))
                ledger = Ledger(plan, state)
                program = Audited(unpack(pack(work.program)), ledger)
                part = replace(work, plan=plan, program=program, on_done=lambda done: None)
                way = self.ways[int(self.rng.integers(len(self.ways)))]
                self.segments.append(way)
                state = getattr(self, f"_{way}")(part, state)
                ledger.close(state)
                done += sum(len(own.ops) for own in plan)
                work.on_done(done)
        return state

    def _cut(self, plan):
        """Cut a plan between cycles, at random."""
        cycles = [part.ops[0].cycle for part in plan]
        starts = [n for n in range(1, len(plan)) if cycles[n] != cycles[n - 1]]
        cuts = [n for n in starts if self.rng.random() < 0.3]
        edges = [0, *cuts, len(plan)]
        for low, high in itertools.pairwise(edges):
            yield tuple(plan[low:high])

    def _threads(self, work, state):
        scheduler = BandScheduler(ops_by_row(work.plan), 1)
        while scheduler.remaining:
            ready = ready_rows(scheduler)
            fail_if(not ready, "no operation may start")
            op = take_row(scheduler, ready[int(self.rng.integers(len(ready)))])
            scheduler.finish(op, *run_operation(op, work, state, local_workspace()))
        state.add_evaluations(scheduler.evaluations)
        return state

    def _ring(self, work, state):
        blocks = state.blocks
        workers = int(self.rng.integers(1, blocks + 1))
        cuts = np.sort(self.rng.choice(np.arange(1, blocks), workers - 1, replace=False))
        counts = np.diff([0, *cuts, blocks]).tolist()
        network = Network(work, state, counts, Member)
        network.run(self.rng, any_row=True)
        return network.result()

    def _tasks(self, work, state):
        inputs = split_state(state, work.plan[0].size)
        split = bool(self.rng.integers(2))
        graph, outputs = build_graph(group_rounds(work.plan), work, inputs, split=split)
        results = {}

        def needs(key):
            return [own for own in graph[key] if isinstance(own, tuple) and own in graph]

        while waiting := [key for key in graph if key not in results]:
            ready = [key for key in waiting if all(own in results for own in needs(key))]
            key = ready[int(self.rng.integers(len(ready)))]
            function, *given = graph[key]
            known = [isinstance(own, tuple) and own in results for own in given]
            given = [results[own] if k else own for own, k in zip(given, known, strict=True)]
            before = [portion_print(own) for own in given]
            result = function(*given)
            changed = before != [portion_print(own) for own in given]
            fail_if(changed, f"shared: the task {key} wrote to what it was given")
            results[key] = pickled(result)
        keys = [key for part in outputs for key in part]
        found = [key if isinstance(key, Portion) else results[key] for key in keys]
        return join_outputs(outputs, state, found)[0]

    def _map(self, function, items, name):
        results = {}
        with single_threaded_blas():
            for number in self.rng.permutation(len(items)):
                poison(local_workspace())
                results[int(number)] = function(items[number], local_workspace())
        return [results[number] for number in range(len(items))]

    def close(self):
        """Give nothing back."""


def portion_print(value):
    """Return what tells a portion from what a task has made of it."""
    if not isinstance(value, Portion):
        return None
    bands = {
        at: (fingerprints(band), dict(band.counts), len(band.draws), dict(band.sums))
        for at, band in value.bands.items()
    }
    cells = {block: Ledger.print_of(own) for block, own in value.cells.items()}
    return bands, cells, len(value.evaluations), {at: len(own) for at, own in value.records.items()}
