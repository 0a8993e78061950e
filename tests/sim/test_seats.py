"""Where a task's turns run under `ctb`: what `TaskSeats` does with what the pools decide, replica by replica."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tiderl.data.errors import EnvironmentRaised
from tiderl.data.events import Event, TaskMigrated, TaskPaused, TaskResumed
from tiderl.data.records import Observation, Prompt, TaskKey
from tiderl.data.turns import EngineCapabilities, EngineStats, TurnResult
from tiderl.runtime.seats import TaskSeat, TaskSeats
from tiderl.runtime.task import TaskLimits, TaskPlayer
from tiderl.schedule.priority import TaskFacts
from tiderl.schedule.tasks import KvRules
from tiderl.sim.loop import run_virtual

BUDGET = 100
RULES = KvRules(max_turns=4, max_context_tokens=BUDGET, group_size=2, unlimited_tokens=BUDGET, patience_s=5.0)


class Engine:
    """As much of an engine as seats look at."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.capabilities = EngineCapabilities(retain=True, offload=False, kv_budget_tokens=BUDGET)
        self.stats = EngineStats(version=0, running=1, waiting=0, resident_tokens=0, budget_tokens=BUDGET)
        self.released: list[TaskKey] = []

    def release(self, task: TaskKey) -> None:
        self.released.append(task)


class Handle:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def pause(self) -> None:
        self.asked.append("pause")

    async def resume(self) -> None:
        self.asked.append("resume")


class World:
    """Two replicas of 100 positions."""

    def __init__(self, max_turns: int = 4) -> None:
        self.engines = {0: Engine(0), 1: Engine(1)}
        self.events: list[Event] = []
        engines: Any = self.engines
        self.seats = TaskSeats(
            engines,
            replace(RULES, max_turns=max_turns),
            self.events.append,
            changed=lambda replica: None,
            moved=lambda key, replica, to: None,
            began=lambda key: None,
        )

    def seat(self, member: int, replica: int = 0, split: str = "train") -> TaskSeat:
        return self.seats.seat(
            TaskKey(split, member, 0),
            replica,
            f"{split}:",
            20.0,
            lambda resident, now_s: TaskFacts(evaluation=split == "eval"),
            left=lambda life_s: None,
        )

    async def enter(self, seat: TaskSeat, tokens: int, new: int = 10) -> tuple[asyncio.Task[None], Handle]:
        """Asks for a turn; what is pending afterwards waits for room."""
        handle: Any = Handle()
        task = asyncio.get_running_loop().create_task(seat.enter(tokens, new, handle))
        await asyncio.sleep(0.0)
        return task, handle

    def end(self, seat: TaskSeat, tokens: int, *, version: int = 0) -> None:
        """Its turn sampled one token; the context has `tokens` now."""
        result = TurnResult(
            seat.key, 0, np.zeros(1, np.int32), np.zeros(1, np.float32), np.array([version], np.int32), "stop"
        )
        seat.ended(result, tokens)

    def migrate(self, versions: Mapping[int, int], oldest: int | None = 0) -> list[TaskMigrated]:
        self.seats.migrate(versions, lambda key: oldest)
        return [event for event in self.events if isinstance(event, TaskMigrated)]


def test_a_task_without_room_pauses_and_goes_on_once_when_there_is() -> None:
    async def main() -> None:
        world = World()
        first, second = world.seat(0), world.seat(1)
        await world.enter(first, 80)
        waiting, handle = await world.enter(second, 50)
        assert handle.asked == ["pause"]
        book = world.seats.books()[0]
        assert (book.used_tokens, book.tasks, dict(book.waiting)) == (90, 2, {second.key: 60})
        await asyncio.sleep(3.0)
        first.over()
        await waiting
        assert handle.asked == ["pause", "resume"]
        second.close()
        assert world.engines[0].released == [first.key, second.key]
        named = {"split": "train", "prompt_id": 1, "member": 0, "replica": 0}
        assert world.events == [TaskPaused(t_s=0.0, reason="no_room", **named), TaskResumed(t_s=3.0, **named)]
        left = world.seats.books()[0]
        assert (left.used_tokens, left.tasks, dict(left.waiting)) == (0, 0, {})

    run_virtual(main)


def test_evaluations_and_training_are_told_apart() -> None:
    async def main() -> None:
        world = World()
        await world.enter(world.seat(0), 80)
        waiting, _ = await world.enter(world.seat(0, split="eval"), 50)
        assert [(type(event), event.split) for event in world.events] == [(TaskPaused, "eval")]
        waiting.cancel()

    run_virtual(main)


async def said_by(world: World, version: int) -> TaskSeat:
    """A task on replica 0 whose newest token is of this version, and that waits for room there."""
    other, seat = world.seat(0), world.seat(1)
    await world.enter(seat, 20)
    world.end(seat, 30, version=version)
    await world.enter(other, 80)
    await world.enter(seat, 50)
    return seat


def test_a_task_goes_nowhere_where_weights_are_older_than_its_newest_token() -> None:
    """Its group may start at version 1; what it has said is of version 3, and versions never fall (I6)."""

    async def main() -> None:
        for version, moves in ((2, False), (3, True), (4, True)):
            world = World()
            seat = await said_by(world, 3)
            await asyncio.sleep(1.0)
            assert bool(world.migrate({0: 3, 1: version}, oldest=1)) is moves
            assert seat.engine.replica == (1 if moves else 0)

    run_virtual(main)


def test_a_task_goes_only_where_it_runs_at_once() -> None:
    """It may need 60 positions. Of replica 1 a turn has 10 and may say 50, or 30, more: to wait there would only cost
    the task its place."""

    async def main() -> None:
        for says, moves in ((50, False), (30, True)):
            world = World(max_turns=1)  # nothing grows later
            await world.enter(world.seat(2, replica=1), 10, says)
            await world.enter(world.seat(0), 80)
            seat = world.seat(1)
            await world.enter(seat, 50)
            await asyncio.sleep(1.0)
            assert len(world.migrate({0: 0, 1: 0})) == moves
            assert (seat.key in world.seats.books()[seat.replica].waiting) is not moves

    run_virtual(main)


def test_a_task_whose_rank_is_away_goes_elsewhere_and_may_wait_there() -> None:
    async def main() -> None:
        world = World()
        seat = await said_by(world, 0)
        world.seats.open(0, False)
        assert [event.reason for event in world.migrate({1: 0})] == ["lost"]
        assert seat.replica == 1
        assert not world.seats.books()[0].waiting

    run_virtual(main)


def test_a_task_that_needs_its_own_weights_stays() -> None:
    async def main() -> None:
        world = World()
        await said_by(world, 0)
        await asyncio.sleep(1.0)
        assert world.migrate({0: 0, 1: 0}, oldest=None) == []

    run_virtual(main)


def test_a_task_that_fails_gives_its_place_up_before_its_environment_closes() -> None:
    """An environment may be long in closing."""
    told: list[str] = []

    class Fails:
        async def reset(self) -> Observation:
            raise EnvironmentRaised("the environment raised")

        async def close(self) -> None:
            told.append("environment")

    class Opens:
        async def open(self, key: TaskKey, prompt: Prompt) -> Fails:
            return Fails()

    class Place:
        def close(self) -> None:
            told.append("place")

    fakes: dict[str, Any] = {"seat": Place(), "environments": Opens(), "renderer": None}
    limits = TaskLimits(0, max_turns=1, max_context_tokens=10, max_new_tokens_per_turn=1, temperature=1.0)
    player = TaskPlayer(
        key=TaskKey("train", 0, 0),
        trajectory_id=0,
        prompt=Prompt("p", 0),
        limits=limits,
        emit=lambda event: None,
        **fakes,
    )
    with pytest.raises(EnvironmentRaised):
        run_virtual(player.play)
    assert told[:2] == ["place", "environment"]
