"""The ports: everything that the runtime knows of the outside world, as Protocols.

Real, inline and simulated implementations pass one conformance suite each (tests/conformance), which is what makes
the simulation honest. Async methods may wait; each has an owner and a deadline at its implementation. Plain methods
never wait. Errors are those of `tiderl.data.errors`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tiderl.data.events import Event
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
from tiderl.data.turns import EngineCapabilities, EngineStats, PauseMode, Turn, TurnFailure, TurnResult


class EngineCore(Protocol):
    """Inside a rank host: synchronous, one thread. `step` does one iteration and never waits."""

    capabilities: EngineCapabilities

    def add(self, turn: Turn) -> None:
        """Queue a turn. Raises `RequestTooLarge` for one that can never fit, `BudgetError` for a second turn of a
        task."""

    def abort(self, task: TaskKey, turn: int) -> TurnResult | None:
        """End a turn now; its tokens so far come back, `finish_reason="aborted"`. None if it is not here (any more)."""

    def step(self) -> list[TurnResult | TurnFailure]:
        """One iteration, never waits: what ended in it. A failure (NaN logits: "numerical") ends only its own turn."""

    def has_work(self) -> bool:
        """True while `step` can make progress: False when idle, paused, or blocked on KV."""

    def retain(self, task: TaskKey) -> None: ...
    def release(self, task: TaskKey) -> None: ...
    def offload(self, task: TaskKey) -> None: ...
    def pause(self, mode: PauseMode) -> list[TurnResult]:
        """Stop stepping. `abort` returns every turn's tokens so far, `keep` holds them for `resume`. Twice is as
        once."""

    def resume(self) -> None: ...
    def load_weights(self, handle: WeightHandle) -> None:
        """Replace the weights and commit the version. KV of other versions is never used again (I6): turns in flight
        go on
        by recomputing their context under the new weights."""

    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class TrainerCore(Protocol):
    """Inside a rank host: the reference, the actor and the update of one rank; synchronous, one thread."""

    def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]:
        """Supervised steps on expert demonstrations (cross-entropy on loss-bearing tokens). Afterwards the reference
        is the warmed-up model. `updates=0` only fixes the reference."""

    def reference_logprobs(self, mb: MicroBatch) -> np.ndarray:
        """float32 [mb.tokens], in sequence order; 0 where the loss mask is False."""

    def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None:
        """Actor forward, kept for `backward` by (`update`, `part`, `index`). `proximal`: no gradient, the log-probs are
        kept as the proximal policy for all later parts of this update."""

    def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None:
        """Loss and un-normalised gradient accumulation (I7) for a micro-batch that was forwarded."""

    def begin(self, update: int, members: Sequence[int]) -> None: ...
    def finish(self) -> UpdateStats:
        """One division by the number of accumulated loss units, clip, optimizer step. Raises `NumericalFault`."""

    def export(self, version: int) -> WeightHandle: ...
    def discard(self, handle: WeightHandle) -> None:
        """Delete an exported version that nobody will read again."""

    def save(self, directory: str) -> None: ...
    def restore(self, directory: str) -> None: ...
    def save_model(self, directory: str) -> None:
        """A Hugging Face folder: weights, config, tokenizer, generation config."""

    def close(self) -> None: ...


class Engine(Protocol):
    """One replica, as the runtime sees it."""

    replica: int
    capabilities: EngineCapabilities

    @property
    def stats(self) -> EngineStats:
        """The last reported stats; at most 100 ms old while the engine works."""

    async def generate(self, turn: Turn) -> TurnResult:
        """Raises `RequestTooLarge`, `BudgetError`, `NumericalFault`, `RankLost`, `ChannelTimeout`. When the awaiting
        task
        is cancelled, the turn is aborted."""

    async def abort(self, task: TaskKey, turn: int) -> None:
        """The pending `generate` returns with what was sampled; nothing happens if the turn is not pending."""

    def retain(self, task: TaskKey) -> None: ...
    def release(self, task: TaskKey) -> None: ...
    def offload(self, task: TaskKey) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def load_weights(self, handle: WeightHandle) -> None:
        """Returns after the commit: every token sampled later carries `handle.version`."""


class Reference(Protocol):
    rank: int

    async def logprobs(self, mb: MicroBatch) -> np.ndarray: ...


class Actor(Protocol):
    rank: int

    async def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None: ...
    async def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None: ...


class Update(Protocol):
    """Once for all actor ranks; the only place of collectives."""

    async def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]: ...
    async def begin(self, update: int, members: Sequence[int]) -> None: ...
    async def finish(self) -> UpdateStats: ...
    async def export(self, version: int) -> WeightHandle: ...
    async def discard(self, handle: WeightHandle) -> None: ...
    async def save(self, directory: str) -> None: ...
    async def restore(self, directory: str) -> None: ...
    async def save_model(self, directory: str) -> None: ...


@dataclass(frozen=True)
class RankChange:
    """A rank was lost or is back (restarted, empty: no weights, no KV)."""

    rank: int
    lost: bool
    reason: str = ""


class Cluster(Protocol):
    """Rank hosts. `start` returns when all are up. A lost host is restarted by the cluster itself and reported
    twice."""

    @property
    def ranks(self) -> int: ...
    @property
    def engines(self) -> Mapping[int, Engine]:
        """By replica; the objects stay the same over a restart."""

    @property
    def engine_ranks(self) -> Mapping[int, tuple[int, ...]]:
        """Replica to its ranks."""

    @property
    def references(self) -> Sequence[Reference]: ...
    @property
    def actors(self) -> Sequence[Actor]:
        """One a rank; micro-batches go to the first, which divides the work among all of them."""

    @property
    def update(self) -> Update: ...

    async def start(self) -> None: ...
    async def next_change(self) -> RankChange:
        """Wait for the next loss or return of a rank."""

    async def close(self) -> None: ...


class EnvironmentHandle(Protocol):
    """One environment object of one task, holding one slot until closed. Faults: `EnvironmentFault` and its kinds,
    `InfrastructureFault` when its worker died of something else."""

    async def reset(self) -> Observation: ...
    async def step(self, action: Action) -> Step:
        """The `observation` is always an `Observation`, the reward finite."""

    async def score(self, trajectory: Trajectory) -> float | None:
        """The environment's verifier, None where it has none. Raises `VerifierFault`."""

    async def pause(self) -> None:
        """The next step will be long in coming: the environment's own deadlines should not run. Between two other calls
        only; does nothing where the environment declares no `pause`. As `step`, it has `env.deadline_s`, and a method
        that raises or hangs is an `EnvironmentFault`."""

    async def resume(self) -> None:
        """The next step comes now. Once after each `pause` that returned, unless `close` comes first; otherwise as
        `pause`, where the environment declares `resume`."""

    async def close(self) -> None:
        """Idempotent; never raises; gives the slot back."""


class Environments(Protocol):
    """The task sets and their workers."""

    slots: int
    has_expert: bool

    async def start(self) -> None: ...
    async def prompts(self, split: Split) -> Sequence[Prompt]: ...
    async def vocabulary(self) -> tuple[str, ...]: ...
    async def expert(self, prompt: Prompt) -> Sequence[str]: ...
    async def open(self, key: TaskKey, prompt: Prompt) -> EnvironmentHandle:
        """Waits for a free slot. Nothing of the user's code runs before `reset`."""

    async def close(self) -> None: ...


class Renderer(Protocol):
    """Text and tool calls to token ids and back. Only what is new is rendered, never history (I8)."""

    stop_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int

    def begin(self, observation: Observation, tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """int32 [n]: the context before the first turn, up to where the policy speaks."""

    def extend(self, observation: Observation, said: np.ndarray | None = None) -> np.ndarray:
        """int32 [n]: what follows the policy's last token, up to where it speaks again. `said`: the ids of its last
        turn, int32 [m]; None stands for a turn that ended with its stop token and called no tool."""

    def images(self, observation: Observation) -> tuple[Span, ...]:
        """Where in the ids that `begin` or `extend` makes of the observation its images lie, in order."""

    def action_ids(self, text: str) -> np.ndarray:
        """int32 [n]: what a policy would sample to say `text`, stop token included (for demonstrations)."""

    def parse(self, ids: np.ndarray) -> Action: ...


@dataclass(frozen=True)
class PromptRow:
    prompt_id: int
    task_id: str
    seed: int
    start_version: int


@dataclass(frozen=True)
class TrajectoryRow:
    """The newest state of one trajectory; a later row of the same id replaces the earlier."""

    id: int
    prompt_id: int
    member: int
    attempt: int
    status: str  # running | ready | trained | dropped
    reason: str | None = None
    update_no: int | None = None
    sha256: str | None = None
    ready_update: int | None = None  # updates done when it became ready


@dataclass(frozen=True)
class VersionRow:
    version: int
    update_no: int


@dataclass(frozen=True)
class CheckpointRow:
    checkpoint: str
    update_no: int


LedgerRow = PromptRow | TrajectoryRow | VersionRow


@dataclass(frozen=True)
class Replay:
    """The whole journal, in order of id or number."""

    prompts: tuple[PromptRow, ...]
    trajectories: tuple[TrajectoryRow, ...]
    updates: tuple[tuple[int, tuple[int, ...]], ...]  # (update_no, ordered trajectory ids)
    versions: tuple[VersionRow, ...]
    checkpoints: tuple[CheckpointRow, ...]


class Ledger(Protocol):
    """The journal. Rows become visible in the order of the calls; `commit` and `durable` are atomic."""

    def append(self, rows: Sequence[LedgerRow]) -> None:
        """Queue rows; never waits. One call is atomic. They are on disk before any later `commit` returns. A version or
        prompt that is there already stays as it is."""

    async def commit(self, update: int, trajectory_ids: Sequence[int]) -> None:
        """One transaction: the update's row, and its trajectories become `trained`. Raises `InvariantViolation` for
        an id
        that is not `ready` or an update that exists, `CheckpointError` when the disk refuses."""

    async def durable(self, checkpoint: CheckpointRow) -> None: ...
    async def replay(self) -> Replay: ...
    async def close(self) -> None: ...


class Blobs(Protocol):
    """Payloads by content hash."""

    async def put(self, trajectory: Trajectory) -> str:
        """Stores the payload and returns its SHA-256 (hex)."""

    async def get(self, sha256: str) -> Trajectory:
        """Raises `CheckpointError` when missing or damaged."""

    async def delete(self, sha256s: Sequence[str]) -> None: ...
    async def keep_only(self, sha256s: Collection[str]) -> None:
        """Deletes every other payload, and what a killed process left half-written."""


class Checkpoints(Protocol):
    """Named folders of trainer state. A name is relative: the run directory may move."""

    def path(self, name: str) -> str:
        """Where the trainer's rank saves and restores it."""

    def whole(self, name: str) -> bool:
        """True when it was written to its end."""

    async def delete(self, names: Sequence[str]) -> None: ...
    async def keep_only(self, names: Collection[str]) -> None:
        """Deletes every other checkpoint, and what a killed process left half-written."""


class Models(Protocol):
    """Evaluated versions as model folders, until one is judged the best so far."""

    def path(self, version: int) -> str:
        """Where the trainer's rank saves this version."""

    def judge(self, version: int, successes: int, prompts: int) -> None:
        """Its evaluation is done: it becomes the best, or goes. Raises `CheckpointError`."""


class Recorder(Protocol):
    """Takes events; never waits."""

    def emit(self, event: Event) -> None: ...


@dataclass
class Ports:
    """All ports of one run, built by `api`."""

    cluster: Cluster
    environments: Environments
    renderer: Renderer
    ledger: Ledger
    blobs: Blobs
    checkpoints: Checkpoints
    recorder: Recorder
    models: Models | None = None
    """None: the best version is not kept (virtual time, and evaluation alone)."""
