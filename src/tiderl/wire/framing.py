"""One frame: a fixed prefix, a msgpack header, the raw bytes of its arrays. Never pickle.

An array inside a record goes as a short descriptor in the header and its bytes behind it: copied once when
packed, once when received. Must not know sockets or methods. What is torn, oversized or damaged is an
`InfrastructureFault`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np

from tiderl.data.errors import InfrastructureFault
from tiderl.data.spans import span

T = TypeVar("T")

MAGIC = b"TDR1"
MAX_FRAME_BYTES = 1 << 28
"""256 MiB: 20 million tokens at 13 bytes. Larger things (weights, images) never cross a channel."""

_PREFIX = struct.Struct("<4sIQ")  # magic, header bytes, array bytes
_ALIGNMENT_BYTES = 16
_ARRAY_KINDS = "biufc"  # bool, integers, floats, complex: no objects, no structured types


class ErrorText(msgspec.Struct, frozen=True):
    """An error on its way: the class's name and the three texts of a `TideError`."""

    type: str
    what: str
    where: str = ""
    hint: str = ""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header of a frame. `id` pairs a reply with its request (0: nobody waits)."""

    id: int
    method: str
    error: ErrorText | None
    body: msgspec.Raw


class _Array(msgspec.Struct, frozen=True, array_like=True):
    """Where an array's bytes are, in C order: `offset` counts from the end of the header."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Message:
    """A received frame. The body stays packed until its receiver names the type."""

    __slots__ = ("_arrays", "_body", "error", "id", "method")

    def __init__(self, envelope: Envelope, arrays: memoryview) -> None:
        self.id, self.method, self.error = envelope.id, envelope.method, envelope.error
        self._body, self._arrays = envelope.body, arrays

    def payload(self, kind: type[T] | Any) -> T:
        """The body as `kind`, its arrays writable views on the frame. `InfrastructureFault` if damaged."""
        try:
            with span("unpack"):
                return msgspec.msgpack.decode(self._body, type=kind, dec_hook=self._array)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise InfrastructureFault(f"a {self.method or 'reply'} message is damaged: {error}") from error

    def _array(self, kind: type, value: Any) -> Any:
        if kind is not np.ndarray:
            raise TypeError(f"no way to decode {kind!r}")
        place = msgspec.convert(value, _Array)
        dtype = np.dtype(place.dtype)
        if dtype.kind not in _ARRAY_KINDS or place.offset < 0 or any(size < 0 for size in place.shape):
            raise ValueError(f"no array: {place}")
        count = math.prod(place.shape)
        if place.offset + count * dtype.itemsize > len(self._arrays):
            raise ValueError(f"an array reaches past the frame: {place}")
        if count == 0:
            return np.empty(place.shape, dtype)
        return np.frombuffer(self._arrays, dtype, count, place.offset).reshape(place.shape)


def pack(
    id: int,
    method: str,
    payload: Any = None,
    error: ErrorText | None = None,
    limit_bytes: int = MAX_FRAME_BYTES,
) -> bytearray:
    """One frame, ready to send. Raises `InfrastructureFault` for what cannot be sent or is over the limit."""
    arrays: list[np.ndarray] = []
    offsets: list[int] = []
    end = 0

    def describe(value: Any) -> Any:
        nonlocal end
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip())
        arrays.append(value)
        offsets.append(end)
        place = _Array(end, value.dtype.str, value.shape)
        end += -(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return place

    try:
        body = msgspec.msgpack.encode(payload, enc_hook=describe)
    except (TypeError, ValueError, OverflowError, RecursionError) as cause:
        raise InfrastructureFault(f"a {method or 'reply'} message cannot be sent: {cause}") from cause
    header = msgspec.msgpack.encode(Envelope(id, method, error, msgspec.Raw(body)))
    start = _PREFIX.size + len(header)
    if start + end > limit_bytes:
        raise InfrastructureFault(
            f"a {method or 'reply'} message of {start + end} bytes is over the limit of {limit_bytes}"
        )
    frame = bytearray(start + end)
    _PREFIX.pack_into(frame, 0, MAGIC, len(header), end)
    frame[_PREFIX.size : start] = header
    for array, offset in zip(arrays, offsets, strict=True):
        if array.size:
            np.frombuffer(frame, array.dtype, array.size, start + offset).reshape(array.shape)[...] = array
    return frame


class FrameReader:
    """Cuts a stream of bytes into messages, whatever the pieces it comes in."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._prefix = bytearray(_PREFIX.size)
        self._frame: bytearray | None = None  # header and arrays, once the prefix is known
        self._header_bytes = 0
        self._filled = 0

    @property
    def torn(self) -> bool:
        """True while a frame has begun and not ended: the peer died in the middle of a send."""
        return self._frame is not None or self._filled > 0

    def feed(self, data: bytes | memoryview) -> Iterator[Message]:
        """The messages that `data` completes. Raises `InfrastructureFault` for what is no frame."""
        rest = memoryview(data)
        while rest:
            target = self._prefix if self._frame is None else self._frame
            taken = min(len(rest), len(target) - self._filled)
            target[self._filled : self._filled + taken] = rest[:taken]
            self._filled += taken
            rest = rest[taken:]
            if self._filled < len(target):
                return
            self._filled = 0
            if self._frame is None:
                self._open()
            else:
                frame, self._frame = self._frame, None
                yield self._message(frame)

    def _open(self) -> None:
        magic, header_bytes, array_bytes = _PREFIX.unpack(self._prefix)
        if magic != MAGIC:
            raise InfrastructureFault(f"what came over the channel is no frame: {bytes(magic)!r}")
        if header_bytes == 0 or _PREFIX.size + header_bytes + array_bytes > self._limit_bytes:
            raise InfrastructureFault(
                f"a frame of {header_bytes} + {array_bytes} bytes is over the limit of {self._limit_bytes}"
            )
        self._header_bytes = header_bytes
        self._frame = bytearray(header_bytes + array_bytes)

    def _message(self, frame: bytearray) -> Message:
        view = memoryview(frame)
        try:
            envelope = msgspec.msgpack.decode(view[: self._header_bytes], type=Envelope)
        except (msgspec.DecodeError, ValueError) as error:
            raise InfrastructureFault(f"a frame's header is damaged: {error}") from error
        return Message(envelope, view[self._header_bytes :])
