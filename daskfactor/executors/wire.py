"""Messages between workers over plain sockets, outside of their event loops.

The cluster's own layer makes the connection and the handshake, and then hands over its socket. The
sending thread writes as much as the socket takes; a background thread writes the rest and reads
messages. Arrays are neither pickled nor copied. The same message through the event loops takes
several times as much processor time, and its sender waits for the interpreter lock.
"""

import contextlib
import logging
import pickle
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dask
import numpy as np
from distributed.comm.core import connect
from distributed.core import Status

logger = logging.getLogger(__name__)

START = struct.Struct("<QQ")
"""Header of a message: bytes of the pickle, and the number of array buffers after it."""
MAX_BUFFERS = 64
"""Buffers that one system call sends."""


def can_carry(address: str) -> bool:
    """Check whether connections to an address are plain sockets that may be taken over."""
    return (
        address.startswith("tcp://")
        and dask.config.get("distributed.comm.tcp.backend", "tornado") == "tornado"
        and hasattr(socket.socket, "sendmsg")
    )


def frame_message(message: Any) -> list[memoryview]:
    """Return the buffers of a message: a header with the pickle, and the arrays, not copied."""
    arrays: list[memoryview] = []
    head = pickle.dumps(message, 5, buffer_callback=lambda buffer: arrays.append(buffer.raw()))
    sizes = [array.nbytes for array in arrays]
    start = START.pack(len(head), len(arrays)) + struct.pack(f"<{len(arrays)}Q", *sizes) + head
    return [memoryview(start), *(array for array in arrays if array.nbytes)]


def read_messages(take: Callable[[Any], None]) -> Iterator[memoryview]:
    """Yield buffers to be filled with received bytes; call ``take`` with each complete message."""
    while True:
        start = bytearray(START.size)
        yield memoryview(start)
        size, count = START.unpack(start)
        rest = bytearray(8 * count + size)
        yield memoryview(rest)
        arrays = [np.empty(n, np.uint8) for n in struct.unpack_from(f"<{count}Q", rest)]
        yield from (array.data for array in arrays if array.nbytes)
        take(pickle.loads(memoryview(rest)[8 * count :], buffers=arrays))


class Link:
    """One direction between two workers: unsent buffers, or a partly received message."""

    def __init__(self, address: str, take: Callable[[Any], None]) -> None:
        self.address = address
        self.lock = threading.Lock()
        self.waiting: deque[memoryview] = deque()
        self.sock: socket.socket | None = None
        self.ended = False
        self._buffers = read_messages(take)
        self._buffer = next(self._buffers)

    def write(self) -> bool:
        """Send as much as the socket takes; return True if that was all. Requires the lock."""
        while self.waiting and self.sock is not None:
            pieces = [self.waiting[n] for n in range(min(MAX_BUFFERS, len(self.waiting)))]
            try:
                sent = self.sock.sendmsg(pieces)
            except BlockingIOError:
                break
            while sent:
                first = self.waiting.popleft()
                if sent < first.nbytes:
                    self.waiting.appendleft(first[sent:])
                sent -= min(sent, first.nbytes)
        return not self.waiting

    def read(self) -> None:
        """Read the bytes that have arrived.

        Raises
        ------
        ConnectionError
            If the peer has closed the connection.
        """
        assert self.sock is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                got = self.sock.recv_into(self._buffer)
                if not got:
                    raise ConnectionError("the connection has ended")
                if got < self._buffer.nbytes:
                    self._buffer = self._buffer[got:]
                    return
                self._buffer = next(self._buffers)
                if self._buffer.nbytes == START.size:  # after a complete message
                    return


class Wire:
    """Links of one worker, and the thread that serves them.

    Parameters
    ----------
    worker
        The `distributed` worker.
    take
        Called with every received message, from the wire's thread.
    lose
        Called with the address of a worker and the reason when a link to it breaks.
    """

    OPERATION = "daskfactor_link"

    def __init__(
        self, worker: Any, take: Callable[[Any], None], lose: Callable[[str, str], None]
    ) -> None:
        self._worker, self._take, self._lose = worker, take, lose
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._accepted: dict[str, Link] = {}
        self._refusing: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._requests: deque[Callable[[], Any]] = deque()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._ended = False
        self._thread: threading.Thread | None = None
        worker.handlers[self.OPERATION] = self.accept

    def carries(self, address: str) -> bool:
        """Check whether messages to an address can be sent this way, and are not refused there."""
        return not self._ended and can_carry(address) and address not in self._refusing

    def send(self, address: str, message: Any) -> None:
        """Send a message without waiting, from any thread."""
        with self._lock:
            link = self._links.get(address)
            new = link is None
            if link is None:
                link = self._links[address] = Link(address, self._take)
        pieces = frame_message(message)
        with link.lock:
            busy = bool(link.waiting)
            link.waiting.extend(pieces)
            try:
                left = link.sock is not None and not busy and not link.write()
            except OSError as error:
                self._request(partial(self._break, link, error))
                return
        if new:
            self._worker.loop.add_callback(self._connect, link)
        elif left:
            self._request(lambda: self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE))

    def close(self) -> None:
        """Close all links."""
        self._worker.handlers.pop(self.OPERATION, None)
        with self._lock:
            self._ended, has_thread = True, self._thread is not None
        if has_thread:
            self._wake()
        else:
            self._release()

    # -- connections, in the worker's event loop ----------------------------------------------

    async def _connect(self, link: Link) -> None:
        comm: Any = None
        try:
            comm = await connect(link.address, **self._worker.connection_args)  # type: ignore[no-untyped-call]
            await comm.write({"op": self.OPERATION, "reply": True, "address": self._worker.address})
            if (answer := await comm.read()) != "OK":
                self._refusing.add(link.address)
                raise ConnectionError(f"it does not hand its connection over ({answer})")
            self._begin(link, comm.stream.socket.dup())
        except Exception as error:  # noqa: BLE001  # reported by `_break`
            self._request(partial(self._break, link, error))
        finally:
            if comm is not None:
                comm.abort()  # the duplicated socket stays open

    async def accept(self, comm: Any, address: str) -> Any:
        """Take over the socket of a connection (a handler of the worker).

        An earlier link from the same worker ends without a report of a loss.
        """
        if self._ended or not hasattr(comm, "stream"):
            return "no"
        sock = comm.stream.socket.dup()
        try:
            await comm.write("OK")
        except BaseException:
            sock.close()
            raise
        comm.abort()
        link = Link(address, self._take)
        with self._lock:
            previous = self._accepted.get(address)
            self._accepted[address] = link
        if previous is not None:
            self._request(partial(self._end, previous))
        self._begin(link, sock)
        return Status.dont_reply

    def _begin(self, link: Link, sock: socket.socket) -> None:
        sock.setblocking(False)
        with self._lock, link.lock:
            if self._ended or link.ended:
                sock.close()
                return
            link.sock = sock
        self._request(lambda: self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE))

    # -- the thread ------------------------------------------------------------------------------

    def _request(self, request: Callable[[], Any]) -> None:
        """Run a function in the wire's thread."""
        self._requests.append(request)
        with self._lock:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._serve, name="daskfactor-wire")
                self._thread.daemon = True
                self._thread.start()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    def _release(self) -> None:
        for key in list((self._selector.get_map() or {}).values()):  # None if it is closed
            if key.data is not None:
                key.data.sock = None
            key.fileobj.close()  # type: ignore[union-attr]
        self._wake_sender.close()
        self._selector.close()

    def _watch(self, link: Link, events: int) -> None:
        """Register the events of a link: received bytes, and room to send."""
        if link.sock is None:
            return
        try:
            if link.sock.fileno() in self._selector.get_map():
                self._selector.modify(link.sock, events, link)
            else:
                self._selector.register(link.sock, events, link)
        except (OSError, ValueError) as error:
            self._break(link, error)

    def _serve(self) -> None:
        try:
            while not self._ended:
                for key, events in self._selector.select():
                    if key.data is None:
                        self._wake_receiver.recv(4096)
                        self._run_requests()
                    elif key.data.sock is key.fileobj:  # otherwise it has been closed
                        self._serve_link(key.data, events)
        except Exception as error:
            logger.exception("bands can neither be sent nor received any more")
            with self._lock:
                self._ended = True
                links = [*self._links.values(), *self._accepted.values()]
            for link in links:
                self._break(link, error)
        finally:
            self._release()

    def _run_requests(self) -> None:
        """Run the queued functions; a failure of one does not stop the others."""
        while self._requests:
            try:
                self._requests.popleft()()
            except Exception:
                logger.exception("a request about bands failed")

    def _serve_link(self, link: Link, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                link.read()
            if events & selectors.EVENT_WRITE:
                with link.lock:
                    if link.sock is not None and link.write():
                        self._selector.modify(link.sock, selectors.EVENT_READ, link)
        except Exception as error:  # noqa: BLE001  # the other links continue
            self._break(link, error)

    def _end(self, link: Link) -> bool:
        """Close a link; return False if it was not registered any more."""
        with self._lock:
            was_registered = False
            for links in (self._links, self._accepted):
                if links.get(link.address) is link:
                    del links[link.address]
                    was_registered = True
        with link.lock:
            sock, link.sock = link.sock, None
            link.ended = True
            link.waiting.clear()
        if sock is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
        return was_registered

    def _break(self, link: Link, error: Exception) -> None:
        """Close a broken link, and report the loss once."""
        if not self._end(link):
            return
        if not isinstance(error, OSError):
            logger.error("bands from %s cannot be read", link.address, exc_info=error)
        try:
            self._lose(link.address, f"{link.address} cannot be reached: {error}")
        except Exception:
            logger.exception("the loss of %s could not be reported", link.address)
