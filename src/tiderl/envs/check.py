"""What `tiderl env check` finds out before a run is spent on an environment: one finding a promise of the protocol.

Runs the environment for real, in two workers, so that what depends on a process (the order of a set, a global counter)
shows. Returns findings and figures; printing is the command line's.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import psutil

from tiderl.data.errors import TideError
from tiderl.data.records import Action, Prompt, TaskKey
from tiderl.data.rng import stream_seed
from tiderl.envs.base import RESERVED
from tiderl.envs.findings import Finding, Report, Verdict
from tiderl.envs.inprocess import AsyncEnvironments
from tiderl.envs.leaks import measure
from tiderl.envs.pool import PoolEnvironments
from tiderl.envs.trial import opened

T = TypeVar("T")

PROMPTS_TRIED = 50
PROMPTS_REPEATED = 10
"""Determinism and unknown actions are tried on fewer: each costs two episodes."""
EXPERT_SUCCESS_LEAST = 0.95
UNKNOWN_ACTION = "?!"
UNKNOWN_WORDS_SHOWN = 40  # enough to complete the vocabulary of a small world from
RANDOM_WORLD = "same actions, same answers"
AWAITED = ("reset", "step")  # one of them is a coroutine where a class is meant for the event loop
PLAIN_WORDS = ("go", "yes", "no")  # what is said where there is neither expert nor vocabulary


def check(
    name: str, options: Mapping[str, Any], *, max_turns: int = 16, deadline_s: float = 30.0, seed: int = 0
) -> Report:
    """Try the environment. Raises `ConfigurationError` when it cannot be loaded at all; all else is a finding."""
    return asyncio.run(_check(name, options, max_turns, deadline_s, seed))


async def _check(name: str, options: Mapping[str, Any], max_turns: int, deadline_s: float, seed: int) -> Report:
    async with opened(name, options, workers=2, deadline_s=deadline_s) as environments:
        trial = _Trial(environments, max_turns, seed)
        try:
            await trial.run()
        except TideError as error:
            trial.find("protocol", "problem", str(error).replace("\n", " "))
        return Report(name, tuple(trial.findings), trial.figures())


@dataclass
class _Episode:
    """What one episode showed."""

    texts: list[str]
    rewards: list[float] = field(default_factory=list)
    over: bool = False
    success: bool = False


class _Trial:
    def __init__(self, environments: AsyncEnvironments | PoolEnvironments, max_turns: int, seed: int) -> None:
        self.environments = environments
        self.max_turns = max_turns
        self.seed = seed
        self.findings: list[Finding] = []
        self._seconds: dict[str, list[float]] = {"reset": [], "step": []}
        self._first_words: list[int] = []
        self._later_words: list[int] = []
        self._expert_turns: list[int] = []
        self._seen: set[str] = set()
        self._opened = 0

    def find(self, promise: str, verdict: Verdict, detail: str) -> None:
        self.findings.append(Finding(promise, verdict, detail))

    async def run(self) -> None:
        description = self.environments.description
        self.find("loads", "ok", f"declares {', '.join(description.declared) or 'nothing beyond what is required'}")
        reserved = [name for name in RESERVED if name in description.declared]
        if reserved:
            self.find("reserved methods", "note", f"{', '.join(reserved)}: declared, and not called yet")
        self._check_isolation()
        prompts = await self._check_task_sets()
        vocabulary = await self.environments.vocabulary()
        starts = await self._check_expert(prompts) if self.environments.has_expert else await self._wander(prompts)
        self._check_starts(starts)
        await self._check_unknown_action(prompts)
        await self._check_determinism(prompts, vocabulary)
        await self._check_pause(prompts[0], vocabulary)
        await self._check_leaks(prompts, vocabulary)
        self._check_words(vocabulary)
        self._check_times()

    def _check_isolation(self) -> None:
        """Workers run no coroutines: a class that has some is for the driver's event loop, or mistaken."""
        coroutines = self.environments.description.coroutines
        if not coroutines:
            return
        names = f"{', '.join(coroutines)}: `async def`"
        if any(name in coroutines for name in AWAITED):
            self.find("isolation", "note", f"{names}: it runs under env.isolation: async alone")
        else:
            detail = f"{names} beside plain {' and '.join(AWAITED)}: env.isolation pool and process refuse the class"
            self.find("isolation", "problem", f"{detail}; write plain `def`, or step as `async def` too")

    def figures(self) -> dict[str, float]:
        """Percentiles of seconds, words and turns over all episodes."""
        figures: dict[str, float] = {}
        for name, values in (
            ("reset_s", self._seconds["reset"]),
            ("step_s", self._seconds["step"]),
            ("first_observation_words", self._first_words),
            ("observation_words", self._later_words),
            ("expert_turns", self._expert_turns),
        ):
            if values:
                for percentile in (50, 90, 99, 100):
                    figures[f"{name}_p{percentile}"] = float(np.percentile(values, percentile))
        return figures

    async def _check_task_sets(self) -> Sequence[Prompt]:
        train, evaluation = await self.environments.prompts("train"), await self.environments.prompts("eval")
        again = await self.environments.prompts("train")
        if [_start_of(prompt) for prompt in train] != [_start_of(prompt) for prompt in again]:
            self.find("same task set", "problem", "prompts('train') gave another list the second time")
        shared = {_start_of(prompt) for prompt in train} & {_start_of(prompt) for prompt in evaluation}
        counts = f"{len(train)} train and {len(evaluation)} eval prompts"
        if shared:
            self.find("task sets", "problem", f"{counts}; {len(shared)} starts (seed and payload) are in both")
        else:
            self.find("task sets", "ok", f"{counts}, no start in both")
        step = max(1, len(evaluation) // PROMPTS_TRIED)
        return evaluation[::step][:PROMPTS_TRIED]

    async def _check_expert(self, prompts: Sequence[Prompt]) -> list[str]:
        wins, starts = 0, []
        for prompt in prompts:
            actions = await self.environments.expert(prompt)
            episode = await self._episode(prompt, actions)
            starts.append(episode.texts[0])
            self._expert_turns.append(len(actions))
            wins += episode.success and len(actions) <= self.max_turns
        fraction = wins / len(prompts)
        turns = np.percentile(self._expert_turns, [50, 100])
        detail = (
            f"solves {wins} of {len(prompts)} prompts within {self.max_turns} turns; "
            f"it takes {turns[0]:.0f} turns (median), {turns[1]:.0f} at most"
        )
        self.find("expert", "ok" if fraction >= EXPERT_SUCCESS_LEAST else "problem", detail)
        return starts

    async def _wander(self, prompts: Sequence[Prompt]) -> list[str]:
        self.find("expert", "note", "none declared: no warm start, and nothing shows that the task can be solved")
        vocabulary = await self.environments.vocabulary()
        return [(await self._episode(prompt, self._words(prompt, vocabulary))).texts[0] for prompt in prompts]

    def _check_starts(self, starts: Sequence[str]) -> None:
        different = len(set(starts))
        verdict: Verdict = "note" if different == 1 and len(starts) > 1 else "ok"
        self.find("starts", verdict, f"{different} different first observations of {len(starts)} prompts")

    async def _check_determinism(self, prompts: Sequence[Prompt], vocabulary: Sequence[str]) -> None:
        """Two objects at a time, which the pool puts into two workers."""
        tried = prompts[:PROMPTS_REPEATED]
        for prompt in tried:
            words = await self._actions(prompt, vocabulary)
            one, other = await asyncio.gather(self._episode(prompt, words), self._episode(prompt, words))
            if one.texts[0] != other.texts[0]:
                detail = f"prompt {prompt.id} starts as {one.texts[0][:80]!r} and as {other.texts[0][:80]!r}"
                self.find("same prompt, same start", "problem", detail)
                return
            if (one.texts, one.rewards) != (other.texts, other.rewards):
                detail = f"the same actions on prompt {prompt.id} were answered differently: the world is random"
                self.find(RANDOM_WORLD, "note", detail)
                break
        where = "one process: it is async" if len(self.environments.pids()) == 1 else "two processes"
        self.find("same prompt, same start", "ok", f"tried {len(tried)} prompts in two objects each, in {where}")

    async def _check_pause(self, prompt: Prompt, vocabulary: Sequence[str]) -> None:
        """The same actions, once straight on and once with a pause before each step."""
        description = self.environments.description
        declared = [name for name in ("pause", "resume") if name in description.declared]
        if not declared:
            return
        if len(declared) == 1:
            self.find("one of pause and resume", "note", f"declares only {declared[0]}: it alone is called")
        words = await self._actions(prompt, vocabulary)
        straight = await self._episode(prompt, words)
        try:
            paused = await self._episode(prompt, words, pauses=True)
        except TideError as error:
            detail = f"prompt {prompt.id} fails where it pauses before each step: {error}".replace("\n", " ")
            self.find("pause", "problem", detail)
            return
        if (straight.texts, straight.rewards) == (paused.texts, paused.rewards):
            self.find("pause", "ok", f"prompt {prompt.id} paused {len(paused.rewards)} times and went on as without")
        else:
            random_world = any(finding.promise == RANDOM_WORLD for finding in self.findings)
            detail = f"the same actions on prompt {prompt.id} were answered differently after pauses"
            self.find("pause", "note" if random_world else "problem", detail)

    async def _check_leaks(self, prompts: Sequence[Prompt], vocabulary: Sequence[str]) -> None:
        async def play(number: int) -> None:
            prompt = prompts[number % len(prompts)]
            await self._episode(prompt, await self._actions(prompt, vocabulary))

        try:
            leaks = await measure(play, self.environments.pids)
        except psutil.Error:
            leaks = None
        if leaks is None:
            self.find("leaks", "note", "not measured: a worker process was replaced meanwhile")
        elif leaks.found:
            self.find("leaks", "problem", f"every episode leaves behind {', '.join(leaks.found)}")
        else:
            memory = f"memory grew by {max(0.0, leaks.bytes_each) / 1024:.1f} KiB an episode"
            self.find("leaks", "ok", f"{leaks.episodes} episodes left no thread and no process; {memory}")

    async def _check_unknown_action(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts[:PROMPTS_REPEATED]:
            try:
                await self._episode(prompt, [UNKNOWN_ACTION])
            except TideError as error:
                detail = f"{UNKNOWN_ACTION!r} is answered by a fault, not by a Step: {error}".replace("\n", " ")
                self.find("unknown action", "problem", detail)
                return
        self.find("unknown action", "ok", "is answered by a Step")

    def _check_words(self, vocabulary: Sequence[str]) -> None:
        if self._later_words:
            first, later = (np.percentile(words, [50, 100]) for words in (self._first_words, self._later_words))
            detail = (
                f"first {first[0]:.0f} (median), {first[1]:.0f} at most; later {later[0]:.0f}, {later[1]:.0f} at most"
            )
            self.find("observation words", "ok", detail)
        if not vocabulary:
            self.find("vocabulary", "note", "none declared: the words tokenizer cannot be used")
            return
        unknown = sorted(self._seen - {word.lower() for word in vocabulary})
        if unknown:
            some = ", ".join(map(repr, unknown[:UNKNOWN_WORDS_SHOWN]))
            self.find("vocabulary", "problem", f"{len(unknown)} words that were seen are not in it: {some}")
        else:
            self.find("vocabulary", "ok", f"holds all {len(self._seen)} words that were seen, {len(vocabulary)} in all")

    def _check_times(self) -> None:
        for name, seconds in self._seconds.items():
            if seconds:
                p50, p90, p99, most = np.percentile(seconds, [50, 90, 99, 100]) * 1000
                detail = f"p50 {p50:.1f} ms, p90 {p90:.1f}, p99 {p99:.1f}, max {most:.1f} (way to the worker included)"
                self.find(f"{name} time", "ok", detail)

    async def _actions(self, prompt: Prompt, vocabulary: Sequence[str]) -> Sequence[str]:
        """The expert's, else drawn words."""
        if self.environments.has_expert:
            return await self.environments.expert(prompt)
        return self._words(prompt, vocabulary)

    def _words(self, prompt: Prompt, vocabulary: Sequence[str]) -> list[str]:
        draw = random.Random(stream_seed(self.seed, "env check", prompt.id))
        return draw.choices(vocabulary or PLAIN_WORDS, k=self.max_turns)

    async def _episode(self, prompt: Prompt, actions: Sequence[str], *, pauses: bool = False) -> _Episode:
        self._opened += 1
        handle = await self.environments.open(TaskKey("eval", self._opened, 0), prompt)
        try:
            first = await self._timed("reset", handle.reset())
            episode = _Episode([first.as_text()])
            self._note(episode.texts[0], self._first_words)
            for action in actions[: self.max_turns]:
                if pauses:
                    await handle.pause()
                    await handle.resume()
                step = await self._timed("step", handle.step(Action(action)))
                assert not isinstance(step.observation, str)  # the port's promise
                episode.texts.append(step.observation.as_text())
                episode.rewards.append(step.reward)
                self._note(episode.texts[-1], self._later_words)
                if step.terminated or step.truncated:
                    episode.over = True
                    episode.success = bool(step.info.get("success", sum(episode.rewards) > 0))
                    break
            return episode
        finally:
            await handle.close()

    def _note(self, text: str, lengths: list[int]) -> None:
        words = text.lower().split()
        lengths.append(len(words))
        self._seen.update(words)

    async def _timed(self, name: str, call: Awaitable[T]) -> T:
        began_s = time.perf_counter()
        answer = await call
        self._seconds[name].append(time.perf_counter() - began_s)
        return answer


def _start_of(prompt: Prompt) -> tuple[int, str]:
    return prompt.seed, repr(sorted(prompt.payload.items()))
