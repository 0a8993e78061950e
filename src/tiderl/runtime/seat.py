"""A task's place on a replica, as its player sees it.

`FixedSeat` is the request-level policy: the task stays where it started, and the engine alone decides what it keeps.
Continuous task batching is `seats.py`. Knows no pool.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tiderl.data.records import TaskKey
from tiderl.data.turns import TurnResult
from tiderl.runtime.ports import Engine, EnvironmentHandle


class Seat(Protocol):
    """What a player asks around each of its turns."""

    @property
    def engine(self) -> Engine:
        """Where the next turn runs; it may be another one after `enter`."""

    @property
    def priority(self) -> float:
        """In the engine's queue, and in what its KV is worth there; larger first."""

    async def enter(
        self,
        context_tokens: int,
        max_new_tokens: int,
        handle: EnvironmentHandle,
        *,
        first_ids: np.ndarray | None = None,
    ) -> None:
        """Returns when a turn with this context may run. `first_ids`: the context, int32 [context_tokens], before the
        task's first turn."""

    def ended(self, result: TurnResult, context_tokens: int) -> None:
        """The turn ended; the context is `context_tokens` long now."""

    def over(self) -> None:
        """The task came to its own end: its KV is not needed any more. Before `close`, or not at all."""

    def close(self) -> None:
        """Gives the place up, whatever happened. Idempotent."""


class FixedSeat:
    """One engine, no questions."""

    def __init__(self, key: TaskKey, engine: Engine, priority: float) -> None:
        self.key, self.engine, self.priority = key, engine, priority

    async def enter(
        self,
        context_tokens: int,
        max_new_tokens: int,
        handle: EnvironmentHandle,
        *,
        first_ids: np.ndarray | None = None,
    ) -> None:
        pass

    def ended(self, result: TurnResult, context_tokens: int) -> None:
        pass

    def over(self) -> None:
        self.engine.release(self.key)

    def close(self) -> None:
        self.engine.release(self.key)
