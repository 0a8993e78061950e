"""The one list of events. Every metric, trace, report and live figure derives from these.

`t_s` is the run's clock (seconds since the loop started). No event holds a run name, path, host, process id,
real time or CPU time, so that the same simulation gives the same bytes (I10).
"""

from __future__ import annotations

import msgspec

EVENTS_VERSION = 2


class Event(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True):
    """Base: every event carries its moment."""

    t_s: float


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    strategy: str
    seed: int
    ranks: int
    replicas: int
    updates: int
    global_batch_groups: int
    group_size: int
    max_staleness: int
    staleness_counts: str
    engine_ranks: tuple[tuple[int, ...], ...] = ()  # by replica
    actor_ranks: tuple[int, ...] = ()  # that train together; the first one's states are those of all
    resumed_from_update: int = 0
    kv_policy: str = ""  # lru | ctb
    priority: str = ""  # the rule of `ctb`
    priority_weights: dict[str, float] = {}  # all of them, where the rule weighs


class PromptIssued(Event, frozen=True, kw_only=True, tag="prompt_issued"):
    prompt_id: int
    task_id: str
    start_version: int
    replica: int
    environment: str = ""  # of a mixture


class TaskAdmitted(Event, frozen=True, kw_only=True, tag="task_admitted"):
    """One start of a trajectory on a replica. `split` tells training from evaluation and warm-up."""

    split: str
    trajectory_id: int  # -1 outside training
    prompt_id: int
    member: int
    attempt: int
    replica: int


class TurnFinished(Event, frozen=True, kw_only=True, tag="turn_finished"):
    split: str
    prompt_id: int
    member: int
    attempt: int
    turn: int
    replica: int
    context_tokens: int
    new_tokens: int
    cached_tokens: int
    version: int  # of the last token
    first_version: int = -1  # of the first one
    finish_reason: str
    queued_s: float
    prefill_s: float
    decode_s: float
    recompute_s: float = 0.0  # of decode_s, on context that was void
    ended_s: float = -1.0  # the last token, on the replica's own clock; -1: it has none


class EnvStepFinished(Event, frozen=True, kw_only=True, tag="env_step_finished"):
    split: str
    prompt_id: int
    member: int
    attempt: int
    turn: int
    seconds: float
    reward: float


class TaskPaused(Event, frozen=True, kw_only=True, tag="task_paused"):
    split: str
    prompt_id: int
    member: int
    replica: int
    reason: str


class TaskResumed(Event, frozen=True, kw_only=True, tag="task_resumed"):
    split: str
    prompt_id: int
    member: int
    replica: int


class TaskMigrated(Event, frozen=True, kw_only=True, tag="task_migrated"):
    split: str
    prompt_id: int
    member: int
    from_replica: int
    to_replica: int
    reason: str


class KvRetention(Event, frozen=True, kw_only=True, tag="kv_retention"):
    """A wait that is over, of a task whose KV had a price while it waited: what was decided, on what grounds, and what
    it cost beside what a clairvoyant would have paid, in seconds of the engine's work."""

    split: str
    prompt_id: int
    member: int
    replica: int
    choice: str  # keep | offload | drop
    tokens: int
    waited_s: float
    held_s: float  # of these, with its KV in the pool
    hold_s: float | None  # R / (λ·c): for how long it is worth it; None, or infinite: as long as it takes
    token_second: float  # λ: engine seconds for each token held for a second
    back_token_s: float  # engine seconds to bring one token back
    cost_s: float
    clairvoyant_s: float


class TaskFinished(Event, frozen=True, kw_only=True, tag="task_finished"):
    split: str
    trajectory_id: int
    prompt_id: int
    member: int
    attempt: int
    ending: str
    reward: float
    success: bool
    turns: int
    tokens: int
    loss_tokens: int
    oldest_version: int


class GroupReady(Event, frozen=True, kw_only=True, tag="group_ready"):
    prompt_id: int
    start_version: int
    deadline: int
    mean_reward: float
    loss_tokens: int


class MicrobatchFormed(Event, frozen=True, kw_only=True, tag="microbatch_formed"):
    update: int
    index: int
    sequences: int
    tokens: int


class StepStarted(Event, frozen=True, kw_only=True, tag="step_started"):
    """An update begins with its first micro-batch, over the groups `prompt_ids`; others may follow while it runs.
    `waited_s`: the trainer's wait for them."""

    update: int
    prompt_ids: tuple[int, ...]
    waited_s: float
    ready_groups: int
    oldest_ready_s: float  # HoL
    ready_at_start_microbatches: int = 0  # RAS


class ReferenceDone(Event, frozen=True, kw_only=True, tag="reference_done"):
    update: int
    index: int
    seconds: float


class ForwardDone(Event, frozen=True, kw_only=True, tag="forward_done"):
    update: int
    index: int
    seconds: float


class BackwardDone(Event, frozen=True, kw_only=True, tag="backward_done"):
    update: int
    index: int
    seconds: float


class UpdateCommitted(Event, frozen=True, kw_only=True, tag="update_committed"):
    """An update's ids are in the journal. Staleness in updates; the mean is weighted by loss-bearing tokens.
    `waited_s`: the trainer's wait for data, before its first micro-batch and between them (TWT of this update);
    `seconds`: from its first micro-batch to the commit, without such waits."""

    update: int
    prompt_ids: tuple[int, ...] = ()  # in the order of consumption
    waited_s: float = 0.0
    groups: int
    trajectories: int
    loss_tokens: int
    tokens: int
    reward_mean: float
    success_fraction: float
    staleness_max: int
    staleness_mean_tokens: float
    window_staleness_max: int
    seconds: float
    metrics: dict[str, float]


class VersionPublished(Event, frozen=True, kw_only=True, tag="version_published"):
    version: int
    nbytes: int


class VersionLoaded(Event, frozen=True, kw_only=True, tag="version_loaded"):
    version: int
    replica: int
    seconds: float


class RankState(Event, frozen=True, kw_only=True, tag="rank_state"):
    """A rank's role and what it does from this moment on; the source of the account (I5, I11)."""

    rank: int
    role: str  # rollout | reference | actor
    activity: str
    """rollout: generating, evaluating, loading, idle_no_work, idle_staleness, stopped. actor: waiting_data, reference,
    training, publishing, checkpointing, restoring. A rank with both roles does the actor's unless that is waiting."""


class RoleChanged(Event, frozen=True, kw_only=True, tag="role_changed"):
    rank: int
    from_role: str
    to_role: str


class RankLostEvent(Event, frozen=True, kw_only=True, tag="rank_lost"):
    rank: int
    reason: str
    tasks: int


class RankBack(Event, frozen=True, kw_only=True, tag="rank_back"):
    rank: int


class Dropped(Event, frozen=True, kw_only=True, tag="dropped"):
    trajectory_id: int
    prompt_id: int
    member: int
    reason: str
    tokens: int


class Fault(Event, frozen=True, kw_only=True, tag="fault"):
    """Something failed and was handled. `what` holds the type's name only: texts may carry paths."""

    where: str
    what: str
    prompt_id: int = -1
    member: int = -1


class Decision(Event, frozen=True, kw_only=True, tag="decision"):
    """A decision of `schedule`: its inputs and outcome, as plain numbers and names."""

    which: str
    inputs: dict[str, float | int | str]
    outcome: str


class EvalShare(msgspec.Struct, frozen=True):
    """One environment's part of an evaluation; the fields mean what they mean there."""

    prompts: int
    successes: int
    failed: int
    reward_mean: float


class EvalFinished(Event, frozen=True, kw_only=True, tag="eval_finished"):
    version: int
    prompts: int
    successes: int
    failed: int  # of an environment or infrastructure fault; not counted in `prompts`
    reward_mean: float
    turns_mean: float
    seconds: float
    by_environment: dict[str, EvalShare] = {}  # of a mixture


class RunEnded(Event, frozen=True, kw_only=True, tag="run_ended"):
    outcome: str  # done | stopped | failed
    updates: int


AnyEvent = (
    RunStarted
    | PromptIssued
    | TaskAdmitted
    | TurnFinished
    | EnvStepFinished
    | TaskPaused
    | TaskResumed
    | TaskMigrated
    | KvRetention
    | TaskFinished
    | GroupReady
    | MicrobatchFormed
    | StepStarted
    | ReferenceDone
    | ForwardDone
    | BackwardDone
    | UpdateCommitted
    | VersionPublished
    | VersionLoaded
    | RankState
    | RoleChanged
    | RankLostEvent
    | RankBack
    | Dropped
    | Fault
    | Decision
    | EvalFinished
    | RunEnded
)

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(AnyEvent)


def encode_event(event: Event) -> bytes:
    """One JSON line without its newline; equal events give equal bytes."""
    return _encoder.encode(event)


def decode_event(line: bytes) -> AnyEvent:
    """The inverse of `encode_event`. Raises `msgspec.ValidationError` for an unknown or damaged line."""
    return _decoder.decode(line)
