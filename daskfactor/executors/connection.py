"""One worker's way to another: a channel where both are on one machine, else a connection."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distributed.protocol.serialize import Serialize

from daskfactor.executors.channel import MOST, Writer, message_size, this_machine
from daskfactor.executors.messages import SMALL, Parcel, write

if TYPE_CHECKING:
    from daskfactor.executors.worker_plugin import Post

OPERATION = "daskfactor_post"
ATTACH = "daskfactor_attach"

PATIENCE = 10.0
"""Seconds that another worker has to open its end of a channel."""

logger = logging.getLogger(__name__)


class Link:
    """A connection to one worker, with a queue in front; safe to use from any thread."""

    def __init__(self, post: "Post", address: str) -> None:
        self._post = post
        self._address = address
        self._queue: deque[Parcel] = deque()
        self._loop: asyncio.AbstractEventLoop = post.worker.loop.asyncio_loop
        self._comm: Any = None
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._woken = False
        self._channel: Writer | None = None
        self._refused = False
        self.closed = False

    def send(self, parcels: Sequence[Parcel]) -> None:
        """Send parcels; those that are queued by the time of sending go in one message."""
        with self._lock:
            if self._through_channel(parcels):
                return
            self._queue.extend(parcels)
            if self._woken:
                return
            self._woken = True
        self._loop.call_soon_threadsafe(self._wake)

    @property
    def has_channel(self) -> bool:
        """Whether the other end reads a channel of ours."""
        channel = self._channel
        return channel is not None and channel.ready

    def _through_channel(self, parcels: Sequence[Parcel]) -> bool:
        """Whether parcels could go without a message; a reason to stop never does."""
        if self._channel is None:
            return False
        if not self._channel.ready:
            if self._channel.age > PATIENCE:  # an answer that will not come
                self._channel.close()
                self._channel, self._refused = None, True
            return False
        if any(parcel.band is None for parcel in parcels):
            return False
        fields = write(parcels)
        if 2 * message_size(fields) > self._channel.capacity < MOST:
            self._channel.close()  # made for smaller ones: the next message offers another
            self._channel = None
            return False
        return self._channel.put(**fields)

    def _wake(self) -> None:
        self._task = asyncio.ensure_future(self._pump())

    async def _pump(self) -> None:
        while True:
            with self._lock:
                parcels = list(self._queue)
                self._queue.clear()
                if not parcels:
                    self._woken = False
                    return
            try:
                if self._comm is None:
                    self._comm = await self._post.worker.rpc.connect(self._address)
                    self._watcher = asyncio.ensure_future(self._watch())
                await self._comm.write({"op": OPERATION, "reply": False, **self._fields(parcels)})
                if self._channel is None and self._is_near():
                    await self._offer(parcels)
            except (OSError, RuntimeError, TimeoutError) as error:
                self._lose(f"{self._address} cannot be reached: {error}")
                return

    def _fields(self, parcels: list[Parcel]) -> dict[str, Any]:
        if self._address.startswith("inproc:"):  # passed on as it is
            return {"heads": b"", "body": Serialize(parcels)}  # type: ignore[no-untyped-call]
        fields = write(parcels)
        if len(fields["body"]) > SMALL:
            return {**fields, "body": Serialize(fields["body"])}  # type: ignore[no-untyped-call]
        return {**fields, "body": fields["body"].tobytes()}

    def _is_near(self) -> bool:
        """Whether the other worker's address is on this one's host, in another process."""
        near, far = (split_address(a) for a in (self._post.worker.address, self._address))
        return near[0] == far[0] != "inproc" and near[1] == far[1]

    async def _offer(self, parcels: list[Parcel]) -> None:
        """Open a channel, and tell the other end where; it is used once that has answered."""
        if self._refused or all(parcel.band is None for parcel in parcels):
            return
        try:
            channel = Writer(message_size(write(parcels)))
        except OSError as error:
            self._refused = True
            logger.info("no channel to %s: %s", self._address, error)
            return
        self._channel = channel
        await self._comm.write(
            {
                "op": ATTACH,
                "reply": False,
                "path": channel.path,
                "capacity": channel.capacity,
                "machine": this_machine(),
            }
        )

    async def _watch(self) -> None:
        """Wait for the other end to go: nothing is ever sent back."""
        try:
            await self._comm.read()
        except (OSError, RuntimeError):
            self._lose(f"{self._address} has gone")

    def _lose(self, reason: str) -> None:
        if not self.closed:
            self._post.lose(self._address, reason)

    def close(self) -> None:
        """Let go of the connection; in the event loop's thread."""
        self.closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._comm is not None:
            self._comm.abort()
        with self._lock:
            if self._channel is not None:
                self._channel.close()


def split_address(address: str) -> tuple[str, str]:
    """Protocol and host."""
    protocol, _, place = address.rpartition("://")
    return protocol, place.rpartition(":")[0]
