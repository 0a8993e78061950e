"""What flows through a run: prompts, observations, actions, trajectories, sequences, micro-batches.

Token ids are the truth (I8): text appears only at the two edges, in observations and actions.
Records are immutable; arrays say their shape and dtype here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from tiderl.data.forks import Fork, branches

Split = Literal["train", "eval"]


class Prompt(msgspec.Struct, frozen=True):
    """One item of a task set: what an environment is reset with.

    `id` is the task set's own name for it (unique within a split), `seed` and `payload` belong to the environment.
    `environment` names the one of a mixture that it is from; empty otherwise, and never set by an environment.
    """

    id: str
    seed: int = 0
    payload: Mapping[str, Any] = {}
    environment: str = ""


class ImageHandle(msgspec.Struct, frozen=True, tag="image"):
    """A reference to an image by content hash. Reserved: refused until image observations are supported."""

    sha256: str
    width: int
    height: int


class TokenCount(msgspec.Struct, frozen=True, tag="token_count"):
    """A part that is only a length, in tokens: what simulated environments answer. `image`: it stands for one image."""

    tokens: int
    image: bool = False


Part = str | ImageHandle | TokenCount


class Observation(msgspec.Struct, frozen=True):
    """What the environment shows the policy. An environment may return a plain `str` instead."""

    parts: tuple[Part, ...]

    @classmethod
    def text(cls, text: str) -> Observation:
        return cls((text,))

    def as_text(self) -> str:
        """The text parts, one after the other; images and counts as a short mark."""
        return " ".join(part if isinstance(part, str) else f"<{type(part).__name__}>" for part in self.parts)


class Step(msgspec.Struct, frozen=True):
    """An environment's answer to one action.

    `terminated`: the task is over by its own rules. `truncated`: it was cut short. `info["success"]` (bool), where
    given,
    is what evaluation counts; without it, a total reward above 0 counts as success.
    """

    observation: Observation | str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}


class ToolCall(msgspec.Struct, frozen=True):
    """A parsed call of one of the environment's tools."""

    name: str
    arguments: Mapping[str, Any] = {}


class Action(msgspec.Struct, frozen=True):
    """What the policy said in one turn. `malformed` says why it could not be parsed, else it is empty."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


class TaskKey(msgspec.Struct, frozen=True, order=True):
    """Who a task is. `split` and `prompt_id` name its group; `attempt` counts every start of the member.

    `prompt_id` is the running number of issue (training) or the index into the evaluation set.
    """

    split: Literal["train", "eval", "warmup"]
    prompt_id: int
    member: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.split}/{self.prompt_id}.{self.member}#{self.attempt}"


class TurnSpan(msgspec.Struct, frozen=True):
    """Where one turn's sampled tokens lie in the trajectory: ids[start:end], and what came of them."""

    start: int
    end: int
    reward: float
    action: str
    finish_reason: str


Ending = Literal["terminated", "truncated", "budget_turns", "budget_tokens"]


class Trajectory(msgspec.Struct, frozen=True):
    """The finished token record of one task.

    T = all tokens, in order. Where `loss_mask` is False, `logprobs` is 0 and `versions` is -1. `forks`: where tokens
    left the context (I8); the trainer then sees several sequences of it.
    """

    id: int
    key: TaskKey
    ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], True exactly where the engine sampled the token
    logprobs: np.ndarray  # float32 [T], of the sampled distribution (temperature applied)
    versions: np.ndarray  # int32 [T], the published version that made the token
    turns: tuple[TurnSpan, ...]
    reward: float
    success: bool
    ending: Ending
    text: tuple[str, ...] = ()  # observation texts, one per turn, kept for transcripts
    forks: tuple[Fork, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        """Of its sequences together: `tokens`, and after forks what several of them begin with once for each."""
        return sum(branch.tokens for branch in branches(self.forks, len(self.ids)))

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int:
        """The oldest version of any loss-bearing token: what `oldest_token` staleness counts from."""
        return int(self.versions[self.loss_mask].min())


class Sequence(msgspec.Struct, frozen=True):
    """What the trainer sees of a trajectory: the whole, or a branch where history was rewritten. A sampled token bears
    loss in one of them. Carries its group's rewards, so any micro-batch is self-contained (I7, I9)."""

    trajectory_id: int
    prompt_id: int
    member: int
    ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T], behaviour log-probs
    versions: np.ndarray  # int32 [T]
    reward: float
    group_rewards: np.ndarray  # float64 [G], of the whole group, this member's included, by member

    @property
    def tokens(self) -> int:
        return len(self.ids)


class MicroBatch(msgspec.Struct, frozen=True):
    """Sequences packed up to a token budget: the unit that the trainer computes.

    `part` is the optimizer step within the update (0 … steps_per_batch - 1), `index` counts within the update.
    """

    update: int
    part: int
    index: int
    sequences: tuple[Sequence, ...]

    @property
    def tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)


class UpdateStats(msgspec.Struct, frozen=True):
    """What one optimizer step reports: named scalars, each defined in the trainer's documentation."""

    metrics: dict[str, float]
    seconds: float


class WeightHandle(msgspec.Struct, frozen=True):
    """Where one published version's weights are: a file that ranks on the machine can read."""

    version: int
    path: str
    nbytes: int
