"""What every implementation of the Environments port promises: asynchronous, pool, process, simulated.

Each check takes `make(slots) -> Environments`, not started. It needs prompts in both splits and tasks that end within
`TURNS_MAX` turns, whatever is said. Nothing here looks at a wall clock, so the checks also run in virtual time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from tiderl.data.records import Action, Observation, Prompt, Step, TaskKey, Trajectory
from tiderl.runtime.ports import EnvironmentHandle, Environments

Make = Callable[[int], Environments]
TURNS_MAX = 200
A_WHILE_S = 0.05


def key(prompt_id: int, member: int = 0, attempt: int = 0) -> TaskKey:
    return TaskKey("train", prompt_id, member, attempt)


async def started(make: Make, slots: int = 4) -> Environments:
    environments = make(slots)
    await environments.start()
    return environments


async def first_prompt(environments: Environments) -> Prompt:
    return (await environments.prompts("train"))[0]


async def play(handle: EnvironmentHandle, word: str = "go") -> list[Step]:
    """Steps until the task is over."""
    steps = []
    for _ in range(TURNS_MAX):
        steps.append(await handle.step(Action(word)))
        if steps[-1].terminated or steps[-1].truncated:
            return steps
    raise AssertionError(f"no end within {TURNS_MAX} turns")


async def check_the_task_sets_are_lists_that_stay_and_share_nothing(make: Make) -> None:
    environments = await started(make)
    train, evaluation = await environments.prompts("train"), await environments.prompts("eval")
    assert train and evaluation
    assert all(isinstance(prompt, Prompt) for prompt in [*train, *evaluation])
    assert not {prompt.id for prompt in train} & {prompt.id for prompt in evaluation}
    assert [prompt.id for prompt in await environments.prompts("train")] == [prompt.id for prompt in train]
    assert all(isinstance(word, str) for word in await environments.vocabulary())
    await environments.close()


async def check_a_task_runs_from_reset_to_its_end(make: Make) -> None:
    environments = await started(make)
    handle = await environments.open(key(0), await first_prompt(environments))
    assert isinstance(await handle.reset(), Observation)
    steps = await play(handle)
    assert all(isinstance(step.observation, Observation) and math.isfinite(step.reward) for step in steps)
    assert not any(step.terminated or step.truncated for step in steps[:-1])
    await handle.close()
    await environments.close()


async def check_members_of_a_group_start_alike(make: Make) -> None:
    environments = await started(make)
    prompt = await first_prompt(environments)
    handles = [await environments.open(key(0, member), prompt) for member in range(3)]
    starts = await asyncio.gather(*(handle.reset() for handle in handles))
    assert starts[0] == starts[1] == starts[2]
    for handle in handles:
        await handle.close()
    await environments.close()


async def check_tasks_overlap_and_do_not_meet(make: Make) -> None:
    environments = await started(make, slots=8)
    prompts = await environments.prompts("train")

    async def task(number: int) -> list[Step]:
        handle = await environments.open(key(number), prompts[number % len(prompts)])
        try:
            await handle.reset()
            return await play(handle)
        finally:
            await handle.close()

    together = await asyncio.gather(*(task(number) for number in range(8)))
    alone = [await task(number) for number in range(8)]
    assert [[step.reward for step in steps] for steps in together] == [
        [step.reward for step in steps] for steps in alone
    ]
    await environments.close()


async def check_slots_are_enforced_and_given_in_order(make: Make) -> None:
    environments = await started(make, slots=2)
    assert environments.slots == 2
    prompt = await first_prompt(environments)
    holders = [await environments.open(key(number), prompt) for number in range(2)]
    order: list[int] = []

    async def wait_for_one(number: int) -> EnvironmentHandle:
        handle = await environments.open(key(number), prompt)
        order.append(number)
        return handle

    waiting = []
    for number in range(2, 5):
        waiting.append(asyncio.create_task(wait_for_one(number)))
        await asyncio.sleep(0)
    await asyncio.sleep(A_WHILE_S)
    assert order == []
    await holders[0].close()
    await asyncio.sleep(A_WHILE_S)
    assert order == [2]
    await holders[1].close()
    await (await waiting[0]).close()
    await (await waiting[1]).close()
    await (await waiting[2]).close()
    assert order == [2, 3, 4]
    await environments.close()


async def check_a_slot_is_given_back_exactly_once(make: Make) -> None:
    environments = await started(make, slots=1)
    prompt = await first_prompt(environments)
    never_reset = await environments.open(key(0), prompt)
    await never_reset.close()
    await never_reset.close()
    holder = await environments.open(key(1), prompt)
    await holder.reset()
    await never_reset.close()
    waiting = asyncio.create_task(environments.open(key(2), prompt))
    await asyncio.sleep(A_WHILE_S)
    assert not waiting.done()
    await holder.close()
    await holder.close()
    await (await waiting).close()
    await environments.close()


async def check_who_stops_waiting_takes_no_slot(make: Make) -> None:
    environments = await started(make, slots=1)
    prompt = await first_prompt(environments)
    holder = await environments.open(key(0), prompt)
    gone = asyncio.create_task(environments.open(key(1), prompt))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await holder.close()
    await (await environments.open(key(2), prompt)).close()
    await environments.close()


async def check_a_task_can_end_in_the_middle(make: Make) -> None:
    environments = await started(make, slots=1)
    prompt = await first_prompt(environments)
    handle = await environments.open(key(0), prompt)
    await handle.reset()
    step = asyncio.create_task(handle.step(Action("go")))
    await asyncio.sleep(0)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    await handle.close()
    again = await environments.open(key(0, attempt=1), prompt)
    await again.reset()
    await play(again)
    await again.close()
    await environments.close()


async def check_pauses_between_steps_change_nothing(make: Make) -> None:
    environments = await started(make)
    prompt = await first_prompt(environments)
    handle = await environments.open(key(0), prompt)
    await handle.reset()
    straight = await play(handle)
    await handle.close()
    handle = await environments.open(key(0), prompt)
    await handle.reset()
    paused = []
    for _ in straight:
        await handle.pause()
        await handle.resume()
        paused.append(await handle.step(Action("go")))
    assert [(s.observation, s.reward, s.terminated, s.truncated) for s in paused] == [
        (s.observation, s.reward, s.terminated, s.truncated) for s in straight
    ]
    await handle.close()
    await environments.close()


async def check_a_task_can_end_while_it_is_paused(make: Make) -> None:
    environments = await started(make, slots=1)
    prompt = await first_prompt(environments)
    handle = await environments.open(key(0), prompt)
    await handle.reset()
    await handle.pause()
    await handle.close()
    again = await environments.open(key(0, attempt=1), prompt)
    await again.reset()
    await play(again)
    await again.close()
    await environments.close()


async def check_a_score_is_a_number_or_nothing(make: Make) -> None:
    environments = await started(make)
    handle = await environments.open(key(0), await first_prompt(environments))
    await handle.reset()
    await play(handle)
    ids = np.zeros(3, np.int32)
    trajectory = Trajectory(
        id=0,
        key=key(0),
        ids=ids,
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        versions=np.array([-1, 0, 0], np.int32),
        turns=(),
        reward=1.0,
        success=True,
        ending="terminated",
    )
    score = await handle.score(trajectory)
    assert score is None or math.isfinite(score)
    await handle.close()
    await environments.close()


async def check_an_expert_where_declared_gives_actions(make: Make) -> None:
    environments = await started(make)
    if environments.has_expert:
        actions = await environments.expert(await first_prompt(environments))
        assert actions
        assert all(isinstance(action, str) for action in actions)
    await environments.close()


async def check_closing_twice_is_closing_once(make: Make) -> None:
    environments = await started(make)
    handle = await environments.open(key(0), await first_prompt(environments))
    await handle.reset()
    await environments.close()
    await environments.close()
    await handle.close()  # never raises


CHECKS: tuple[Callable[[Make], Coroutine[Any, Any, None]], ...] = (
    check_the_task_sets_are_lists_that_stay_and_share_nothing,
    check_a_task_runs_from_reset_to_its_end,
    check_members_of_a_group_start_alike,
    check_tasks_overlap_and_do_not_meet,
    check_slots_are_enforced_and_given_in_order,
    check_a_slot_is_given_back_exactly_once,
    check_who_stops_waiting_takes_no_slot,
    check_a_task_can_end_in_the_middle,
    check_pauses_between_steps_change_nothing,
    check_a_task_can_end_while_it_is_paused,
    check_a_score_is_a_number_or_nothing,
    check_an_expert_where_declared_gives_actions,
    check_closing_twice_is_closing_once,
)


def run_suite(make: Make, run: Callable[[Coroutine[Any, Any, None]], Any] = asyncio.run) -> None:
    """Every check, each in a run of its own: `asyncio.run`, or that of a virtual loop."""
    for check in CHECKS:
        run(check(make))
