"""The warm start: the environment's expert plays, the trainer imitates. Not part of the run's clock of goodput.

Warm-up trajectories are in no table and count nowhere (I1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tiderl.data.errors import ConfigurationError, EnvironmentFault, InfrastructureFault
from tiderl.data.records import Prompt, TaskKey, Trajectory
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import WarmupSettings
from tiderl.runtime.ports import Ports
from tiderl.runtime.task import TaskLimits, play_expert
from tiderl.schedule.groups import MAX_RETRIES


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
            tasks.create_task(_demonstrate(ports, number, prompt, limits)) for number, prompt in enumerate(prompts)
        ]
    played = [task.result() for task in running]
    demos = [_as_sequence(demo) for demo in played if isinstance(demo, Trajectory) and demo.success]
    if not demos:
        faults = [demo for demo in played if not isinstance(demo, Trajectory)]
        last = f"; the last of {len(faults)} failures: {faults[-1].what}" if faults else ""
        raise ConfigurationError(
            f"the environment's expert solved none of {len(running)} prompts{last}",
            where="warmup.demos",
            hint="check it with: tiderl env check NAME",
        )
    return await ports.cluster.update.warm_up(demos, settings.updates, settings.lr)


async def _demonstrate(
    ports: Ports, number: int, prompt: Prompt, limits: TaskLimits
) -> Trajectory | EnvironmentFault | InfrastructureFault:
    """One demonstration, tried again once after a fault as in training; the fault where that failed too."""
    fault: EnvironmentFault | InfrastructureFault | None = None
    for attempt in range(1 + MAX_RETRIES):
        try:
            return await play_expert(
                key=TaskKey("warmup", number, 0, attempt),
                prompt=prompt,
                actions=await ports.environments.expert(prompt),
                limits=limits,
                environments=ports.environments,
                renderer=ports.renderer,
            )
        except (EnvironmentFault, InfrastructureFault) as error:
            fault = error
    assert fault is not None
    return fault


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
