"""When a checkpoint is written, and what becomes deletable by it.

An update is durable when a checkpoint holds it. Payloads stay until every kept checkpoint is newer than their update,
so
that the oldest kept checkpoint can still be redone to the newest update (architecture §9).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tiderl.data.errors import CheckpointError
from tiderl.data.events import Event, Fault
from tiderl.runtime.ports import Blobs, CheckpointRow, Checkpoints, Ledger, Update

AUTO_COST_FRACTION = 0.02
"""`auto` writes a checkpoint after each update while that costs less than this fraction of the time, else as rarely as
that takes. With journal and payloads it stays under the 5 % that all of them may cost (`bench/journal.py`)."""


def auto_interval(save_s: float, update_s: float) -> int:
    """Updates between checkpoints such that saving costs at most `AUTO_COST_FRACTION` of the time."""
    if save_s <= 0 or update_s <= 0:
        return 1
    return max(1, math.ceil(save_s / (AUTO_COST_FRACTION * update_s)))


class Checkpointer:
    """Writes checkpoints of the trainer's state and keeps the newest few. A full disk is reported, never fatal."""

    def __init__(
        self,
        update: Update,
        ledger: Ledger,
        blobs: Blobs,
        checkpoints: Checkpoints,
        emit: Callable[[Event], None],
        *,
        every_updates: int,
        keep: int,
        doing: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.update, self.ledger, self.blobs, self.checkpoints, self.emit = update, ledger, blobs, checkpoints, emit
        self.every_updates, self.keep, self.doing = every_updates, keep, doing
        self.kept: deque[tuple[int, str]] = deque()
        self.payloads: deque[tuple[int, Sequence[str]]] = deque()
        self.last_update = 0
        self.last_s: float | None = None
        self.save_s = 0.0

    def adopt(self, kept: Sequence[tuple[int, str]], payloads: Sequence[tuple[int, Sequence[str]]]) -> None:
        """Takes over what an earlier driver left: checkpoints and payloads of consumed trajectories, oldest first."""
        self.kept.extend(kept)
        self.payloads.extend(payloads)
        self.last_update = kept[-1][0]

    async def consumed(self, update: int, sha256s: Sequence[str]) -> None:
        """An update is committed: its payloads are needed until it is durable. Writes a checkpoint if one is due."""
        self.payloads.append((update, sha256s))
        now = asyncio.get_running_loop().time()
        since_s = now - self.last_s if self.last_s is not None else 0.0
        every = self.every_updates
        if every == 0:
            done = update - self.last_update
            every = auto_interval(self.save_s, since_s / done if done else 0.0)
        if update - self.last_update >= every:
            await self.write(update)

    async def write(self, update: int) -> bool:
        """Writes the checkpoint of this update now. False when the disk refused; the last good one then stays."""
        loop = asyncio.get_running_loop()
        started, name = loop.time(), f"u{update:06d}"
        try:
            with self.doing("checkpointing"):
                await self.update.save(self.checkpoints.path(name))
        except CheckpointError as error:
            self.emit(Fault(t_s=loop.time(), where=f"checkpoint {name}", what=type(error).__name__))
            return False
        await self.ledger.durable(CheckpointRow(checkpoint=name, update_no=update))
        self.last_s, self.last_update = loop.time(), update
        self.save_s = self.last_s - started
        if (update, name) not in self.kept:
            self.kept.append((update, name))
        await self._delete_old()
        return True

    async def _delete_old(self) -> None:
        old = [self.kept.popleft()[1] for _ in range(len(self.kept) - self.keep)]
        if old:
            await self.checkpoints.delete(old)
        unneeded: list[str] = []
        while self.payloads and self.payloads[0][0] <= self.kept[0][0]:
            unneeded.extend(self.payloads.popleft()[1])
        if unneeded:
            await self.blobs.delete(unneeded)
