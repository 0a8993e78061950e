"""A broadcast: everybody who waits is woken when something changed, in the order in which they began to wait (I10)."""

from __future__ import annotations

import asyncio


class Wakeup:
    """No state but the waiters: check your condition, `wait`, check again; nothing can slip in between on one loop."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
