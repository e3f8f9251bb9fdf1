"""Messages between workers on plain sockets, without the event loops of either.

A connection is made, and greeted, by the cluster's own layer, which then hands its socket
over. From there on whoever sends writes as much as the socket takes, a thread of its own sees
to the rest and to what arrives, and arrays are neither pickled nor copied: through the event
loops a band costs several times as much of a processor, and makes whoever sends it wait for
the interpreter.
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
"""How messages begin: the bytes of what is pickled, and the number of arrays beside it."""
PIECES = 64
"""Pieces of memory that one call of the system is given to send."""


def can_carry(address: str) -> bool:
    """Whether the connections to an address are sockets that may be taken over."""
    return (
        address.startswith("tcp://")
        and dask.config.get("distributed.comm.tcp.backend", "tornado") == "tornado"
        and hasattr(socket.socket, "sendmsg")
    )


def framed(message: Any) -> list[memoryview]:
    """Return a message as the pieces of memory that are sent, arrays where they are."""
    arrays: list[memoryview] = []
    head = pickle.dumps(message, 5, buffer_callback=lambda own: arrays.append(own.raw()))
    sizes = [array.nbytes for array in arrays]
    start = START.pack(len(head), len(arrays)) + struct.pack(f"<{len(arrays)}Q", *sizes) + head
    return [memoryview(start), *(array for array in arrays if array.nbytes)]


def unframed(take: Callable[[Any], None]) -> Iterator[memoryview]:
    """Yield memory to be filled with what arrives, and hand every message over when it is whole."""
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
    """One direction between two workers: what is to be sent, or what arrives."""

    def __init__(self, address: str, take: Callable[[Any], None]) -> None:
        self.address = address
        self.lock = threading.Lock()
        self.waiting: deque[memoryview] = deque()
        self.sock: socket.socket | None = None
        self.ended = False
        self._empty = unframed(take)
        self._filling = next(self._empty)

    def write(self) -> bool:
        """Send what the socket takes; whether that was all. Called with the lock held."""
        while self.waiting and self.sock is not None:
            pieces = [self.waiting[n] for n in range(min(PIECES, len(self.waiting)))]
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
        """Take in what has arrived.

        Raises
        ------
        ConnectionError
            If the other side has ended the connection.
        """
        assert self.sock is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                got = self.sock.recv_into(self._filling)
                if not got:
                    raise ConnectionError("the connection has ended")
                if got < self._filling.nbytes:
                    self._filling = self._filling[got:]
                    return
                self._filling = next(self._empty)
                if self._filling.nbytes == START.size:  # as after a message: often that was all
                    return


class Wire:
    """The links of one worker, and the thread that serves them.

    Parameters
    ----------
    worker
        The `distributed` worker.
    take
        Called with every message that arrives, from the wire's thread.
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
        self._bell, self._rung = socket.socketpair()
        self._rung.setblocking(False)
        self._selector.register(self._rung, selectors.EVENT_READ)
        self._ended = False
        self._thread: threading.Thread | None = None
        worker.handlers[self.OPERATION] = self.accept

    def carries(self, address: str) -> bool:
        """Whether messages to an address may go this way; not to who has refused it."""
        return not self._ended and can_carry(address) and address not in self._refusing

    def send(self, address: str, message: Any) -> None:
        """Send a message without waiting, from any thread."""
        with self._lock:
            link = self._links.get(address)
            new = link is None
            if link is None:
                link = self._links[address] = Link(address, self._take)
        pieces = framed(message)
        with link.lock:
            busy = bool(link.waiting)
            link.waiting.extend(pieces)
            try:
                left = link.sock is not None and not busy and not link.write()
            except OSError as error:
                self._ask(partial(self._break, link, error))
                return
        if new:
            self._worker.loop.add_callback(self._connect, link)
        elif left:
            self._ask(lambda: self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE))

    def close(self) -> None:
        """End all links."""
        self._worker.handlers.pop(self.OPERATION, None)
        with self._lock:
            self._ended, begun = True, self._thread is not None
        if begun:
            self._ring()
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
        except Exception as error:  # noqa: BLE001  # whoever waits for the link is told
            self._ask(partial(self._break, link, error))
        finally:
            if comm is not None:
                comm.abort()  # which leaves the copy of its socket as it is

    async def accept(self, comm: Any, address: str) -> Any:
        """Take the socket of a connection over; the operation's handler.

        An earlier one from there ends without a word: who has made a new one works.
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
            old = self._accepted.get(address)
            self._accepted[address] = link
        if old is not None:
            self._ask(partial(self._end, old))
        self._begin(link, sock)
        return Status.dont_reply

    def _begin(self, link: Link, sock: socket.socket) -> None:
        sock.setblocking(False)
        with self._lock, link.lock:
            if self._ended or link.ended:
                sock.close()
                return
            link.sock = sock
        self._ask(lambda: self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE))

    # -- the thread ------------------------------------------------------------------------------

    def _ask(self, request: Callable[[], Any]) -> None:
        """Have the wire's thread do something."""
        self._requests.append(request)
        with self._lock:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._serve, name="daskfactor-wire")
                self._thread.daemon = True
                self._thread.start()
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")

    def _release(self) -> None:
        for own in list((self._selector.get_map() or {}).values()):  # none once it was closed
            if own.data is not None:
                own.data.sock = None
            own.fileobj.close()  # type: ignore[union-attr]
        self._bell.close()
        self._selector.close()

    def _watch(self, link: Link, events: int) -> None:
        """Look out for what arrives, and if asked for until more can be sent."""
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
                        self._rung.recv(4096)
                        self._answer()
                    elif key.data.sock is key.fileobj:  # else it has ended since
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

    def _answer(self) -> None:
        """Do what the thread was asked for; what fails keeps nothing else from being done."""
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
        except Exception as error:  # noqa: BLE001  # one link ends, the others go on
            self._break(link, error)

    def _end(self, link: Link) -> bool:
        """End a link; whether it was one that counted until now."""
        with self._lock:
            counted = False
            for known in (self._links, self._accepted):
                if known.get(link.address) is link:
                    del known[link.address]
                    counted = True
        with link.lock:
            sock, link.sock = link.sock, None
            link.ended = True
            link.waiting.clear()
        if sock is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
        return counted

    def _break(self, link: Link, error: Exception) -> None:
        """End a link that does not work any more, and tell of it, once."""
        if not self._end(link):
            return
        if not isinstance(error, OSError):
            logger.error("bands from %s cannot be read", link.address, exc_info=error)
        try:
            self._lose(link.address, f"{link.address} cannot be reached: {error}")
        except Exception:
            logger.exception("what counts on %s was not told that it has gone", link.address)
