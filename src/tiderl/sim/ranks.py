"""One simulated rank: it does one thing at a time, in order of arrival, as a rank host's single compute thread does.

An engine on the rank stops at the end of its running iteration while other work is queued or done, and goes on
afterwards. Knows no tokens and no costs: seconds come from the caller.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

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

    async def work(self, seconds: float) -> None:
        """Occupy the rank for `seconds`, after all that came before. Raises `RankLost` when it is or goes down."""
        life = self._lives
        self._check(life)
        if self.engine is not None:
            self.engine.hold()
        try:
            async with self._turnstile:
                if self.engine is not None:
                    await self.engine.halted()
                self._check(life)
                await self._spend(seconds)
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

    async def _spend(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._working = loop.create_future()
        timer = loop.call_later(seconds, _finish, self._working)
        try:
            await self._working
        finally:
            timer.cancel()
            self._working = None

    def _check(self, life: int) -> None:
        if not self.up or life != self._lives:
            raise self._lost()

    def _lost(self) -> RankLost:
        return RankLost("the rank's process died", where=f"rank {self.rank}")


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
