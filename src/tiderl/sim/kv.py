"""The KV of one simulated replica, in tokens: reservations of running turns and what waiting tasks still hold.

Keeps I4: reserved plus held never exceeds the budget, and each reservation is freed exactly once, here. Waiting tasks
are evicted whole, the least recently used first. Knows no versions and no time.
"""

from __future__ import annotations

import heapq

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import TaskKey


class KvBook:
    """Lengths only; a task's held positions are always a prefix of its next context."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.reserved_tokens = 0
        self.held_tokens = 0
        self._reserved: dict[TaskKey, int] = {}
        self._held: dict[TaskKey, int] = {}  # least recently used first

    def fits(self, tokens: int) -> bool:
        """Whether `tokens` can be reserved now, evicting waiting tasks where needed."""
        return self.reserved_tokens + tokens <= self.budget_tokens

    def reserve(self, task: TaskKey, tokens: int) -> int:
        """Charge a turn's whole need; returns the positions that the task still holds, which it takes along."""
        if task in self._reserved or not self.fits(tokens):
            raise InvariantViolation(f"reserving {tokens} tokens for {task} breaks I4", where="simulated KV")
        own = self.drop(task)
        while self.reserved_tokens + self.held_tokens + tokens > self.budget_tokens:
            self.drop(next(iter(self._held)))
        self._reserved[task] = tokens
        self.reserved_tokens += tokens
        return own

    def settle(self, task: TaskKey, keep_tokens: int) -> None:
        """Free a turn's reservation and hold `keep_tokens` positions for the task, as most recently used."""
        reserved = self._reserved.pop(task, -1)
        if keep_tokens > reserved:
            raise InvariantViolation(
                f"keeping {keep_tokens} tokens of {task}, which reserved {reserved}", where="simulated KV"
            )
        self.reserved_tokens -= reserved
        if keep_tokens > 0:
            self._held[task] = keep_tokens
            self.held_tokens += keep_tokens

    def touch(self, task: TaskKey) -> None:
        """Mark a waiting task as most recently used."""
        if task in self._held:
            self._held[task] = self._held.pop(task)

    def drop(self, task: TaskKey) -> int:
        """Forget what a waiting task holds; returns how much it was."""
        tokens = self._held.pop(task, 0)
        self.held_tokens -= tokens
        return tokens

    def drop_held(self) -> None:
        self._held.clear()
        self.held_tokens = 0

    def largest(self, count: int) -> tuple[str, ...]:
        """The tasks that hold or reserve most, largest first, with their tokens."""
        everyone = [*self._held.items(), *self._reserved.items()]
        top = heapq.nsmallest(count, everyone, key=lambda entry: (-entry[1], entry[0]))
        return tuple(f"{task} ({tokens})" for task, tokens in top)
