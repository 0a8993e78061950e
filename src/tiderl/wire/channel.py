"""Both ends of a channel over one stream socket: `Channel` blocks, `Connection` awaits (the driver).

A request carries an id and gets exactly one reply; id 0 is a message nobody waits for. When a channel closes,
every pending request fails at once. Must not know what the methods mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tiderl.data.errors import ChannelTimeout, InfrastructureFault
from tiderl.data.spans import IDLE, span
from tiderl.wire.faults import describe_error, restore_error
from tiderl.wire.framing import FrameReader, Message, pack

T = TypeVar("T")

_READ_BYTES = 1 << 18
_GATHERED_BYTES = 1 << 16
"""Frames are put together up to about so much; larger ones are not worth the copy."""


class Channel:
    """The blocking end. One thread receives; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.socket = sock
        self._poller = select.poll()  # unlike select, for any number of open files
        self._poller.register(sock, select.POLLIN)
        self._reader = FrameReader()
        self._received: deque[Message] = deque()
        self._waiting: deque[bytearray] = deque()  # frames to send
        self._writing = threading.Lock()
        self._gathers = False
        self.sent_bytes = 0

    def notify(self, method: str, payload: Any = None) -> None:
        """Send a message that nobody waits for. Raises `InfrastructureFault` when the channel is closed."""
        with span("send"):
            self._send(pack(0, method, payload))

    def reply(self, request: Message, payload: Any = None) -> None:
        """Answer a request; nothing is sent for a message that nobody waits for."""
        if request.id:
            with span("send"):
                self._send(pack(request.id, "", payload))

    def reply_error(self, request: Message, error: BaseException) -> None:
        if request.id:
            with span("send"):
                self._send(pack(request.id, "", error=describe_error(error)))

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when none came in `timeout_s` (0 = look only, None = wait for ever).

        Raises `InfrastructureFault` when the peer closed, in the middle of a frame or between two.
        """
        while not self._received:
            with span("receive" if timeout_s == 0 else IDLE):
                if not self._poller.poll(None if timeout_s is None else timeout_s * 1000):
                    return None
            with span("receive"):
                self._read()
        return self._received.popleft()

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> None:
        try:
            data = self.socket.recv(_READ_BYTES)
        except OSError as error:
            raise InfrastructureFault(f"the channel broke: {error}") from error
        if not data:
            raise InfrastructureFault(
                "the channel closed in the middle of a frame" if self._reader.torn else "the channel closed"
            )
        self._received.extend(self._reader.feed(data))

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """What is sent meanwhile goes as one piece at the end: each piece wakes the peer. For a process of one
        thread."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            if self._waiting:
                with span("send"):
                    self._flush()

    def _send(self, frame: bytearray) -> None:
        self._waiting.append(frame)
        if not self._gathers:
            self._flush()

    def _flush(self) -> None:
        """Sends what waits, in order. A thread that finds another one at it leaves its frame to that one: to wait for
        it would take as long as all threads that compute meanwhile hold the interpreter."""
        while self._waiting and self._writing.acquire(blocking=False):
            try:
                while self._waiting:
                    self._write(self._waiting.popleft())
            finally:
                self._writing.release()

    def _write(self, piece: bytearray) -> None:
        while self._waiting and len(piece) < _GATHERED_BYTES:
            piece += self._waiting.popleft()
        try:
            self.socket.sendall(piece)
        except OSError as error:
            raise InfrastructureFault(f"the channel broke: {error}") from error
        self.sent_bytes += len(piece)


class Connection(asyncio.Protocol):
    """The awaiting end. Make it with `Connection.open`; all methods belong to the event loop's thread."""

    def __init__(
        self, peer: str, lost: type[InfrastructureFault], on_message: Callable[[Message], None] | None
    ) -> None:
        self.peer = peer
        self._lost = lost
        self._on_message = on_message
        self._reader = FrameReader()
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._last_id = 0
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytearray] = []  # frames that go at the end of this turn of the loop
        self._reason = ""
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        peer: str,
        *,
        lost: type[InfrastructureFault] = InfrastructureFault,
        on_message: Callable[[Message], None] | None = None,
    ) -> Connection:
        """Take over `sock`. `lost` is raised for all that waits when the channel closes; `on_message` gets
        what the peer sends unasked."""
        sock.setblocking(False)
        connection = cls(peer, lost, on_message)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
        return connection

    @property
    def is_open(self) -> bool:
        """False from the moment at which a write would go nowhere, also while the loop has yet to say so."""
        return not self._closed.done() and self._transport is not None and not self._transport.is_closing()

    async def closed(self) -> str:
        """Wait until the channel is closed, by whomever; the reason."""
        return await asyncio.shield(self._closed)

    async def request(self, method: str, payload: Any, result: type[T] | Any, deadline_s: float | None = None) -> T:
        """Ask and wait for the answer, decoded as `result`.

        Raises what the peer raised, `ChannelTimeout` after `deadline_s`, the `lost` class on a close.
        """
        self._last_id += 1
        number = self._last_id
        with span("send"):
            self._write(pack(number, method, payload))
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with asyncio.timeout(deadline_s):
                message = await answer
        except TimeoutError:
            raise ChannelTimeout(f"no answer to {method} within {deadline_s:g} s", where=self.peer) from None
        finally:
            self._pending.pop(number, None)
        if message.error is not None:
            raise restore_error(message.error, self.peer)
        answered: T = message.payload(result)
        return answered

    def notify(self, method: str, payload: Any = None) -> None:
        """Send a message that nobody waits for. Raises the connection's `lost` class when it is closed."""
        with span("send"):
            self._write(pack(0, method, payload))

    async def close(self) -> None:
        """Idempotent. What is pending fails."""
        self.fail("closed by us")
        await asyncio.sleep(0)

    def _write(self, frame: bytearray) -> None:
        if not self.is_open or self._transport is None:
            raise self._lost(f"the channel is closed: {self._reason or 'the peer is gone'}", where=self.peer)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(frame)

    def _flush(self) -> None:
        """One write for all that the tasks of this turn of the loop said: each write wakes the peer, which would begin
        with the first alone."""
        frames, self._waiting = self._waiting, []
        if self._transport is None or not self.is_open:
            return  # who waits for an answer has been told
        with span("send"):
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def fail(self, reason: str) -> None:
        """Close now; everything pending fails with `reason`. The first reason counts."""
        if self._closed.done():
            return
        self._reason = reason
        self._closed.set_result(reason)
        if self._transport is not None:
            self._transport.abort()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._lost(f"the channel closed: {reason}", where=self.peer))
        self._pending.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            with span("receive"):
                for message in self._reader.feed(data):
                    self._deliver(message)
        except InfrastructureFault as fault:
            self.fail(fault.what)

    def _deliver(self, message: Message) -> None:
        if message.method:
            if self._on_message is not None:
                self._on_message(message)
            return
        answer = self._pending.get(message.id)  # None: its request timed out or was cancelled
        if answer is not None and not answer.done():
            answer.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        if self._reader.torn:
            self.fail("the peer died in the middle of a frame")
        else:
            self.fail("the peer closed it" if error is None else str(error) or type(error).__name__)
