"""What environments print: kept out of the terminal and of the protocol, capped, the last lines remembered
for faults.

Python's own prints are told apart by the context they are printed in (a thread, an asyncio task), so that
each environment keeps its own last lines. Must not know environments or processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

LINES_KEPT = 5
LINE_CHARACTERS_MAX = 500
FORWARD_CHARACTERS_MAX = 100_000
"""What one environment may write to its worker's log; a flood past that is counted and dropped."""
LOG_BYTES_MAX = 1_000_000
"""A worker's log begins again when it is longer."""


class LastLines:
    """The last lines that one environment printed."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._line = ""
        self.characters = 0

    def write(self, text: str) -> None:
        self.characters += len(text)
        *whole, rest = text[-LINES_KEPT * LINE_CHARACTERS_MAX :].split("\n")
        for line in whole:
            self._lines.append((self._line + line)[:LINE_CHARACTERS_MAX])
            self._line = ""
        self._line = (self._line + rest)[:LINE_CHARACTERS_MAX]

    def lines(self) -> list[str]:
        """Oldest first, blank ones left out."""
        return [line for line in (*self._lines, self._line) if line.strip()]


_printer: ContextVar[LastLines | None] = ContextVar("printer", default=None)


@contextlib.contextmanager
def printed_by(lines: LastLines) -> Iterator[None]:
    """What this context prints, while a `PrintRouter` is in place, is the environment's that `lines` belongs
    to."""
    token = _printer.set(lines)
    try:
        yield
    finally:
        _printer.reset(token)


class PrintRouter:
    """Stands in for `sys.stdout` or `sys.stderr`. An environment's prints go to its `LastLines` and, where
    `forward`, on to the stream up to a cap; everybody else's go straight on."""

    def __init__(self, stream: TextIO, *, forward: bool) -> None:
        self._stream = stream
        self._forward = forward

    def write(self, text: str) -> int:
        lines = _printer.get()
        if lines is None:
            return self._stream.write(text)
        lines.write(text)
        if self._forward and lines.characters <= FORWARD_CHARACTERS_MAX:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RoutedPrints:
    """Routers in place of `sys.stdout` and `sys.stderr`, once however many ask for them, gone with the
    last."""

    def __init__(self) -> None:
        self._users = 0
        self._originals: tuple[TextIO, TextIO] | None = None
        self._routers: tuple[PrintRouter, PrintRouter] | None = None

    def acquire(self, *, forward: bool) -> None:
        self._users += 1
        if self._users == 1:
            self._originals = sys.stdout, sys.stderr
            self._routers = PrintRouter(sys.stdout, forward=forward), PrintRouter(sys.stderr, forward=forward)
            sys.stdout, sys.stderr = self._routers

    def release(self) -> None:
        self._users -= 1
        if self._users == 0 and self._originals is not None and self._routers is not None:
            if sys.stdout is self._routers[0]:  # else somebody replaced it since and will restore it
                sys.stdout = self._originals[0]
            if sys.stderr is self._routers[1]:
                sys.stderr = self._originals[1]


ROUTED_PRINTS = RoutedPrints()


def capture_process_output(log: Path) -> None:
    """Let file descriptors 1 and 2 of this process, and of what it starts, write to `log`, at most
    `LOG_BYTES_MAX`."""
    readable, writable = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(writable, 1)
    os.dup2(writable, 2)
    os.close(writable)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threading.Thread(target=_copy, args=(readable, log), name="output", daemon=True).start()


def last_lines_of(log: Path) -> list[str]:
    """The last lines of a log file; none when there is no file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LINES_KEPT * LINE_CHARACTERS_MAX))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line[:LINE_CHARACTERS_MAX] for line in text.splitlines() if line.strip()][-LINES_KEPT:]


def _copy(readable: int, log: Path) -> None:
    with log.open("ab") as file:
        while data := os.read(readable, 1 << 16):
            try:
                if file.tell() + len(data) > LOG_BYTES_MAX:
                    file.truncate(0)
                    file.seek(0)
                file.write(data)
                file.flush()
            except OSError:
                continue  # a full disk must not stop the environment: its print is lost
