"""`log.profile`: where the time of every process of a run goes, from the first issued prompt to the last commit.

The driver's event loop is measured from outside: its selector says when it is idle, its task factory whose code runs.
Hosts and workers count for themselves and are asked at the window's ends. Decides nothing, and the run waits for none
of it.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tiderl.data.errors import CheckpointError
from tiderl.data.events import Event, PromptIssued, UpdateCommitted
from tiderl.data.spans import IDLE, ProcessSpans, Spanned, SpanTotal, since, span, taken, together
from tiderl.store.rundir import write_whole

DRIVER = "driver"
LAST_ANSWERS_S = 1.0  # a run that is ended does not wait longer for hosts that are busy

TASK_SPANS = {
    "task": "play tasks",
    "rollout": "rollout loop",
    "pull": "pull weights",
    "watch": "watch ranks",
    "inline": "drive ranks",
    "profile": "profile",
}
"""The first word of a task's name, and the span that its code counts as."""
FIRST_TASK, OTHER_TASKS = "training loop", "other tasks"


class IdleSelector(selectors.DefaultSelector):
    """The selector of an event loop that says when the loop waits."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        with span("poll" if timeout == 0 else IDLE):
            return super().select(timeout)


def profiled_tasks() -> Callable[[asyncio.AbstractEventLoop, Any], asyncio.Task[Any]]:
    """A task factory: each stretch of a task between two awaits is a span of its kind. The first task is the run."""
    first = [FIRST_TASK]

    def make(loop: asyncio.AbstractEventLoop, code: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Stretches(code, first.pop() if first else ""), loop=loop, **options)

    return make


class _Stretches(Coroutine[Any, Any, Any]):
    """A coroutine that runs in spans. A task gets its name after it is made: it is looked up at the first stretch."""

    def __init__(self, code: Coroutine[Any, Any, Any], kind: str) -> None:
        self._code, self._kind = code, kind

    def send(self, value: Any) -> Any:
        with span(self._kind or self._name()):
            return self._code.send(value)

    def throw(self, error: Any, value: Any = None, traceback: TracebackType | None = None) -> Any:
        if value is not None or traceback is not None:
            error = (value if isinstance(value, BaseException) else error(value)).with_traceback(traceback)
        with span(self._kind or self._name()):
            return self._code.throw(error)

    def close(self) -> None:
        self._code.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._code.__await__())

    def _name(self) -> str:
        task = asyncio.current_task()
        word = "" if task is None else task.get_name().partition(" ")[0]
        self._kind = TASK_SPANS.get(word, OTHER_TASKS)
        return self._kind


@dataclass
class _Life:
    """One process of a host: its spans when the window opened (None: it came later), and the newest that are known."""

    host: str
    opened: ProcessSpans | None
    newest: ProcessSpans


@dataclass
class RunProfile:
    """An observer of the run's events, and an async context around its work: written to `path` when that ends, however
    it ends. Nothing is written where no prompt was issued."""

    path: Path
    sources: Sequence[object]
    """Those that are `Spanned` are asked."""
    say: Callable[[str], None]
    updates: int = 0
    _lives: dict[int, _Life] = field(default_factory=dict)  # by process id
    _opened: bool = False
    _opened_s: float = 0.0
    _closed_s: float = 0.0
    _opening: bool = True
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RunProfile:
        self._asking = asyncio.create_task(self._ask_when_due(), name="profile")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._asking is not None
        try:
            if self._opened:
                if not self.updates:
                    self._take()  # no window to close: as far as it came
                async with asyncio.timeout(LAST_ANSWERS_S):
                    await self._answered.wait()
        except TimeoutError:
            pass  # what is known must do
        finally:
            self._asking.cancel()
            if self._opened:
                self._write()

    def observe(self, event: Event) -> None:
        """The window opens at the first prompt; every commit may be the last."""
        if isinstance(event, PromptIssued) and not self._opened:
            self._opened = True
            self._opened_s = time.monotonic()
            self._take()
        elif isinstance(event, UpdateCommitted) and self._opened:
            self.updates += 1
            self._take()

    def figures(self) -> dict[str, Any]:
        """What `profile.json` says; `docs/performance.md` describes it."""
        hosts: dict[str, list[ProcessSpans]] = {}
        for life in self._lives.values():
            hosts.setdefault(life.host, []).append(since(life.newest, life.opened))
        return {
            "updates": self.updates,
            "wall_s": self._closed_s - self._opened_s,
            "hosts": {
                name: {"processes": len(lives), **_host_figures(together(lives), self.updates)}
                for name, lives in sorted(hosts.items())
            },
        }

    def _write(self) -> None:
        """The profile is for people: a run does not fail for it."""
        try:
            write_whole(self.path, json.dumps(self.figures(), indent=1))
        except CheckpointError as error:
            self.say(f"no profile: {error}")

    def _take(self) -> None:
        """This process now, the others as soon as they answer."""
        self._closed_s = time.monotonic()
        own = taken()
        assert own is not None
        self._keep(DRIVER, own)
        self._answered.clear()
        self._due.set()

    def _keep(self, host: str, found: ProcessSpans) -> None:
        life = self._lives.get(found.pid)
        if life is not None:
            life.newest = found
        else:
            self._lives[found.pid] = _Life(host, found if self._opening else None, found)

    async def _ask_when_due(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            answers = await asyncio.gather(*(part.spans() for part in self.sources if isinstance(part, Spanned)))
            for host, found in (one for of_source in answers for one in of_source):
                self._keep(host, found)
            self._opening = False
            if not self._due.is_set():
                self._answered.set()


def _host_figures(spans: ProcessSpans, updates: int) -> dict[str, Any]:
    return {
        "wall_s": spans.wall_s,
        "cpu_s": spans.cpu_s,
        "spans": _by_share(spans.spans, updates),
        "beside": _by_share(spans.beside, updates),
    }


def _by_share(totals: Mapping[str, SpanTotal], updates: int) -> dict[str, dict[str, float | int | None]]:
    """The largest first."""
    return {
        name: {
            "wall_s": total.wall_s,
            "cpu_s": total.cpu_s,
            "count": total.count,
            "wall_ms_per_update": 1000 * total.wall_s / updates if updates else None,
        }
        for name, total in sorted(totals.items(), key=lambda item: -item[1].wall_s)
    }
