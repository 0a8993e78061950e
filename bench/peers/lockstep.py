"""A batch of rollouts in lockstep, turn by turn: what a rollout function of a synchronous trainer does.

Each turn every open rollout gets its tokens in one call, then all their environments step at the same time, and the
turn ends with the slowest. Finished rollouts leave the batch. Knows no trainer: generation and sleep are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import workload

from tiderl.data.records import Observation, Prompt
from tiderl.envs.builtin import Fetch
from tiderl.text.words import WordsRenderer

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Contexts to what was sampled for each, at most `MAX_NEW_TOKENS_PER_TURN` tokens, the stop token included."""


@dataclass
class Rollout:
    """One member's token record. `mask` is 1 where the policy sampled the token, over what follows `prompt_ids`."""

    prompt_id: int
    member: int
    environment: Fetch
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    steps: int = 0  # turns that reached the environment: waits are counted by them

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def append(self, ids: Sequence[int], sampled: int) -> None:
        self.completion_ids += ids
        self.mask += [sampled] * len(ids)


def renderer() -> WordsRenderer:
    return WordsRenderer.from_vocabulary(Fetch.vocabulary())


def play(
    members: Sequence[tuple[int, int, Prompt]],
    *,
    wait: str,
    words: WordsRenderer,
    generate: Generate,
    sleep: Callable[[float], None],
) -> list[Rollout]:
    """Plays (prompt number, member, prompt) each to its end, in their order."""
    rollouts = [_begin(*member, words) for member in members]
    active = rollouts
    while active:
        said = generate([rollout.context for rollout in active])
        # All environments step at once: the longest wait is the turn's. No thread is needed for that.
        sleep(max(_wait_s(wait, rollout, ids, words) for rollout, ids in zip(active, said, strict=True)))
        active = [rollout for rollout, ids in zip(active, said, strict=True) if _step(rollout, ids, words)]
    return rollouts


def _begin(prompt_id: int, member: int, prompt: Prompt, words: WordsRenderer) -> Rollout:
    environment = Fetch()
    first = Observation.text(environment.reset(prompt))
    return Rollout(prompt_id, member, environment, words.begin(first).tolist())


def _wait_s(wait: str, rollout: Rollout, ids: list[int], words: WordsRenderer) -> float:
    """What cannot be parsed never reaches the environment, so nothing is waited for."""
    if words.parse(np.array(ids, np.int32)).malformed:
        return 0.0
    return workload.waited_s(wait, rollout.prompt_id, rollout.member, rollout.steps)


def _step(rollout: Rollout, ids: list[int], words: WordsRenderer) -> bool:
    """Records the turn; False where the rollout is over."""
    rollout.append(ids, sampled=1)
    rollout.turns += 1
    action = words.parse(np.array(ids, np.int32))
    if action.malformed:
        answer = f"error: {action.malformed}"
    else:
        step = rollout.environment.step(action)
        rollout.steps += 1
        rollout.reward += step.reward
        if step.terminated or step.truncated:
            return False
        answer = str(step.observation)
    new = words.extend(Observation.text(answer)).tolist()
    if len(rollout.context) + len(new) >= workload.MAX_CONTEXT_TOKENS or rollout.turns >= workload.MAX_TURNS:
        return False
    rollout.append(new, sampled=0)
    return True


def until_stop(ids: list[int], stop_ids: list[int]) -> list[int]:
    """Up to the first stop token, which is kept."""
    ends = [place for place, token in enumerate(ids) if token in stop_ids]
    return ids[: ends[0] + 1] if ends else ids
