"""Where events go: compressed segments of JSON lines in the run directory, or one hash (I10).

`emit` never waits for more than a buffered write: lines reach the file at least once a second of events and at close,
and are readable from then on, also after kill -9; so is everything up to an event of `flush_after` when it comes. Knows
nothing of what the events mean.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tiderl.data.errors import CheckpointError
from tiderl.data.events import EVENTS_VERSION, AnyEvent, Event, decode_event, encode_event
from tiderl.runtime.ports import Recorder

FLUSH_EVERY_S = 1.0  # of the events' own time
FLUSH_BYTES = 1 << 16
SEGMENT_BYTES = 1 << 24  # of lines before compression; then the next file begins
_LEVEL = 1  # 10 times smaller at 100 MB/s and more; higher levels cost the loop


class SegmentRecorder:
    """Writes `events-000001.jsonl.gz` and so on into `directory`, after those that are there."""

    def __init__(
        self, directory: Path | str, *, segment_bytes: int = SEGMENT_BYTES, flush_after: tuple[type[Event], ...] = ()
    ) -> None:
        self._directory = Path(directory)
        self._flush_after = flush_after
        self._segment_bytes = segment_bytes
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"no events can be written: {error.strerror}", where=str(directory)) from error
        self._number = max((_number(path) for path in segments(self._directory)), default=0)
        self._file: gzip.GzipFile | None = None
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._written_bytes = 0
        self._flushed_s = 0.0
        self._closed = False

    def emit(self, event: Event) -> None:
        if self._closed:
            raise CheckpointError("the recorder is closed", where=str(self._directory))
        line = encode_event(event)
        self._lines.append(line)
        self._waiting_bytes += len(line) + 1
        if (
            event.t_s - self._flushed_s >= FLUSH_EVERY_S
            or self._waiting_bytes >= FLUSH_BYTES
            or isinstance(event, self._flush_after)
        ):
            self.flush()
            self._flushed_s = event.t_s

    def flush(self) -> None:
        """Everything emitted so far becomes readable. Raises `CheckpointError` when the disk refuses."""
        if not self._lines:
            return
        try:
            if self._file is None:
                self._begin()
            assert self._file is not None
            self._file.write(b"\n".join(self._lines) + b"\n")
            self._file.flush()
            self._written_bytes += self._waiting_bytes
            self._lines, self._waiting_bytes = [], 0
            if self._written_bytes >= self._segment_bytes:
                self._end()
        except OSError as error:
            raise CheckpointError(f"events cannot be written: {error.strerror}", where=str(self._directory)) from error

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self.flush()
            self._end()
            self._closed = True

    def _begin(self) -> None:
        self._number += 1
        path = self._directory / f"events-{self._number:06d}.jsonl.gz"
        self._file = gzip.GzipFile(path, "xb", compresslevel=_LEVEL)
        self._file.write(json.dumps({"events_version": EVENTS_VERSION}).encode() + b"\n")
        self._written_bytes = 0

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class HashRecorder:
    """The SHA-256 of the event lines and their number; passes events on to `also` where one is given."""

    def __init__(self, also: Recorder | None = None) -> None:
        self._hash = hashlib.sha256()
        self._also = also
        self.events = 0

    def emit(self, event: Event) -> None:
        self._hash.update(encode_event(event) + b"\n")
        self.events += 1
        if self._also is not None:
            self._also.emit(event)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def segments(directory: Path | str) -> list[Path]:
    """The segment files, in order."""
    return sorted(Path(directory).glob("events-*.jsonl.gz"), key=_number)


def read_events(directory: Path | str) -> Iterator[AnyEvent]:
    """All events in order; a line that a crash tore at the end of a segment is left out.

    Raises `CheckpointError` for a newer version and for a line that is damaged otherwise.
    """
    for path in segments(directory):
        lines = _lines(path)
        header = next(lines, None)
        if header is None:
            continue
        try:
            version = json.loads(header)["events_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError("no event segment: its header is damaged", where=str(path)) from error
        if version > EVENTS_VERSION:
            raise CheckpointError(
                f"events of version {version}, this TideRL knows up to {EVENTS_VERSION}",
                where=str(path),
                hint="update TideRL",
            )
        for number, line in enumerate(lines, start=2):
            try:
                yield decode_event(line)
            except msgspec.DecodeError as error:
                raise CheckpointError(f"line {number} is no event: {error}", where=str(path)) from error


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a segment, as far as it can be decompressed."""
    unpack = zlib.decompressobj(wbits=31)  # gzip
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 16):
            try:
                rest += unpack.decompress(chunk)
            except zlib.error:
                return  # torn by a crash: what follows was never whole
            *whole, rest = rest.split(b"\n")
            yield from whole


def _number(path: Path) -> int:
    digits = path.name.removeprefix("events-").partition(".")[0]
    return int(digits) if digits.isdigit() else 0
