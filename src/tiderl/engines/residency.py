"""Who holds KV on a replica, in tokens: reservations of running turns and the KV of tasks that wait between turns.

Keeps I4: reserved + held never exceeds the budget, a turn computes no further than its reservation, and each
reservation is freed exactly once, here and nowhere else. What waits never stands in the way of what runs: the policy
says only in which order it goes. Knows nothing of torch: the KV itself is an opaque object, dropped with its entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tiderl.data.errors import ConfigurationError, InvariantViolation
from tiderl.data.records import TaskKey

KV_POLICIES = ("lru", "ctb")


class GroupKey(NamedTuple):
    """The members of one prompt: they start from the same ids."""

    split: str
    prompt_id: int

    def __str__(self) -> str:
        return f"{self.split}/{self.prompt_id}"


def group_of(task: TaskKey) -> GroupKey:
    return GroupKey(task.split, task.prompt_id)


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """How many ids two int32 arrays share from the start.

    >>> common_prefix(np.array([4, 5, 6]), np.array([4, 5, 9, 9]))
    2
    """
    n = min(len(one), len(other))
    equal = one[:n] == other[:n]
    return n if equal.all() else int(equal.argmin())


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
        return common_prefix(self.ids, ids) if version == self.version else 0


Owner = TaskKey | GroupKey
"""A waiting task, or a group: its prompt, kept for members that have not started when the last copy would go."""


class Residency:
    """The KV book of one replica. `kv_policy`: as in `EngineSettings`."""

    def __init__(self, budget_tokens: int, kv_policy: str = "lru") -> None:
        """Raises `ConfigurationError` for a policy that it does not know."""
        if kv_policy not in KV_POLICIES:
            raise ConfigurationError(
                f"the embedded engine has no KV policy {kv_policy!r}",
                where="rollout.kv_policy",
                hint=f"use {' or '.join(KV_POLICIES)}",
            )
        self.budget_tokens = budget_tokens
        self.by_task = kv_policy == "ctb"
        self.evicted_tokens = 0  # of tasks, since start
        self._evicted: list[tuple[TaskKey, HeldKv]] = []  # by task only, for who may keep a part of them
        self._reserved: dict[TaskKey, int] = {}
        self._held: dict[Owner, HeldKv] = {}  # least recently used first
        self._priorities: dict[TaskKey, float] = {}  # of the same tasks' last turns
        self._groups: dict[GroupKey, dict[Owner, HeldKv]] = {}  # the same entries by group
        self._reserved_tokens = 0
        self._held_tokens = 0

    @property
    def committed_tokens(self) -> int:
        """Reserved by running turns plus held for waiting tasks; at most `budget_tokens`."""
        return self._reserved_tokens + self._held_tokens

    @property
    def held_tokens(self) -> int:
        return self._held_tokens

    @property
    def free_tokens(self) -> int:
        return self.budget_tokens - self.committed_tokens

    def held(self) -> dict[Owner, int]:
        """Tokens held by each waiting task, least recently used first."""
        return {owner: entry.tokens for owner, entry in self._held.items()}

    def held_by_group(self, group: GroupKey) -> Iterable[HeldKv]:
        """What waiting members of a group hold, and its kept prompt: what another member may copy from."""
        return self._groups.get(group, {}).values()

    def prefixes(self) -> list[GroupKey]:
        """Groups whose prompt is kept beyond the members that computed it."""
        return [owner for owner in self._held if isinstance(owner, GroupKey)]

    def fits(self, tokens: int) -> bool:
        """Whether `tokens` can be reserved now, evicting waiting tasks where needed."""
        return self._reserved_tokens + tokens <= self.budget_tokens

    def reserve(self, task: TaskKey, tokens: int) -> HeldKv | None:
        """Charge a turn and hand over what its task holds. Evicts waiting tasks where needed.

        Raises `InvariantViolation` when it does not fit or the task already has a reservation.
        """
        if task in self._reserved or not self.fits(tokens):
            raise InvariantViolation(f"reserving {tokens} tokens for {task} breaks I4", where="residency")
        own = self.drop(task)
        self._evict_for(tokens)
        self._reserved[task] = tokens
        self._reserved_tokens += tokens
        return own

    def grow(self, task: TaskKey, tokens: int) -> bool:
        """Raise a turn's reservation to `tokens`, evicting waiting tasks where needed; False when it does not fit."""
        more = tokens - self._reserved[task]
        if not self.fits(more):
            return False
        self._evict_for(more)
        self._reserved[task] = tokens
        self._reserved_tokens += more
        return True

    def settle(self, task: TaskKey, entry: HeldKv | None, priority: float = 0.0) -> None:
        """Free a turn's reservation, and keep `entry` for the task's next turn, as most recently used. `priority`: of
        the turn that ends.

        Raises `InvariantViolation` for a task without a reservation, or with more KV than it reserved.
        """
        reserved = self._reserved.pop(task, None)
        if reserved is None or (entry is not None and entry.tokens > reserved):
            raise InvariantViolation(f"settling {task}, which reserved {reserved} tokens", where="residency")
        self._reserved_tokens -= reserved
        if entry is not None:
            self._put(task, entry)
            self._priorities[task] = priority

    def keep_prefix(self, group: GroupKey, entry: HeldKv) -> None:
        """Hold a group's prompt for members that have not started; evictable like any other entry.

        Raises `InvariantViolation` when it does not fit: it takes the room of the member that leaves it behind.
        """
        if not self.fits(entry.tokens):
            raise InvariantViolation(f"keeping {entry.tokens} tokens for {group} breaks I4", where="residency")
        self.drop(group)
        self._evict_for(entry.tokens)
        self._put(group, entry)

    def held_tokens_of(self, task: TaskKey) -> int:
        entry = self._held.get(task)
        return 0 if entry is None else entry.tokens

    def touch(self, task: TaskKey, priority: float | None = None) -> None:
        """Mark a waiting task as most recently used; `priority`: of its next turn, once that is known."""
        if task in self._held:
            self._held[task] = self._held.pop(task)
            if priority is not None:
                self._priorities[task] = priority

    def take_evicted(self) -> list[tuple[TaskKey, HeldKv]]:
        """What tasks lost since the last call, under `ctb`: nothing of it counts any more."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def drop(self, owner: Owner) -> HeldKv | None:
        """Forget what an owner holds, and hand it over."""
        entry = self._held.pop(owner, None)
        if entry is not None:
            self._held_tokens -= entry.tokens
            if isinstance(owner, TaskKey):
                del self._priorities[owner]
            group = _group(owner)
            del self._groups[group][owner]
            if not self._groups[group]:
                del self._groups[group]
        return entry

    def drop_all_held(self) -> None:
        self._held.clear()
        self._priorities.clear()
        self._groups.clear()
        self._held_tokens = 0

    def _put(self, owner: Owner, entry: HeldKv) -> None:
        self._held[owner] = entry
        self._groups.setdefault(_group(owner), {})[owner] = entry
        self._held_tokens += entry.tokens

    def _evict_for(self, tokens: int) -> None:
        while self.committed_tokens + tokens > self.budget_tokens:
            owner = min(self._held, key=self._rank) if self.by_task else next(iter(self._held))
            entry = self.drop(owner)
            if isinstance(owner, TaskKey) and entry is not None:
                self.evicted_tokens += entry.tokens
                if self.by_task:
                    self._evicted.append((owner, entry))

    def _rank(self, owner: Owner) -> tuple[bool, float]:
        """Who goes first under `ctb`: a kept prompt, then the task of the lowest priority; of equals the first."""
        return (True, self._priorities[owner]) if isinstance(owner, TaskKey) else (False, 0.0)


def _group(owner: Owner) -> GroupKey:
    return owner if isinstance(owner, GroupKey) else group_of(owner)
