"""The warm start: the environment's expert plays, the trainer imitates. Not part of the run's clock of goodput.

Warm-up trajectories are in no table and count nowhere (I1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Prompt, TaskKey, Trajectory
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import WarmupSettings
from tiderl.runtime.ports import Ports
from tiderl.runtime.task import TaskLimits, play_expert


async def warm_start(
    ports: Ports, prompts: Sequence[Prompt], settings: WarmupSettings, limits: TaskLimits
) -> dict[str, float]:
    """Has the expert demonstrate these prompts and trains on what succeeded; the trainer's metrics come back."""
    if settings.demos == 0 or settings.updates == 0:
        return await ports.cluster.update.warm_up([], 0, settings.lr)
    if not ports.environments.has_expert:
        raise ConfigurationError(
            "the environment has no expert to learn from", where="warmup.demos", hint="set warmup.demos: 0"
        )
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(_demonstrate(ports, TaskKey("warmup", number, 0), prompt, limits))
            for number, prompt in enumerate(prompts)
        ]
    demos = [_as_sequence(task.result()) for task in running if task.result().success]
    if not demos:
        raise ConfigurationError(
            f"the environment's expert solved none of {len(running)} prompts",
            where="warmup.demos",
            hint="check it with: tiderl env check NAME",
        )
    return await ports.cluster.update.warm_up(demos, settings.updates, settings.lr)


async def _demonstrate(ports: Ports, key: TaskKey, prompt: Prompt, limits: TaskLimits) -> Trajectory:
    actions = await ports.environments.expert(prompt)
    return await play_expert(
        key=key,
        prompt=prompt,
        actions=actions,
        limits=limits,
        environments=ports.environments,
        renderer=ports.renderer,
    )


def _as_sequence(trajectory: Trajectory) -> TrainSequence:
    return TrainSequence(
        trajectory_id=trajectory.id,
        prompt_id=trajectory.key.prompt_id,
        member=0,
        ids=trajectory.ids,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        reward=trajectory.reward,
        group_rewards=np.array([trajectory.reward], np.float64),
    )
