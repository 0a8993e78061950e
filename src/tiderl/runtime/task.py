"""The life of one task: environment steps and engine turns, until one of them ends it.

Keeps I8 with its record (`record.py`): appended ids only, those sampled and those rendered from what is new. Knows
nothing of groups, schedules or journals: it plays, and answers with a trajectory or raises the typed fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.data.errors import FirstObservationTooLong, VerifierFault
from tiderl.data.events import EnvStepFinished, Event, TurnFinished
from tiderl.data.forks import Span
from tiderl.data.records import (
    Action,
    Ending,
    Observation,
    Prompt,
    Step,
    TaskKey,
    Trajectory,
    TurnSpan,
)
from tiderl.data.rng import stream_seed
from tiderl.data.turns import Sampling, Turn, TurnResult
from tiderl.data.window import ImageWindow
from tiderl.runtime.ports import EnvironmentHandle, Environments, Renderer
from tiderl.runtime.record import TokenRecord
from tiderl.runtime.seat import Seat

SCORE_ATTEMPTS = 3
"""A verifier fault is scored again up to this often before the trajectory is dropped (architecture §8)."""


@dataclass(frozen=True)
class TaskLimits:
    """What bounds one task, and how it samples."""

    seed: int
    max_turns: int
    max_context_tokens: int
    max_new_tokens_per_turn: int
    temperature: float
    image_window: ImageWindow | None = None
    """None: all images stay in the context."""


class TaskPlayer:
    """Plays one task on one engine. One object per attempt."""

    def __init__(
        self,
        *,
        key: TaskKey,
        trajectory_id: int,
        prompt: Prompt,
        limits: TaskLimits,
        seat: Seat,
        environments: Environments,
        renderer: Renderer,
        emit: Callable[[Event], None],
    ) -> None:
        self.key, self.trajectory_id, self.prompt = key, trajectory_id, prompt
        self.limits = limits
        self.seat, self.environments, self.renderer, self.emit = seat, environments, renderer, emit
        self.record = TokenRecord(limits.image_window)
        self.texts: list[str] = []
        self.turns: list[TurnSpan] = []
        self.rewards = 0.0
        self.success: bool | None = None

    async def play(self) -> Trajectory:
        """Raises the `EnvironmentFault`, `VerifierFault` or `InfrastructureFault` that ended it."""
        try:
            handle = await self.environments.open(self.key, self.prompt)
            try:
                self._begin(await handle.reset())
                ending = await self._turns(handle)
                self.seat.over()
                return await self._finish(handle, ending)
            finally:
                self.seat.close()  # its environment may be long in closing, and others wait for the room
                await handle.close()
        finally:
            self.seat.close()

    async def _turns(self, handle: EnvironmentHandle) -> Ending:
        for number in range(self.limits.max_turns):
            room = self.limits.max_context_tokens - self.record.context_tokens
            start = self.record.length
            ids, finish_reason = await self._generate(handle, number, min(room, self.limits.max_new_tokens_per_turn))
            action = self.renderer.parse(ids)
            step = await self._step(handle, number, action)
            self.rewards += step.reward
            if "success" in step.info:
                self.success = bool(step.info["success"])
            self.turns.append(
                TurnSpan(
                    start=start,
                    end=self.record.length,
                    reward=step.reward,
                    action=action.text or action.malformed,
                    finish_reason=finish_reason,
                )
            )
            if step.terminated or step.truncated:
                return "terminated" if step.terminated else "truncated"
            assert isinstance(step.observation, Observation)
            new, images = self.renderer.extend(step.observation, ids), self._images(step.observation)
            if self.record.context_tokens_with(new, images) >= self.limits.max_context_tokens:
                return "budget_tokens"
            self.record.append_context(new, images)
            self.texts.append(step.observation.as_text())
        return "budget_turns"

    def _begin(self, observation: Observation) -> None:
        new = self.renderer.begin(observation)
        if len(new) >= self.limits.max_context_tokens:
            raise FirstObservationTooLong(
                f"the first observation has {len(new)} tokens, rollout.max_context_tokens is "
                f"{self.limits.max_context_tokens}",
                where=f"prompt {self.prompt.id}",
            )
        self.record.append_context(new, self._images(observation))
        self.texts.append(observation.as_text())

    def _images(self, observation: Observation) -> tuple[Span, ...]:
        """Where in the observation's ids its images are, as far as that counts."""
        return () if self.limits.image_window is None else self.renderer.images(observation)

    async def _generate(self, handle: EnvironmentHandle, number: int, max_new_tokens: int) -> tuple[np.ndarray, str]:
        """The turn's ids. An interrupted generation is continued from the tokens that came back."""
        parts: list[np.ndarray] = []
        left = max_new_tokens
        while True:
            ids = self.record.context()
            await self.seat.enter(len(ids), left, handle, first_ids=None if number else ids)
            turn = Turn(
                task=self.key,
                turn=number,
                ids=ids,
                sampling=Sampling(
                    temperature=self.limits.temperature,
                    max_new_tokens=left,
                    stop_ids=self.renderer.stop_ids,
                    seed=stream_seed(
                        self.limits.seed,
                        "sampling",
                        self.key.split,
                        self.key.prompt_id,
                        self.key.member,
                        self.key.attempt,
                        self.trajectory_id,
                        number,
                        len(parts),
                    ),
                ),
                remaining_tokens=self.limits.max_context_tokens - self.record.context_tokens,
                priority=self.seat.priority,
                rewrites=self.record.rewrites,
            )
            result = await self.seat.engine.generate(turn)
            self.record.append_sampled(result)
            self.seat.ended(result, self.record.context_tokens)
            parts.append(result.ids)
            left -= len(result.ids)
            self._emit_turn(turn, result)
            if result.finish_reason != "aborted":
                return np.concatenate(parts) if len(parts) > 1 else parts[0], result.finish_reason
            if left < 1:
                return np.concatenate(parts), "length"

    async def _step(self, handle: EnvironmentHandle, number: int, action: Action) -> Step:
        loop = asyncio.get_running_loop()
        started = loop.time()
        if action.malformed:
            step = Step(Observation.text(f"error: {action.malformed}"))
        else:
            step = await handle.step(action)
        self.emit(
            EnvStepFinished(
                t_s=loop.time(),
                split=self.key.split,
                prompt_id=self.key.prompt_id,
                member=self.key.member,
                attempt=self.key.attempt,
                turn=number,
                seconds=loop.time() - started,
                reward=step.reward,
            )
        )
        return step

    async def _finish(self, handle: EnvironmentHandle, ending: Ending) -> Trajectory:
        reward = self.rewards
        scored = await self._score(handle, self._trajectory(reward, ending))
        if scored is not None:
            reward = scored
        return self._trajectory(reward, ending)

    async def _score(self, handle: EnvironmentHandle, trajectory: Trajectory) -> float | None:
        for attempt in range(SCORE_ATTEMPTS):
            try:
                return await handle.score(trajectory)
            except VerifierFault:
                if attempt == SCORE_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _trajectory(self, reward: float, ending: Ending) -> Trajectory:
        loss_mask, logprobs, versions = self.record.columns()
        return Trajectory(
            id=self.trajectory_id,
            key=self.key,
            ids=self.record.joined(),
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            turns=tuple(self.turns),
            reward=reward,
            success=reward > 0 if self.success is None else self.success,
            ending=ending,
            text=tuple(self.texts),
            forks=self.record.forks,
        )

    def _emit_turn(self, turn: Turn, result: TurnResult) -> None:
        self.emit(
            TurnFinished(
                t_s=asyncio.get_running_loop().time(),
                split=self.key.split,
                prompt_id=self.key.prompt_id,
                member=self.key.member,
                attempt=self.key.attempt,
                turn=turn.turn,
                replica=self.seat.engine.replica,
                context_tokens=len(turn.ids),
                new_tokens=len(result.ids),
                cached_tokens=result.cached_tokens,
                version=int(result.versions[-1]) if len(result.versions) else -1,
                first_version=int(result.versions[0]) if len(result.versions) else -1,
                finish_reason=result.finish_reason,
                queued_s=result.queued_s,
                prefill_s=result.prefill_s,
                decode_s=result.decode_s,
                recompute_s=result.recompute_s,
                ended_s=result.ended_s,
            )
        )


async def play_expert(
    *,
    key: TaskKey,
    prompt: Prompt,
    actions: Sequence[str],
    limits: TaskLimits,
    environments: Environments,
    renderer: Renderer,
) -> Trajectory:
    """A demonstration: the expert's actions as if the policy had sampled them (log-probs 0, versions -1)."""
    record, turns, texts = TokenRecord(), [], []
    ids: np.ndarray | None = None
    reward = 0.0
    success: bool | None = None
    ending: Ending = "budget_turns"
    handle = await environments.open(key, prompt)
    try:
        observation: Observation | str = await handle.reset()
        for number, text in enumerate(actions[: limits.max_turns]):
            assert isinstance(observation, Observation)
            record.append_context(renderer.extend(observation, ids) if number else renderer.begin(observation))
            texts.append(observation.as_text())
            start, ids = record.length, renderer.action_ids(text)
            record.append_sampled(
                TurnResult(
                    task=key,
                    turn=number,
                    ids=ids,
                    logprobs=np.zeros(len(ids), np.float32),
                    versions=np.full(len(ids), -1, np.int32),
                    finish_reason="stop",
                )
            )
            step = await handle.step(renderer.parse(ids))
            reward += step.reward
            success = bool(step.info["success"]) if "success" in step.info else success
            turns.append(TurnSpan(start, record.length, step.reward, text, "stop"))
            observation = step.observation
            if step.terminated or step.truncated:
                ending = "terminated" if step.terminated else "truncated"
                break
    finally:
        await handle.close()
    loss_mask, logprobs, versions = record.columns()
    return Trajectory(
        id=-1,
        key=key,
        ids=record.joined(),
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        turns=tuple(turns),
        reward=reward,
        success=reward > 0 if success is None else success,
        ending=ending,
        text=tuple(texts),
    )
