"""Where a process's time goes: named spans of its threads, each with the seconds that no span inside it took.

On the thread that called `start` the spans exclude each other, so they add up to its wall time. Off, the default, a
span is one look-up. A span never holds an `await`: other tasks would run inside it. Must not be asked for a decision.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

IDLE = "idle"
"""The thread waits and has nothing to do."""

Clock = Callable[[], float]


class SpanTotal(msgspec.Struct, frozen=True):
    """One span, added up. `cpu_s`: of the thread that was in it."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    count: int = 0


class ProcessSpans(msgspec.Struct, frozen=True):
    """One process since its `start`, or between two moments. `spans` are the main thread's and add up to `wall_s`;
    `beside` are those of its other threads, which overlap; `cpu_s` is the whole process's."""

    pid: int
    wall_s: float
    cpu_s: float
    spans: dict[str, SpanTotal]
    beside: dict[str, SpanTotal]


@runtime_checkable
class Spanned(Protocol):
    """What has processes of its own."""

    async def spans(self) -> Sequence[tuple[str, ProcessSpans]]:
        """Of each process that is profiled and answers: which host it belongs to, and its spans so far."""


class _Span:
    """A span of one thread: its totals, and the context in which they grow."""

    __slots__ = ("_clock", "count", "cpu_s", "wall_s")

    def __init__(self, clock: ThreadClock) -> None:
        self._clock = clock
        self.wall_s = self.cpu_s = 0.0
        self.count = 0

    def __enter__(self) -> None:
        self._clock.settle()
        self._clock.stack.append(self)
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self._clock.settle()
        self._clock.stack.pop()


class ThreadClock:
    """The spans of one thread. What is in no span belongs to `root`."""

    def __init__(self, root: str, wall: Clock = time.perf_counter, cpu: Clock = time.thread_time) -> None:
        self._wall, self._cpu = wall, cpu
        self._spans: dict[str, _Span] = {root: _Span(self)}
        self.stack = [self._spans[root]]
        self._wall_s, self._cpu_s = wall(), cpu()

    def span(self, name: str) -> _Span:
        found = self._spans.get(name)
        if found is None:
            found = self._spans[name] = _Span(self)
        return found

    def settle(self) -> None:
        """The time since the last change goes to the span that is open."""
        wall_s, cpu_s = self._wall(), self._cpu()
        top = self.stack[-1]
        top.wall_s += wall_s - self._wall_s
        top.cpu_s += cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s

    def totals(self) -> dict[str, SpanTotal]:
        """So far, the open spans included. To be asked on the clock's own thread."""
        self.settle()
        return {name: SpanTotal(span.wall_s, span.cpu_s, span.count) for name, span in self._spans.items()}


class _Profiler:
    """The spans of one process."""

    def __init__(self, root: str) -> None:
        self.clock = ThreadClock(root)
        self._beside: dict[str, SpanTotal] = {}
        self._lock = threading.Lock()
        self._started_s, self._started_cpu_s = time.perf_counter(), time.process_time()

    def beside(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _OFF if _here.inside else self._timed(name)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        _here.inside = True
        try:
            yield
        finally:
            _here.inside = False
            spent = SpanTotal(time.perf_counter() - wall_s, time.thread_time() - cpu_s, 1)
            with self._lock:
                self._beside[name] = _add(self._beside.get(name, SpanTotal()), spent)

    def taken(self) -> ProcessSpans:
        wall_s, cpu_s = time.perf_counter() - self._started_s, time.process_time() - self._started_cpu_s
        with self._lock:
            beside = dict(self._beside)
        return ProcessSpans(os.getpid(), wall_s, cpu_s, self.clock.totals(), beside)


class _Here(threading.local):
    """What the calling thread knows."""

    profiler: _Profiler | None = None
    inside = False  # a span beside the main thread: those within it are part of it


_here = _Here()
_process: _Profiler | None = None
_OFF = contextlib.nullcontext()


def start(root: str) -> None:
    """Profile this process from now on; the calling thread is its main thread, `root` what it does outside spans."""
    global _process
    _process = _here.profiler = _Profiler(root)


def stop() -> None:
    """No longer; what was counted is gone. On the thread that called `start`."""
    global _process
    _process = _here.profiler = None


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """A context whose time counts as `name`: the very same one at every call of a thread, so enter it at once."""
    if (profiler := _here.profiler) is not None:
        return profiler.clock.span(name)
    return _OFF if _process is None else _process.beside(name)


def taken() -> ProcessSpans | None:
    """This process so far; None when it is not profiled. On the thread that called `start`."""
    return None if _here.profiler is None else _here.profiler.taken()


def since(newer: ProcessSpans, older: ProcessSpans | None) -> ProcessSpans:
    """What came between two moments of one process; None: its start."""
    if older is None:
        return newer
    return ProcessSpans(
        newer.pid,
        newer.wall_s - older.wall_s,
        newer.cpu_s - older.cpu_s,
        _minus(newer.spans, older.spans),
        _minus(newer.beside, older.beside),
    )


def together(parts: Iterable[ProcessSpans]) -> ProcessSpans:
    """Several processes, or lives of one, added up; the `pid` has no meaning then."""
    wall_s = cpu_s = 0.0
    spans: dict[str, SpanTotal] = {}
    beside: dict[str, SpanTotal] = {}
    for part in parts:
        wall_s, cpu_s = wall_s + part.wall_s, cpu_s + part.cpu_s
        for sums, more in ((spans, part.spans), (beside, part.beside)):
            for name, total in more.items():
                sums[name] = _add(sums.get(name, SpanTotal()), total)
    return ProcessSpans(0, wall_s, cpu_s, spans, beside)


def _add(one: SpanTotal, other: SpanTotal) -> SpanTotal:
    return SpanTotal(one.wall_s + other.wall_s, one.cpu_s + other.cpu_s, one.count + other.count)


def _minus(newer: Mapping[str, SpanTotal], older: Mapping[str, SpanTotal]) -> dict[str, SpanTotal]:
    nothing = SpanTotal()
    found = {}
    for name, total in newer.items():
        before = older.get(name, nothing)
        found[name] = SpanTotal(total.wall_s - before.wall_s, total.cpu_s - before.cpu_s, total.count - before.count)
    return found
