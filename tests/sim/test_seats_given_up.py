"""Places that are given up under `ctb`: a probe that fails, a task that is cancelled while it waits, one that moves."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from support.virtual_runs import books_balance, virtual_run

from tiderl.data.errors import EnvironmentFault
from tiderl.data.events import Event, TaskAdmitted, TaskMigrated, TurnFinished
from tiderl.data.records import TaskKey
from tiderl.data.turns import EngineCapabilities, EngineStats, FinishReason, TurnResult
from tiderl.runtime.seats import TaskSeat, TaskSeats
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

    def release(self, task: TaskKey) -> None:
        pass


class Handle:
    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        raise EnvironmentFault("it cannot go on")


class Willing(Handle):
    async def resume(self) -> None:
        pass


class World:
    """Two replicas of 100 positions."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        engines: Any = {0: Engine(0), 1: Engine(1)}
        self.seats = TaskSeats(
            engines,
            RULES,
            self.events.append,
            changed=lambda replica: None,
            moved=lambda key, replica, to: None,
            began=lambda key: None,
        )

    def seat(self, number: int, replica: int = 0) -> TaskSeat:
        key, facts = TaskKey("train", number, 0), TaskFacts()
        return self.seats.seat(key, replica, "train:", 20.0, lambda *_: facts, left=lambda life_s: None)

    async def enter(self, seat: TaskSeat, tokens: int, handle: Any = None) -> asyncio.Task[None]:
        """Asks for a turn of 10 more; what is pending afterwards waits for room."""
        task = asyncio.get_running_loop().create_task(seat.enter(tokens, 10, handle or Willing()))
        await asyncio.sleep(0.0)
        return task

    def used(self, replica: int = 0) -> int:
        return self.seats.pools[replica].used_tokens


def result(key: TaskKey, said: int, reason: FinishReason = "stop") -> TurnResult:
    ids = np.zeros(said, np.int32)
    return TurnResult(key, 0, ids, np.zeros(said, np.float32), np.zeros(said, np.int32), reason, decode_s=1.0)


def test_who_is_cancelled_while_it_waits_wants_no_room_from_then_on() -> None:
    """Its environment may be long in closing: until then others must not wait for it, nor may it be moved."""

    async def main() -> None:
        world = World()
        first, large, small = (world.seat(number) for number in range(3))
        await world.enter(first, 80)
        waits = await world.enter(large, 70)
        behind = await world.enter(small, 60)
        assert not waits.done() and not behind.done()
        waits.cancel()
        await asyncio.sleep(0.0)
        first.ended(result(first.key, 5), 85)
        first.close()
        await asyncio.sleep(0.0)
        assert behind.done(), "the cancelled one came first, and would have taken the room"
        world.seats.migrate({0: 0, 1: 0}, lambda key: 0)
        large.close()
        assert (world.used(0), world.used(1), len(world.seats.pools[0])) == (70, 0, 1)

    run_virtual(main)


def test_an_environment_that_cannot_go_on_gives_its_room_back_at_once() -> None:
    async def main() -> None:
        world = World()
        first, second = world.seat(0), world.seat(1)
        await world.enter(first, 80)
        waits = await world.enter(second, 70, Handle())
        first.close()
        await asyncio.sleep(0.0)
        assert isinstance(waits.exception(), EnvironmentFault)
        assert world.used() == 0

    run_virtual(main)


def test_what_a_task_that_moves_held_goes_to_those_that_wait_behind() -> None:
    async def main() -> None:
        world = World()
        holder, runs, waits = (world.seat(number) for number in range(3))
        await world.enter(holder, 30)
        holder.ended(result(holder.key, 10), 40)
        await world.enter(runs, 40)
        asks = await world.enter(holder, 60)  # holds 40 beside the 50 that run, and needs 70
        behind = await world.enter(waits, 30)
        pool = world.seats.pools[0]
        assert not asks.done() and not behind.done() and pool.used_tokens == 90
        await asyncio.sleep(1.0)
        world.seats.migrate({0: 0, 1: 0}, lambda key: 0 if key == holder.key else None)
        await asyncio.sleep(0.0)
        assert [type(event) for event in world.events if isinstance(event, TaskMigrated)] == [TaskMigrated]
        assert asks.done() and behind.done()
        assert (world.used(0), world.used(1)) == (50 + 40, 70)

    run_virtual(main)


def test_an_interrupted_turn_tells_nothing_of_how_long_turns_take() -> None:
    async def main() -> None:
        world = World()
        seat = world.seat(0)
        await world.enter(seat, 30)
        seat.ended(result(seat.key, 4, "aborted"), 34)
        pool = world.seats.pools[0]
        assert pool.rates.turns == 0
        await world.enter(seat, 34)
        seat.ended(result(seat.key, 6), 40)
        assert pool.rates.turns == 1
        assert pool.kinds["train:"].growth._said.mean == 10.0

    run_virtual(main)


def test_a_probe_that_fails_before_its_first_turn_is_followed_by_another_and_its_group() -> None:
    """Two attempts of member 0 of the first group, and the only one of the second, fail at their reset."""

    def fault(key: TaskKey, turn: int) -> Exception | None:
        fails = (
            turn == -1 and key.split == "train" and key.member == 0 and key.attempt < {0: 2, 1: 1}.get(key.prompt_id, 0)
        )
        return EnvironmentFault("no reset") if fails else None

    run = virtual_run(["rollout.kv_policy=ctb", "rollout.kv_budget_tokens=600"], fault=fault)
    assert books_balance(run.replay) == []
    assert len(run.replay.updates) == 6
    events = run.log.of(TaskAdmitted, TurnFinished)
    for group in (0, 1):
        of_group = [event for event in events if event.split == "train" and event.prompt_id == group]
        admitted = [event.member for event in of_group if isinstance(event, TaskAdmitted)]
        attempts = 3 - group
        assert admitted[:attempts] == [0] * attempts, "nobody else comes before one has begun"
        assert sorted(admitted[attempts:]) == [1, 2, 3]
