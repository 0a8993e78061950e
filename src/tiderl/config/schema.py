"""The configuration's keys: names, types, ranges, defaults and units, exactly those of architecture §10.

Shape and range of one key only. What keys mean together is in `check.py`, what `auto` becomes in `resolve.py`, where a
value came from in `load.py`. Knows nothing of files, strategies or the machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, Tag
from pydantic_core import PydanticCustomError

from tiderl.schedule.priority import WEIGHTS

Auto = Literal["auto"]


def _auto_or_whole(minimum: int) -> PlainValidator:
    """One message for both alternatives, where a union would give two."""

    def validate(value: object) -> int | str:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= minimum):
            return value
        raise ValueError(f"must be a whole number of at least {minimum}, or auto")

    return PlainValidator(validate)


def _whole_or_none(value: object) -> int | None:
    """`none` is None inside."""
    if value is None or value == "none":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError("must be a whole number of at least 1, or none")


def not_yet(message: str) -> PydanticCustomError:
    """The refusal of a name that is reserved (architecture §12)."""
    return PydanticCustomError("not_yet_supported", "{message}", {"message": message})


class WrongInside(ValueError):
    """What is wrong inside a mapping, and what to do: the mapping itself as what was given would say nothing."""

    def __init__(self, what: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(what)


def _not_yet(supported: tuple[Any, ...], reserved: tuple[str, ...]) -> BeforeValidator:
    """Names that are taken but not built are refused as such, never as unknown."""

    def validate(value: object) -> object:
        if value in reserved:
            raise not_yet(f"{value!r} is not yet supported; use {' or '.join(map(str, supported))}")
        return value

    return BeforeValidator(validate)


def _only(supported: object, what: str) -> Callable[[object], object]:
    def validate(value: object) -> object:
        if value != supported:
            raise not_yet(f"{what} is not yet supported; leave the key out")
        return value

    return validate


AutoPositive = Annotated[int | Auto, _auto_or_whole(1)]
AutoCount = Annotated[int | Auto, _auto_or_whole(0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Sigma = Annotated[float, Field(ge=0.0, le=10.0)]
"""Of a lognormal: beyond e^10 between one deviation and the median nothing is meant, and draws overflow."""
Median = Annotated[float, Field(gt=0.0, le=1.0e9)]
"""Of turns or tokens: more than any context holds."""
Deviations = Annotated[float, Field(ge=0.0, le=100.0)]
"""From a mean: ten already leave out nothing, and far beyond a hundred sums overflow."""
Name = Annotated[str, Field(min_length=1)]
Tracker = Annotated[Literal["tensorboard"], _not_yet(("tensorboard",), ("wandb", "mlflow", "trackio"))]


class Section(BaseModel):
    """A mapping of known keys. Strict: "3" is not 3 and true is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The policy. The sizes count only for `path: scratch`; else they are those of the folder."""

    path: Name = "scratch"
    """`scratch`, a Hugging Face folder, or a hub id."""
    tokenizer: Literal["words", "chat"] = "words"
    """`words`: one token for each word of the environment's vocabulary; `chat`: that of `path`, with its template."""
    layers: Positive = 4
    hidden: Positive = 128
    heads: Positive = 4
    kv_heads: Positive = 2


class WarmupConfig(Section):
    """Supervised steps on the environment's expert before update 1."""

    demos: Count = 60
    """Demonstrations, one episode each; 0 = no warm-up."""
    updates: Count = 40
    lr: PositiveFloat = 1.0e-3


class WaitConfig(Section):
    """Extra seconds that every environment step really waits: lognormal with a heavy tail."""

    kind: Literal["lognormal"] = "lognormal"
    median_s: Seconds
    sigma: Sigma
    tail_fraction: Fraction = 0.0
    """Of the steps, whose wait is drawn evenly from `tail_s` instead."""
    tail_s: Annotated[tuple[NonNegative, NonNegative], Field(strict=False)] = (0.0, 0.0)


def _wait(value: object) -> object:
    """`none` is None inside; anything but a mapping is refused with an example."""
    if value is None or value == "none":
        return None
    if not isinstance(value, Mapping | WaitConfig):
        raise ValueError("must be none, or a mapping such as {kind: lognormal, median_s: 0.2, sigma: 1.2}")
    return value


class EnvConfig(Section):
    """Where the tasks come from."""

    name: Name = "builtin"
    """A registered name, `./mine.py:Mine`, or `package.module:Class`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's class."""
    isolation: Literal["async", "pool", "process"] = "pool"
    """In the driver; in `workers` processes with many environments each; or in one process each."""
    workers: Positive = 1
    slots: AutoPositive = "auto"
    """Environments open at a time."""
    deadline_s: Seconds = 30.0
    """For each reset, step and score."""
    wait: Annotated[WaitConfig | None, BeforeValidator(_wait)] = None
    """`none` in the file."""
    weight: PositiveFloat = 1.0
    """Of a mixture's prompts, against the other weights."""


ONE, MIX = "one", "mix"
OneOrMix = Annotated[
    Annotated[EnvConfig, Tag(ONE)] | Annotated[list[EnvConfig], Field(min_length=1), Tag(MIX)],
    Discriminator(lambda value: MIX if isinstance(value, list) else ONE),
]
"""One environment, or a list of them that is mixed by weight."""


def _nearest(name: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _priority_weights(value: object) -> object:
    if isinstance(value, Mapping):
        for name in value:
            if name not in WEIGHTS:
                raise WrongInside(f"holds {name!r}, which has no weight", _nearest(name, WEIGHTS))
    return value


class RolloutConfig(Section):
    """How trajectories are generated."""

    engine: Literal["torch", "vllm"] = "torch"
    """`torch`: the embedded engine. `vllm`: vLLM, in the process of its rank; needs an extra."""
    ranks_per_engine: Annotated[int, BeforeValidator(_only(1, "more than one rank for an engine"))] = 1
    kv_budget_tokens: AutoPositive = "auto"
    """KV positions that one replica may hold."""
    kv_policy: Literal["auto", "lru", "ctb"] = "auto"
    """`lru`: the engine keeps what was used last. `ctb`: continuous task batching, of whole tasks."""
    growth_z: Deviations = 1.0
    """For `ctb`: standard deviations of the tasks' growth for which admission leaves room."""
    patience_s: PositiveFloat = 30.0
    """For `ctb`: a task that waits longer for room goes before all others."""
    priority: Literal["tiers", "weighted", "deadlines"] = "tiers"
    """For `ctb`: evaluation, group completion, active, context in this order; their weighted sum; or who must start now
    to be in time, then the shortest remaining work while the trainer starves, the longest otherwise."""
    priority_weights: Annotated[dict[str, NonNegative], BeforeValidator(_priority_weights)] = {}
    """For `priority: weighted`: of `evaluation`, `group` (the finished part of it), `active` and `context` (of the
    longest allowed); those not given are 8, 4, 2 and 1."""
    max_turns: Positive = 16
    max_context_tokens: Positive = 512
    """Of one trajectory, observations included; of its largest context where images leave it."""
    max_new_tokens_per_turn: Positive = 4
    temperature: PositiveFloat = 1.0
    task_scheduler: Literal["auto", "sync", "async", "none"] = "auto"
    """For `engine: vllm` with `ctb`: the scheduler that keeps tasks' blocks, without or with vLLM's asynchronous
    scheduling; `none`: vLLM's own, so that tasks are only admitted."""
    image_window: Annotated[int | None, PlainValidator(_whole_or_none)] = None
    """Images that stay in a task's context; `none`: all. Each time that some leave, its record forks."""
    image_window_drop: Positive = 1
    """How many of them, the oldest, leave at once when another one comes; at most `image_window`."""


class AlgorithmConfig(Section):
    """What an update computes."""

    loss: Literal["auto", "grpo", "decoupled_ppo"] = "auto"
    advantage: Literal["group", "leave_one_out"] = "group"
    group_size: Positive = 8
    """Trajectories sampled for one prompt."""
    kl_coef: NonNegative = 0.01
    """Weight of the KL to the model after the warm-up; 0 = no reference is computed."""


class TrainConfig(Section):
    """The optimizer's side."""

    updates: Positive = 60
    global_batch_groups: Positive = 8
    """Groups that one update consumes."""
    micro_batch_tokens: Positive = 4096
    steps_per_batch: Positive = 1
    """Optimizer steps over parts of one global batch."""
    lr: PositiveFloat = 3.0e-4
    sharding: Annotated[Literal["none"], _not_yet(("none",), ("fsdp", "zero", "ddp", "tensor"))] = "none"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class ScheduleConfig(Section):
    """Who generates and trains when."""

    strategy: Name = "areal"
    max_staleness: Count = 1
    """In updates, for the strategies that allow any."""
    staleness_counts: Literal["oldest_token", "window"] = "oldest_token"
    """How `max_staleness` counts: updates since a sequence's oldest token, or since its group became ready."""
    publish_every_updates: Positive = 1


class ClusterConfig(Section):
    """Ranks: one process and one accelerator (or CPU worker) each."""

    kind: Annotated[Literal["inline", "process"], _not_yet(("inline", "process"), ("ray",))] = "process"
    ranks: Positive = 2
    rollout_ranks: AutoPositive = "auto"
    reference_ranks: AutoCount = "auto"


class CheckpointConfig(Section):
    """What makes a run resumable."""

    every_updates: AutoPositive = "auto"
    """`auto`: each update while that costs under 5 % of it."""
    keep: Positive = 2


class EvalConfig(Section):
    """Held-out prompts, before the first update, every so often, and after the last."""

    every_updates: Count = 10
    """0 = no evaluation at all."""
    prompts: Positive = 200
    temperature: NonNegative = 1.0
    """0 = greedy."""


class LogConfig(Section):
    """Where a run is told beside its own files."""

    profile: bool = False
    """Write where each process's time goes to the run's `profile.json`."""
    trackers: list[Tracker] = []
    """`tensorboard`: curves under the run's `tensorboard/`."""


class SimWorkloadConfig(Section):
    """How the simulated tasks behave: lognormal turns, lengths and seconds by median and sigma."""

    turns_median: Median
    turns_sigma: Sigma
    first_observation_tokens: Median
    """The first prompt, system prompt and tool schemas included."""
    observation_tokens: Median
    observation_sigma: Sigma
    action_tokens: Median
    """Sampled in one turn."""
    action_sigma: Sigma
    step_s: NonNegative
    step_sigma: Sigma = 0.0
    reset_s: NonNegative = 0.0
    score_s: NonNegative = 0.0
    """Of the verifier after the last turn."""
    group_correlation: Fraction = 0.5
    """Of the turns of a group's members, in standard deviations."""
    success_fraction: Fraction = 0.5
    system_tokens: NonNegative = 0.0
    """Of the first prompt: the same for every prompt, as tool schemas are. Engines keep their KV once."""
    timeout_fraction: Fraction = 0.0
    """Of resets and steps: they never answer, and end at `env.deadline_s`."""
    failure_fraction: Fraction = 0.0
    """Of resets and steps: they raise."""
    action_correlation: Fraction = 0.0
    """Of the lengths of a turn's actions, between the members of a group: answers to one question are alike."""
    observation_images: bool = False
    """Whether each observation after the first prompt is one image: `rollout.image_window` counts them."""


def _workload(value: object) -> object:
    if value == "auto" or isinstance(value, Mapping | SimWorkloadConfig):
        return value
    raise ValueError("must be auto, or a mapping such as {turns_median: 7, turns_sigma: 0.5, …}")


GIVEN = "given"
AutoOrWorkload = Annotated[
    Annotated[Auto, Tag("auto")] | Annotated[SimWorkloadConfig, Tag(GIVEN)],
    Discriminator(lambda value: "auto" if value == "auto" else GIVEN),
    BeforeValidator(_workload),
]
TAGS = (ONE, MIX, GIVEN)
"""Of alternatives: what errors name behind a key without its being one."""


def _faults(value: object) -> object:
    from tiderl.sim.faults.plan import FAULTS

    if isinstance(value, Mapping):
        for name, probability in value.items():
            if name not in FAULTS:
                raise WrongInside(f"holds {name!r}, which is no fault", _nearest(name, FAULTS))
            if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 <= probability <= 1:
                raise WrongInside(f"needs a probability from 0 to 1 for {name}, given {probability!r}")
        return {name: float(probability) for name, probability in value.items()}
    if value not in ("none", "swarm"):
        raise ValueError("must be none, swarm, or a mapping such as {engine_crash: 0.01}")
    return value


class SimConfig(Section):
    """Read by `tiderl sim` only."""

    hardware: Name = "this-cpu"
    model: Name = "auto"
    """`auto`: the shape of `model:`; else a published model that `cost/models.py` knows."""
    workload: AutoOrWorkload = "auto"
    """`auto`: the profile that the environment's registry line holds."""
    workload_seed: Annotated[int | Auto, _auto_or_whole(0)] = "auto"
    """Seed of lengths and waits; `auto`: the run's `seed`."""
    cost: dict[str, NonNegative] = {}
    """Constants of `cost.CostModel` by name, instead of those that hardware and model give."""
    efficiency: dict[str, PositiveFloat] = {}
    """Factors of `cost.hardware.Efficiency` by name, instead of the assumed ones."""
    weight_sync: Literal["relay", "broadcast", "delta"] = "relay"
    """How a version reaches the engines: each reads it, all share a collective with the trainer, or what changed."""
    kv_block_tokens: AutoPositive = "auto"
    """Positions in one block of an engine's KV; `auto`: 1 on `this-cpu`, whose engine keeps contexts, else 16."""
    faults: Annotated[Literal["none", "swarm"] | dict[str, Fraction], BeforeValidator(_faults)] = "none"
    """`swarm`: a random subset, drawn by `seed`; or a mapping of faults to their probabilities."""


class Config(Section):
    """One run."""

    run: Name | None = None
    """A name under `runs/` or a path; without one, `<file stem>-<number>`."""
    seed: Count = 0
    model: ModelConfig = ModelConfig()
    warmup: WarmupConfig = WarmupConfig()
    env: OneOrMix = EnvConfig()
    """One environment, or a list of them, each with its `weight`."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    sim: SimConfig = SimConfig()

    @property
    def is_mixture(self) -> bool:
        return isinstance(self.env, list)

    @property
    def environments(self) -> dict[str, EnvConfig]:
        """By name, a file's without its folder; in a mixture those that occur more than once are numbered: `babyai#1`,
        `babyai#2`."""
        if not isinstance(self.env, list):
            return {self.env.name: self.env}
        names = [env.name.rpartition("/")[2] for env in self.env]
        numbered = [
            f"{name}#{names[: place + 1].count(name)}" if names.count(name) > 1 else name
            for place, name in enumerate(names)
        ]
        return dict(zip(numbered, self.env, strict=True))


SECTIONS: dict[str, type[Section]] = {
    name: type(field.default) for name, field in Config.model_fields.items() if isinstance(field.default, Section)
}

_SAMPLED = "the trainer's log-probs must be those of the distribution that was sampled; remove the key"

RESERVED: Mapping[str, str] = {
    "train.lora": "train.lora is not yet supported; the whole model is trained",
    "gateway": "the gateway is not yet supported",
    "rollout.top_p": f"top-p is refused in training: {_SAMPLED}",
    "rollout.top_k": f"top-k is refused in training: {_SAMPLED}",
}
"""Keys that are no keys, each with the reason (architecture §12; the engine must sample what the trainer computes)."""


def known_keys() -> list[str]:
    """Every dotted key of the configuration, sections included, in the file's order."""
    keys: list[str] = []
    for name in Config.model_fields:
        keys.append(name)
        keys += [f"{name}.{inner}" for inner in SECTIONS[name].model_fields] if name in SECTIONS else []
    return keys
