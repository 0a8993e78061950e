"""The virtual clock: an asyncio event loop whose time jumps to the next timer instead of passing.

Keeps I10: no file descriptor, thread or wall clock is behind it, ready callbacks run first in first out, timers of one
instant fire in the order they were set, and tasks hash by their number, so that sets of tasks iterate alike in every
process. A run that cannot go on is a `DeadlockError`, never a hang. Knows nothing of what runs on it.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from tiderl.data.errors import DeadlockError, InvariantViolation
from tiderl.sim.waiting import describe_waits, tasks_by_birth

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Reorder = Callable[[deque[asyncio.Handle]], None]
"""Changes the order of the handles in place."""

# Passes of the loop without any time passing after which a run counts as spinning.
PASSES_PER_INSTANT = 200_000

# A run allocates few cycles but many tasks: the collector's default threshold of 700 costs a third of the speed.
GC_THRESHOLD = 100_000

# An interruption is raised out of the loop once for each task group that it passes through: a few, one in another.
CANCEL_ROUNDS = 20


class SimTask(asyncio.Task[Any]):
    """A task that hashes by its number within its loop: `TaskGroup` and `timeout` keep tasks in sets."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, name: str | None = None, **options: Any) -> None:
        self.number = loop.next_task_number()
        super().__init__(coro, loop=loop, name=name or f"task-{self.number}", **options)

    def __hash__(self) -> int:
        return self.number

    __eq__ = object.__eq__


class _Timer(asyncio.TimerHandle):
    """A timer that knows the order in which it was set: the heap alone does not keep it at equal times."""

    number: int

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        if self._when == other._when and isinstance(other, _Timer):  # type: ignore[attr-defined]
            return self.number < other.number
        return bool(self._when < other._when)  # type: ignore[attr-defined]


class _Clockwork:
    """Stands where a real loop has its selector: nothing comes from outside, so waiting is a jump of the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> tuple[()]:
        self._loop.advance(timeout)
        return ()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, from 0 s on."""

    # Of BaseEventLoop, which declares none of them.
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float
    _ready: deque[asyncio.Handle]

    def __init__(self, *, passes_per_instant: int = PASSES_PER_INSTANT, reorder: Reorder | None = None) -> None:
        """`reorder`: may change the order of what is ready, before each pass that has a choice."""
        super().__init__()
        self._reorder = reorder
        self._now_s = 0.0
        self._passes_per_instant = passes_per_instant
        self._passes = 0
        self._task_numbers = itertools.count()
        self._timer_numbers = itertools.count()
        self._failure: BaseException | None = None
        self._selector = _Clockwork(self)
        # One step of the float at 0 s: `_run_once` fires what is due strictly before now + resolution.
        self._clock_resolution = math.ulp(0.0)
        self.set_debug(False)
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._keep_failure)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def _run_once(self) -> None:
        if self._reorder is not None and len(self._ready) > 1:
            self._reorder(self._ready)
        super()._run_once()  # type: ignore[misc]

    def next_task_number(self) -> int:
        return next(self._task_numbers)

    def advance(self, timeout: float | None) -> None:
        """Once per pass, with the seconds to the next timer: 0 when something is ready, None when nothing ever is."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if timeout is not None and timeout <= 0:
            self._passes += 1
            if self._passes > self._passes_per_instant:
                self._passes = 0
                raise DeadlockError(
                    f"no time passes: {self._passes_per_instant} passes of the loop at {self._now_s:.6g} s; "
                    + describe_waits(self)
                )
            return
        next_s = self._scheduled[0].when() if timeout is not None else math.inf
        if math.isinf(next_s):
            raise DeadlockError(f"nothing can happen any more at {self._now_s:.6g} s; " + describe_waits(self))
        self._passes = 0
        self._now_s = next_s
        self._clock_resolution = math.ulp(next_s)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio; timers of the same instant fire in the order of these calls."""
        self._check_closed()  # type: ignore[attr-defined]
        if math.isnan(when):
            raise ValueError("a timer's moment is NaN")
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._timer_numbers)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> NoReturn:
        raise InvariantViolation("threads are forbidden in virtual time (call_soon_threadsafe)")

    def run_in_executor(self, executor: object, func: Callable[[*Ts], object], *args: *Ts) -> NoReturn:
        raise InvariantViolation("threads are forbidden in virtual time (run_in_executor)")

    def _make_task(self, loop: VirtualLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> SimTask:
        return SimTask(coro, loop=loop, **options)

    def _keep_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A callback that raised is a fault of the simulation: stop the run instead of logging it.
        exception = context.get("exception")
        if isinstance(exception, KeyboardInterrupt | SystemExit):
            return  # it ends the run by itself
        if "handle" in context and exception is not None:
            self._failure = self._failure or exception
        else:
            loop.default_exception_handler(context)

    def _process_events(self, event_list: object) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """No other thread may wake the loop, so there is nothing to write."""


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    passes_per_instant: int = PASSES_PER_INSTANT,
    reorder: Reorder | None = None,
) -> T:
    """Run `main()` on a new virtual clock and return its result; its exceptions come through.

    Raises `DeadlockError` when nothing is runnable and no timer is set, or when no time passes any more. Whatever
    happens, tasks still alive are cancelled and their `finally` blocks run.
    """
    loop = VirtualLoop(passes_per_instant=passes_per_instant, reorder=reorder)
    threshold = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD, *threshold[1:])
    try:
        return loop.run_until_complete(main())
    finally:
        try:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            gc.set_threshold(*threshold)


def _cancel_all(loop: VirtualLoop) -> None:
    """Cancel what is alive, in order of birth. A task that waits again for what never comes is given up."""
    for _ in range(CANCEL_ROUNDS):
        tasks = tasks_by_birth(loop)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        try:
            loop.run_until_complete(_ended(tasks))
        except DeadlockError:
            break
        except (KeyboardInterrupt, SystemExit):
            continue  # each task that passes an interruption on raises it out of the loop once more
    for task in tasks_by_birth(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
