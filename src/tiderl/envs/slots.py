"""Slots: how many environments may be open at once, first come first served. A slot is given back exactly
once."""

from __future__ import annotations

import asyncio


class Slot:
    """One taken slot."""

    def __init__(self, semaphore: asyncio.Semaphore) -> None:
        self._semaphore: asyncio.Semaphore | None = semaphore

    def give_back(self) -> None:
        """Idempotent."""
        semaphore, self._semaphore = self._semaphore, None
        if semaphore is not None:
            semaphore.release()


class Slots:
    """A fixed number of slots; those who wait get theirs in the order they came."""

    def __init__(self, count: int) -> None:
        self._semaphore = asyncio.Semaphore(count)

    async def take(self) -> Slot:
        await self._semaphore.acquire()
        return Slot(self._semaphore)
