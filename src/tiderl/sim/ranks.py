"""One simulated rank: it does one thing at a time, in order of arrival, as a rank host's single compute thread does.

An engine on the rank stops at the end of its running iteration while other work is queued or done, and goes on
afterwards. Knows no tokens and no costs: seconds come from the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from tiderl.data.errors import RankLost


class Yielding(Protocol):
    """What shares the rank by yielding between its iterations: an engine."""

    def hold(self) -> None: ...
    def unhold(self) -> None: ...
    async def halted(self) -> None:
        """Returns when no iteration is running any more."""


class SimRank:
    """A rank that is up from the start; `lose` and `restore` are the cluster's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.up = True
        self.engine: Yielding | None = None
        self._lives = 0
        self._turnstile = asyncio.Lock()
        self._working: asyncio.Future[None] | None = None

    async def work(self, seconds: float, *, begun: Callable[[], object] | None = None) -> None:
        """Occupy the rank for `seconds`, after all that came before; `begun` is called when they begin. Raises
        `RankLost` when it is or goes down."""

        def start(working: asyncio.Future[None]) -> asyncio.TimerHandle:
            if begun is not None:
                begun()
            return asyncio.get_running_loop().call_later(seconds, _finish, working)

        await self._occupy(start)

    async def during(self, other: asyncio.Future[Any]) -> None:
        """Occupy the rank, after all that came before, until `other` is done. Raises `RankLost` as `work` does."""

        def start(working: asyncio.Future[None]) -> None:
            other.add_done_callback(lambda _: _finish(working))

        await self._occupy(start)

    async def _occupy(self, start: Callable[[asyncio.Future[None]], asyncio.TimerHandle | None]) -> None:
        life = self._lives
        self._check(life)
        if self.engine is not None:
            self.engine.hold()
        try:
            async with self._turnstile:
                if self.engine is not None:
                    await self.engine.halted()
                self._check(life)
                await self._spend(start)
        finally:
            if self.engine is not None:
                self.engine.unhold()

    def require(self) -> None:
        """Raises `RankLost` while it is down: for a request that takes no time."""
        self._check(self._lives)

    def lose(self) -> None:
        """The process dies: the running work and all that is queued fail."""
        self.up = False
        self._lives += 1
        if self._working is not None and not self._working.done():
            self._working.set_exception(self._lost())

    def restore(self) -> None:
        """The process is there again, empty."""
        self.up = True

    async def _spend(self, start: Callable[[asyncio.Future[None]], asyncio.TimerHandle | None]) -> None:
        self._working = asyncio.get_running_loop().create_future()
        timer = start(self._working)
        try:
            await self._working
        finally:
            if timer is not None:
                timer.cancel()
            self._working = None

    def _check(self, life: int) -> None:
        if not self.up or life != self._lives:
            raise self._lost()

    def _lost(self) -> RankLost:
        return RankLost("the rank's process died", where=f"rank {self.rank}")


class Team:
    """Ranks that train together. The first one's time is that of all; what they do fails when any is down or dies."""

    def __init__(self, first: SimRank) -> None:
        self.rank = first.rank
        self._first = first
        self._down: set[int] = set()
        self._losses = 0

    async def work(self, seconds: float) -> None:
        """As `SimRank.work`; the loss of another rank is noticed when the work is done."""
        self.require()
        losses = self._losses
        await self._first.work(seconds)
        if losses != self._losses:
            raise self._lost()

    def require(self) -> None:
        """Raises `RankLost` while one of them is down."""
        self._first.require()
        if self._down:
            raise self._lost()

    def lose(self, rank: int) -> None:
        self._down.add(rank)
        self._losses += 1

    def restore(self, rank: int) -> None:
        self._down.discard(rank)

    def _lost(self) -> RankLost:
        return RankLost("a rank that trains with it died", where=f"rank {self.rank}")


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
