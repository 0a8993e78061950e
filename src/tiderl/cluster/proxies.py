"""The async ports of one rank over one link: Engine, Reference, Actor, Update.

A proxy keeps its identity when its rank is restarted: the link behind it is renewed. Every wait has a deadline. Must
not know whether the rank is another process or this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tiderl.cluster.specs import METHODS, Backward, Begin, Forward, Generated, Started, TurnName, WarmUp
from tiderl.data.errors import ChannelTimeout
from tiderl.data.records import MicroBatch, TaskKey, UpdateStats, WeightHandle
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.turns import EngineCapabilities, EngineStats, PauseMode, Turn, TurnResult

GENERATE_DEADLINE_S = 1800.0  # a turn may wait long behind others, but not for ever
CONTROL_DEADLINE_S = 600.0  # abort, pause, load: behind at most one step or one training call of the same rank
TRAIN_DEADLINE_S = 3600.0  # the longest single training call


class Link(Protocol):
    """The way to one rank."""

    async def request(self, method: str, payload: Any, result: Any, deadline_s: float) -> Any:
        """Raises what the rank raised, `RankLost` when it is down or dies, `ChannelTimeout`."""

    def notify(self, method: str, payload: Any) -> None:
        """Tell without waiting; nothing happens when the rank is down."""


async def _ask(link: Link, method: str, payload: Any, deadline_s: float) -> Any:
    return await link.request(method, payload, METHODS[method].result, deadline_s)


class EngineProxy:
    """An `Engine` on one rank."""

    def __init__(self, replica: int, link: Link) -> None:
        self.replica = replica
        self.capabilities = EngineCapabilities(retain=False, offload=False)  # until its rank is up
        self.stats = EngineStats(version=-1, running=0, waiting=0, resident_tokens=0, budget_tokens=0)
        self._link = link

    def renew(self, started: Started) -> None:
        """Its rank is up: new or restarted, and empty."""
        assert started.capabilities is not None and started.stats is not None
        self.capabilities, self.stats = started.capabilities, started.stats

    async def generate(self, turn: Turn) -> TurnResult:
        try:
            answer: Generated = await _ask(self._link, "generate", turn, GENERATE_DEADLINE_S)
        except (asyncio.CancelledError, ChannelTimeout):
            self._link.notify("abort", TurnName(turn.task, turn.turn))
            raise
        self.stats = answer.stats
        return answer.result

    async def abort(self, task: TaskKey, turn: int) -> None:
        self.stats = await _ask(self._link, "abort", TurnName(task, turn), CONTROL_DEADLINE_S)

    def retain(self, task: TaskKey) -> None:
        self._link.notify("retain", task)

    def release(self, task: TaskKey) -> None:
        self._link.notify("release", task)

    def offload(self, task: TaskKey) -> None:
        self._link.notify("offload", task)

    async def pause(self, mode: PauseMode) -> None:
        self.stats = await _ask(self._link, "pause", mode, CONTROL_DEADLINE_S)

    async def resume(self) -> None:
        self.stats = await _ask(self._link, "resume", None, CONTROL_DEADLINE_S)

    async def load_weights(self, handle: WeightHandle) -> None:
        self.stats = await _ask(self._link, "load_weights", handle, CONTROL_DEADLINE_S)


class ReferenceProxy:
    """A `Reference` on one rank."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self._link = link

    async def logprobs(self, mb: MicroBatch) -> np.ndarray:
        found: np.ndarray = await _ask(self._link, "reference_logprobs", mb, TRAIN_DEADLINE_S)
        return found


class ActorProxy:
    """An `Actor` on one rank."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self._link = link

    async def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None:
        await _ask(self._link, "forward", Forward(mb, proximal), TRAIN_DEADLINE_S)

    async def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None:
        await _ask(self._link, "backward", Backward(mb, ref_logprobs), TRAIN_DEADLINE_S)


class UpdateProxy:
    """The `Update` of one actor rank."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]:
        metrics: dict[str, float] = await _ask(
            self._link, "warm_up", WarmUp(tuple(demos), updates, lr), TRAIN_DEADLINE_S
        )
        return metrics

    async def begin(self, update: int, members: Sequence[int]) -> None:
        await _ask(self._link, "begin", Begin(update, tuple(members)), TRAIN_DEADLINE_S)

    async def finish(self) -> UpdateStats:
        stats: UpdateStats = await _ask(self._link, "finish", None, TRAIN_DEADLINE_S)
        return stats

    async def export(self, version: int) -> WeightHandle:
        handle: WeightHandle = await _ask(self._link, "export", version, TRAIN_DEADLINE_S)
        return handle

    async def discard(self, handle: WeightHandle) -> None:
        await _ask(self._link, "discard", handle, CONTROL_DEADLINE_S)

    async def save(self, directory: str) -> None:
        await _ask(self._link, "save", directory, TRAIN_DEADLINE_S)

    async def restore(self, directory: str) -> None:
        await _ask(self._link, "restore", directory, TRAIN_DEADLINE_S)

    async def save_model(self, directory: str) -> None:
        await _ask(self._link, "save_model", directory, TRAIN_DEADLINE_S)
