"""Messages between workers on sockets: whole, in order and writable, or said to be lost."""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time

import dask
import numpy as np
import pytest
from distributed.core import Server, connect

from daskfactor.executors import wire
from daskfactor.executors.wire import START, Link, Wire, can_carry, frame_message, read_messages


@pytest.fixture
def said(monkeypatch):
    """What a wire logs, whatever other tests' libraries have done to loggers."""
    lines, handler = [], logging.Handler()
    own = logging.Logger("wires of a test")  # noqa: LOG001  # one that nobody else can reach
    handler.emit = lambda record: lines.append(record.getMessage())
    own.addHandler(handler)
    monkeypatch.setattr(wire, "logger", own)
    return lines


class End:
    """One end: a server as every worker is one, its wire, and what came of it."""

    def __init__(self, server):
        self.server = server
        self.got = []
        self.lost = []
        self.open = threading.Event()
        self.open.set()
        server.connection_args = {}
        self.wire = Wire(server, self.take, lambda *news: self.lost.append(news))

    def take(self, message):
        self.open.wait(30)
        self.got.append(message)


@contextlib.asynccontextmanager
async def two_ends():
    servers = [Server({}), Server({})]
    for server in servers:
        await server
        await server.listen("tcp://127.0.0.1:0")
    ends = [End(server) for server in servers]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.open.set()
            end.wire.close()
        for server in servers:
            await server.close()


async def until(happened):
    limit = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < limit, "it did not happen within 30 s"
        await asyncio.sleep(0.005)


def run(story):
    async def tell():
        async with two_ends() as (here, there):
            await story(here, there)

    asyncio.run(tell())


def between_two(story):
    """Make a test of what happens between two ends."""

    def test():
        run(story)

    return test


async def send_first(here, there):
    """Send a message, by which the connection comes to be."""
    here.wire.send(there.server.address, "one")
    await until(lambda: there.got)


@between_two
async def test_messages_arrive_whole_and_in_order(here, there):
    sizes = [0, 1, 3, 1000, 0, 70_000, 2]
    for number, size in enumerate(sizes):
        array = np.arange(size, dtype=np.float32)
        here.wire.send(there.server.address, (number, {"values": array, "mean": array[::2]}))
    await until(lambda: len(there.got) == len(sizes))
    for number, (size, (place, arrays)) in enumerate(zip(sizes, there.got, strict=True)):
        assert place == number
        np.testing.assert_array_equal(arrays["values"], np.arange(size, dtype=np.float32))
        np.testing.assert_array_equal(arrays["mean"], np.arange(size, dtype=np.float32)[::2])
        assert all(own.flags.writeable and own.flags.aligned for own in arrays.values())


@between_two
async def test_a_receiver_that_does_not_read_makes_nobody_wait(here, there):
    """More than sockets hold: the rest goes once they have room, after what came before."""
    there.open.clear()
    began = time.monotonic()
    for number in range(40):
        here.wire.send(there.server.address, np.full(2**18, number, np.float64))
    assert time.monotonic() - began < 10
    await asyncio.sleep(0.2)
    assert len(there.got) == 0
    there.open.set()
    await until(lambda: len(there.got) == 40)
    for number, array in enumerate(there.got):
        np.testing.assert_array_equal(array, number)


@between_two
async def test_messages_from_many_threads_are_not_mixed(here, there):
    def send(thread):
        for number in range(50):
            array = np.full(1 + 400 * number, thread)
            here.wire.send(there.server.address, (thread, number, array))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    await until(lambda: len(there.got) == 200)
    for thread, number, array in there.got:
        assert array.shape == (1 + 400 * number,)
        assert (array == thread).all()
    for thread in range(4):
        assert [number for own, number, _ in there.got if own == thread] == list(range(50))


@between_two
async def test_a_worker_that_is_not_there_is_lost(here, there):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
    with dask.config.set({"distributed.comm.timeouts.connect": "0.5s"}):
        here.wire.send(address, "news")
        await until(lambda: here.lost)
    assert here.lost[0][0] == address
    assert "cannot be reached" in here.lost[0][1]


@between_two
async def test_both_sides_learn_of_an_end_and_the_next_message_connects_anew(here, there):
    await send_first(here, there)
    link = here.wire._links[there.server.address]
    assert link.sock is not None
    link.sock.shutdown(socket.SHUT_RDWR)
    await until(lambda: here.lost and there.lost)
    assert here.lost[0][0] == there.server.address
    assert there.lost[0][0] == here.server.address
    here.wire.send(there.server.address, "two")
    await until(lambda: there.got == ["one", "two"])


def test_rubbish_ends_its_connection_alone(said):
    async def story(here, there):
        here.wire.send(there.server.address, "one")
        comm = await connect(there.server.address)
        await comm.write({"op": Wire.OPERATION, "reply": True, "address": "tcp://somebody:1"})
        await comm.read()
        sock = comm.stream.socket.dup()  # type: ignore[attr-defined]
        comm.abort()
        sock.setblocking(True)
        sock.sendall(START.pack(5, 0) + b"hello")
        await until(lambda: there.lost)
        assert there.lost[0][0] == "tcp://somebody:1"
        sock.close()
        here.wire.send(there.server.address, "two")
        await until(lambda: there.got == ["one", "two"])

    run(story)
    assert "cannot be read" in said[0]


def test_a_frame_is_read_however_it_is_cut():
    message = {"a": np.arange(100.0), "b": np.zeros((0, 3)), "c": np.ones((3, 5), np.int8)}
    stream = b"".join(bytes(piece) for piece in frame_message(message)) * 2
    for cut in (1, 7, 16, 1000):
        got = []
        empty = read_messages(got.append)
        filling = next(empty)
        for low in range(0, len(stream), cut):
            part = memoryview(stream[low : low + cut])
            while part:
                size = min(len(part), filling.nbytes)
                filling[:size] = part[:size]
                part, filling = part[size:], filling[size:]
                if not filling.nbytes:
                    filling = next(empty)
        assert len(got) == 2
        for own in got:
            for name, array in message.items():
                np.testing.assert_array_equal(own[name], array)


def test_arrays_are_sent_from_where_they_are():
    array = np.arange(1000.0)
    head, own = frame_message(array)
    assert np.shares_memory(np.frombuffer(own, np.float64), array)
    size, count = struct.unpack_from("<QQ", head)
    assert (count, head.nbytes) == (1, 16 + 8 + size)


def test_sockets_alone_are_taken_over():
    assert can_carry("tcp://127.0.0.1:1")
    assert not can_carry("tls://127.0.0.1:1")
    assert not can_carry("inproc://127.0.0.1/1/1")


@between_two
async def test_the_end_of_an_old_connection_is_nothing_where_there_is_a_newer_one(here, there):
    await send_first(here, there)
    old = here.wire._links.pop(there.server.address)  # as if it had ended on this side alone
    here.wire.send(there.server.address, "two")
    await until(lambda: there.got == ["one", "two"])
    if old.sock is not None:  # else the other side has ended it
        with contextlib.suppress(OSError):
            old.sock.shutdown(socket.SHUT_RDWR)
    here.wire.send(there.server.address, "three")
    await until(lambda: len(there.got) == 3)
    await asyncio.sleep(0.1)
    assert not there.lost
    assert not here.lost


def test_what_fails_in_the_thread_does_not_end_it(said):
    async def story(here, there):
        def fail(*_):
            raise RuntimeError("no more of this")

        await send_first(here, there)
        here.wire._request(fail)
        here.wire._lose = fail
        here.wire._request(
            lambda: here.wire._break(here.wire._links[there.server.address], OSError("gone"))
        )
        await until(lambda: there.lost)
        here.wire.send(there.server.address, "two")
        await until(lambda: there.got == ["one", "two"])

    run(story)
    assert "a request about bands failed" in said
    assert any("could not be reported" in line for line in said)


@between_two
async def test_a_wire_whose_thread_has_failed_loses_its_links_and_carries_nothing_more(here, there):
    def fail():
        raise OSError(24, "Too many open files")

    await send_first(here, there)
    here.wire._run_requests = fail  # type: ignore[method-assign]
    here.wire._wake()
    await until(lambda: here.lost and there.lost)
    assert not here.wire.carries(there.server.address)
    there.wire.send(here.server.address, "two")
    await until(lambda: not there.wire.carries(here.server.address))


@between_two
async def test_a_break_is_told_once(here, there):
    await send_first(here, there)
    link = here.wire._links[there.server.address]
    for _ in range(2):  # from what was read, and from what could not be sent
        here.wire._request(lambda: here.wire._break(link, OSError("gone")))
    await until(lambda: here.lost and there.lost)
    await asyncio.sleep(0.1)
    assert len(here.lost) == len(there.lost) == 1


@between_two
async def test_a_receiver_that_cannot_hand_its_socket_over_says_no(here, there):
    assert await there.wire.accept(object(), here.server.address) == "no"

    async def refuse(comm, address):
        return "no"

    there.server.handlers[Wire.OPERATION] = refuse
    here.wire.send(there.server.address, "one")
    await until(lambda: here.lost)
    assert "does not hand its connection over (no)" in here.lost[0][1]
    assert not here.wire.carries(there.server.address)  # from now on by the event loop


@between_two
async def test_a_connection_made_while_the_wire_ends_is_closed(here, there):
    here.wire.close()
    one, other = socket.socketpair()
    here.wire._begin(Link(there.server.address, here.take), one)
    assert one.fileno() == -1
    other.close()
