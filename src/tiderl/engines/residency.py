"""Who holds KV on a replica, in tokens: reservations of running turns and the KV of tasks that wait between turns.

Keeps I4: reserved + held never exceeds the budget, and each reservation is freed exactly once, here and nowhere else.
The policy is request-level LRU. Knows nothing of torch: the KV itself is an opaque object, dropped with its entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import TaskKey


@dataclass(frozen=True, slots=True)
class HeldKv:
    """The KV of a waiting task: valid for exactly these ids under exactly this weight version (I6, I8)."""

    ids: np.ndarray  # int32 [n], one per KV position
    version: int
    kv: Any

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def usable_tokens(self, ids: np.ndarray, version: int) -> int:
        """Positions that `ids` may reuse: the longest common prefix, 0 under another version."""
        if version != self.version:
            return 0
        n = min(len(self.ids), len(ids))
        different = np.flatnonzero(self.ids[:n] != ids[:n])
        return int(different[0]) if len(different) else n


class Residency:
    """The KV book of one replica."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self._reserved: dict[TaskKey, int] = {}
        self._held: dict[TaskKey, HeldKv] = {}  # least recently used first
        self._reserved_tokens = 0
        self._held_tokens = 0

    @property
    def committed_tokens(self) -> int:
        """Reserved by running turns plus held for waiting tasks; at most `budget_tokens`."""
        return self._reserved_tokens + self._held_tokens

    @property
    def held_tokens(self) -> int:
        return self._held_tokens

    def held(self) -> dict[TaskKey, int]:
        """Tokens held by each waiting task, least recently used first."""
        return {task: entry.tokens for task, entry in self._held.items()}

    def fits(self, tokens: int) -> bool:
        """Whether `tokens` can be reserved now, evicting waiting tasks where needed."""
        return self._reserved_tokens + tokens <= self.budget_tokens

    def reserve(self, task: TaskKey, tokens: int) -> HeldKv | None:
        """Charge a turn's whole need and hand over what its task holds. Evicts the least recently used waiting tasks.

        Raises `InvariantViolation` when it does not fit or the task already has a reservation.
        """
        if task in self._reserved or not self.fits(tokens):
            raise InvariantViolation(f"reserving {tokens} tokens for {task} breaks I4", where="residency")
        own = self._pop(task)
        while self.committed_tokens + tokens > self.budget_tokens:
            self._pop(next(iter(self._held)))
        self._reserved[task] = tokens
        self._reserved_tokens += tokens
        return own

    def settle(self, task: TaskKey, entry: HeldKv | None) -> None:
        """Free a turn's reservation, and keep `entry` for the task's next turn, as most recently used."""
        reserved = self._reserved.pop(task, None)
        if reserved is None or (entry is not None and entry.tokens > reserved):
            raise InvariantViolation(f"settling {task}, which reserved {reserved} tokens", where="residency")
        self._reserved_tokens -= reserved
        if entry is not None:
            self._held[task] = entry
            self._held_tokens += entry.tokens

    def touch(self, task: TaskKey) -> None:
        """Mark a waiting task as most recently used."""
        if task in self._held:
            self._held[task] = self._held.pop(task)

    def drop(self, task: TaskKey) -> None:
        self._pop(task)

    def drop_all_held(self) -> None:
        self._held.clear()
        self._held_tokens = 0

    def _pop(self, task: TaskKey) -> HeldKv | None:
        entry = self._held.pop(task, None)
        if entry is not None:
            self._held_tokens -= entry.tokens
        return entry
