"""What `bench/ctb.py` runs: agents that wait, a trainer that consumes nothing, and a clock that a busy machine does not
move.

The environment's observations, the number of turns and every wait are functions of (prompt, member, turn), and no turn
stops early: whatever the KV policy, the same tokens are asked for. The constants were fixed before anything was
measured.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiderl.data.forks import Span
from tiderl.data.records import (
    Action,
    MicroBatch,
    Observation,
    Prompt,
    Split,
    Step,
    TaskKey,
    Trajectory,
    UpdateStats,
    WeightHandle,
)
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.rng import stream
from tiderl.data.settings import (
    EngineSettings,
    EvalSettings,
    RunSettings,
    TrainerSettings,
    WaitProfile,
    WarmupSettings,
)
from tiderl.engines.torch_engine import TorchEngine
from tiderl.envs.waits import wait_s
from tiderl.store.blobs import MemoryBlobs

GROUP_SIZE = 8
PROMPT_TOKENS, OBSERVATION_TOKENS, ACTION_TOKENS = 128, 32, 16
TURNS = (6, 10)  # of a task, uniform
SIGMA = 1.2
TAIL_FRACTION, TAIL_MEDIANS = 0.03, (15.0, 40.0)
MAX_CONTEXT_TOKENS = PROMPT_TOKENS + TURNS[1] * (ACTION_TOKENS + OBSERVATION_TOKENS)


@dataclass(frozen=True)
class Workload:
    """`groups` prompts of `GROUP_SIZE` tasks, all offered at once."""

    groups: int
    vocab_size: int
    median_s: float
    seed: int = 0
    turns: tuple[int, int] = TURNS

    def turns_of(self, prompt_id: int, member: int) -> int:
        least, most = self.turns
        return int(stream(self.seed, "bench.turns", prompt_id, member).integers(least, most + 1))

    @property
    def waits(self) -> WaitProfile:
        tail_s = (TAIL_MEDIANS[0] * self.median_s, TAIL_MEDIANS[1] * self.median_s)
        return WaitProfile(self.median_s, SIGMA, TAIL_FRACTION, tail_s)

    @property
    def tasks(self) -> list[int]:
        """Turns of each task."""
        return [self.turns_of(group, member) for group in range(self.groups) for member in range(GROUP_SIZE)]

    @property
    def need_tokens(self) -> int:
        """KV of all tasks at their ends: the last token said is never computed."""
        step = ACTION_TOKENS + OBSERVATION_TOKENS
        return sum(PROMPT_TOKENS + turns * step - OBSERVATION_TOKENS - 1 for turns in self.tasks)

    @property
    def generated_tokens(self) -> int:
        return sum(self.tasks) * ACTION_TOKENS

    @property
    def least_prefilled_tokens(self) -> int:
        """What a pool without end computes of contexts: a group's prompt once and its last token for every other
        member, then what is new, with the last token said before it."""
        prompts = self.groups * (PROMPT_TOKENS + GROUP_SIZE - 1)
        return prompts + sum((turns - 1) * (OBSERVATION_TOKENS + 1) for turns in self.tasks)

    @property
    def context_tokens(self) -> int:
        """Of all turns together."""
        step = ACTION_TOKENS + OBSERVATION_TOKENS
        return sum(turns * PROMPT_TOKENS + step * (turns * (turns - 1) // 2) for turns in self.tasks)


class Agents:
    """The `Environments` of a workload. An observation is a text of token ids."""

    has_expert = False

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.slots = workload.groups * GROUP_SIZE

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(f"{split}-{number}", seed=number) for number in range(self.workload.groups)]

    async def vocabulary(self) -> tuple[str, ...]:
        return ()

    async def expert(self, prompt: Prompt) -> Sequence[str]:
        return ()

    async def open(self, key: TaskKey, prompt: Prompt) -> Agent:
        return Agent(self.workload, key)


class Agent:
    """One task's environment. Its reset does not wait."""

    def __init__(self, workload: Workload, key: TaskKey) -> None:
        self._workload, self._key = workload, key
        self._turns = workload.turns_of(key.prompt_id, key.member)
        self._done = 0

    async def reset(self) -> Observation:
        return self._words(PROMPT_TOKENS, self._key.prompt_id)

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(wait_s(self._workload.waits, self._workload.seed, self._key, self._done))
        self._done += 1
        words = self._words(OBSERVATION_TOKENS, self._key.prompt_id, self._key.member, self._done)
        return Step(words, reward=float(self._key.member % 2), terminated=self._done == self._turns)

    def _words(self, tokens: int, *name: int) -> Observation:
        ids = stream(self._workload.seed, "bench.words", *name).integers(2, self._workload.vocab_size, tokens)
        return Observation.text(" ".join(map(str, ids)))

    async def score(self, trajectory: Trajectory) -> float | None:
        return None

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...


class IdsRenderer:
    """Texts of token ids; nothing stops a turn."""

    stop_ids: tuple[int, ...] = ()
    pad_id = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def begin(self, observation: Observation, tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        return np.array(observation.as_text().split(), np.int32)

    def extend(self, observation: Observation, said: np.ndarray | None = None) -> np.ndarray:
        return self.begin(observation)

    def images(self, observation: Observation) -> tuple[Span, ...]:
        return ()

    def action_ids(self, text: str) -> np.ndarray:
        return np.array(text.split(), np.int32)

    def parse(self, ids: np.ndarray) -> Action:
        return Action("said")


class KeptBlobs(MemoryBlobs):
    """Remembers what every task said and saw."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[tuple[int, int], tuple[int, ...]] = {}  # by (prompt, member)

    async def put(self, trajectory: Trajectory) -> str:
        self.ids[trajectory.key.prompt_id, trajectory.key.member] = tuple(trajectory.ids.tolist())
        return await super().put(trajectory)


class IdleTrainer:
    """A `TrainerCore` that takes no time. Every version is the one weight file that it was built with."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._weights = settings.weights_dir

    def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]:
        return {}

    def reference_logprobs(self, mb: MicroBatch) -> np.ndarray:
        return np.zeros(mb.tokens, np.float32)

    def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None: ...
    def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None: ...
    def begin(self, update: int, members: Sequence[int]) -> None: ...
    def finish(self) -> UpdateStats:
        return UpdateStats({"loss": 0.0}, 0.0)

    def export(self, version: int) -> WeightHandle:
        return WeightHandle(version, self._weights, 0)

    def discard(self, handle: WeightHandle) -> None: ...
    def save(self, directory: str) -> None: ...
    def restore(self, directory: str) -> None: ...
    def save_model(self, directory: str) -> None: ...
    def close(self) -> None: ...


def idle_trainer(settings: TrainerSettings) -> IdleTrainer:
    return IdleTrainer(settings)


def engine_by_cpu_time(settings: EngineSettings) -> TorchEngine:
    return TorchEngine(settings, clock=time.process_time)


class CpuLoop(asyncio.SelectorEventLoop):
    """A clock of this process's CPU seconds and of the waits, which are jumped over: what a quiet machine's clock shows
    where this thread does all computing."""

    def __init__(self) -> None:
        self._waits = _Jumping()
        super().__init__(self._waits)

    def time(self) -> float:
        return time.process_time() + self._waits.jumped_s


class _Jumping(selectors.SelectSelector):
    jumped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            self.jumped_s += timeout
            timeout = 0
        return super().select(timeout)


def run_settings(workload: Workload, kv_policy: str) -> RunSettings:
    """One update that takes all groups."""
    return RunSettings(
        seed=workload.seed,
        updates=1,
        global_batch_groups=workload.groups,
        group_size=GROUP_SIZE,
        steps_per_batch=1,
        micro_batch_tokens=1 << 20,
        max_staleness=0,
        staleness_counts="oldest_token",
        publish_every_updates=1,
        max_turns=TURNS[1],
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_new_tokens_per_turn=ACTION_TOKENS,
        temperature=1.0,
        slots=workload.groups * GROUP_SIZE,
        uses_reference=False,
        warmup=WarmupSettings(0, 0, 0.0),
        evaluation=EvalSettings(0, 0, 1.0),
        logprob_gap_alarm=1.0,
        kv_policy=kv_policy,  # type: ignore[arg-type]
    )
