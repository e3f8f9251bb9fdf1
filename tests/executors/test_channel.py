"""Channels: every message once, in order, whole; and never a wait."""

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskfactor.executors import channel
from daskfactor.executors.channel import LEAST, MESSAGES, Reader, Writer, this_machine
from daskfactor.executors.connection import Link
from daskfactor.executors.messages import Parcel, read
from daskfactor.executors.state import FactorBand

pytestmark = pytest.mark.skipif(not channel._SUITABLE, reason="no channels on this processor")


def pair(largest: int = 0) -> tuple[Writer, Reader]:
    writer = Writer(largest)
    return writer, Reader(writer.path, writer.capacity)


def message(number: int, size: int) -> tuple[bytes, Any]:
    rng = np.random.default_rng(number)
    return rng.bytes(int(rng.integers(1, 40))), rng.integers(0, 256, size, dtype=np.uint8)


def same(one: tuple[bytes, Any], other: tuple[bytes, Any]) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1])


def test_messages_of_any_size_come_out_in_order_around_the_ring() -> None:
    writer, reader = pair()
    rng = np.random.default_rng(0)
    waiting: list[int] = []
    sizes = rng.integers(0, LEAST // 4, 400)
    for number, size in enumerate(sizes):
        while not writer.put(*message(number, int(size))):
            found = reader.take()
            assert found  # no room only while something is there to be taken
            for got in found:
                first = waiting.pop(0)
                assert same(got, message(first, int(sizes[first])))
        waiting.append(number)
    for got in reader.take():
        first = waiting.pop(0)
        assert same(got, message(first, int(sizes[first])))
    assert not waiting
    assert reader.take() == []
    writer.close()


def test_what_does_not_fit_is_not_put_and_harms_nothing() -> None:
    writer, reader = pair()
    assert not writer.put(b"x", np.zeros(LEAST, np.uint8))
    assert writer.put(*message(1, 1000))
    assert not writer.put(b"x", np.zeros(LEAST - 500, np.uint8))
    assert [same(got, message(1, 1000)) for got in reader.take()] == [True]
    writer.close()


def test_a_message_that_exactly_fills_the_ring() -> None:
    writer, reader = pair()
    body = np.arange(LEAST - 24, dtype=np.uint64).astype(np.uint8)
    for _ in range(3):
        assert writer.put(b"12345678", body)
        assert not writer.put(b"", np.empty(0, np.uint8))
        [(heads, got)] = reader.take()
        assert heads == b"12345678"
        assert np.array_equal(got, body)
    writer.close()


def test_it_is_made_for_some_messages_of_the_size_that_is_known() -> None:
    writer, _ = pair(10 * LEAST)
    assert writer.capacity == MESSAGES * 10 * LEAST
    writer.close()


def test_nobody_is_there_before_the_other_end_has_it_and_the_file_is_gone_then() -> None:
    writer = Writer(0)
    assert not writer.ready
    assert Path(writer.path).stat().st_mode & 0o077 == 0  # nobody else's to read
    reader = Reader(writer.path, writer.capacity)
    assert writer.ready
    assert not Path(writer.path).exists()
    assert writer.put(*message(0, 10))
    writer.close()
    assert not reader.over  # something is still in there
    reader.take()
    assert reader.over


def test_a_channel_that_nobody_took_leaves_no_file() -> None:
    writer = Writer(0)
    writer.close()
    assert not Path(writer.path).exists()
    with pytest.raises(OSError, match=r"daskfactor-"):
        Reader(writer.path, writer.capacity)


def test_no_room_in_memory_is_an_error_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(channel, "_memory_folder", lambda: str(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        Writer(0)
    assert list(tmp_path.iterdir()) == []


def test_processors_that_may_change_the_order_of_stores_get_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "_SUITABLE", False)
    with pytest.raises(OSError, match="order of stores"):
        Writer(0)


def write_many(capacity_of: int, count: int, pipe: Any) -> None:
    writer = Writer(capacity_of)
    pipe.send((writer.path, writer.capacity, this_machine()))
    for number in range(count):
        while not writer.put(*message(number, number % 5000)):
            pass
    pipe.recv()
    writer.close()


def test_between_two_processes() -> None:
    count = 20_000
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=write_many, args=(0, count, theirs))
    process.start()
    path, capacity, machine = ours.recv()
    assert machine == this_machine()
    reader = Reader(path, capacity)
    number = 0
    while number < count:
        for got in reader.take():
            assert same(got, message(number, number % 5000))
            number += 1
    ours.send("enough")
    process.join()
    assert process.exitcode == 0
    assert reader.over


class FakeLoop:
    def call_soon_threadsafe(self, function: Any) -> None:
        self.woken = True


def test_a_link_leaves_a_channel_that_is_too_small_or_that_nobody_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def band(rows: int) -> FactorBand:
        return FactorBand(0, np.ones((rows, 4), np.float32))

    def made() -> Link:
        loop = SimpleNamespace(asyncio_loop=FakeLoop())
        worker = SimpleNamespace(loop=loop, address="tcp://127.0.0.1:1")
        link = Link(SimpleNamespace(worker=worker), "tcp://127.0.0.1:2")  # type: ignore[arg-type]
        link._channel = Writer(0)
        return link

    def parcel(rows: int) -> Parcel:
        return Parcel(("token", 0), 1, 2, band(rows))

    link = made()
    assert link._channel is not None
    link.send([parcel(1)])
    assert len(link._queue) == 1  # nobody has opened the other end: a message
    reader = Reader(link._channel.path, link._channel.capacity)
    link.send([parcel(2), parcel(3)])
    [(heads, body)] = reader.take()
    assert [p.band.open().values.shape[0] for p in read(heads, body)] == [2, 3]
    assert len(link._queue) == 1
    link.send([Parcel(("token", 0), -1, -1, None, "stop")])
    assert len(link._queue) == 2  # a reason to stop is a message
    link.send([parcel(LEAST)])
    assert link._channel is None
    assert reader.over
    assert len(link._queue) == 3

    link = made()
    assert link._channel is not None
    path = Path(link._channel.path)
    monkeypatch.setattr("daskfactor.executors.connection.PATIENCE", 0.0)
    link.send([parcel(1)])
    assert link._channel is None
    assert link._refused
    assert not path.exists()
