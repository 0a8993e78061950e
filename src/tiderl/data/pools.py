"""What a replica's pool of tasks says of itself: for those who look on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiderl.data.records import TaskKey


@dataclass(frozen=True)
class PoolBook:
    """What the pool of one replica says of itself. Tokens are KV positions."""

    is_open: bool
    """Turns can run there."""
    budget_tokens: int
    used_tokens: int
    """Charged to tasks, each group's prompt once."""
    tasks: int
    """In flight there."""
    waiting: Mapping[TaskKey, int]
    """Tasks that wait for room, and the most that their next turn can need."""
