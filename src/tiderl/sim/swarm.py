"""A swarm: many small instances of one file, each with other sizes and other faults, all rules checked in each.

What a seed means is decided here: its instance, its faults, when calm comes and how long the run may take after that.
Also what a whole swarm must have seen at least once. Pure: running is the caller's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from tiderl.data.rng import stream
from tiderl.schedule.priority import WEIGHTS, PriorityName
from tiderl.sim.faults.plan import CALM_AFTER, FAULTS, FaultPlan, draw_probabilities

MAX_RANKS, MAX_GROUPS, MAX_MEMBERS, MAX_UPDATES, MAX_STALENESS, MAX_TURNS = 6, 4, 4, 6, 4, 8
"""An instance has at most these: about 0.1 to 0.3 s of one core."""
RANKS_TO_MIGRATE = 4
"""With fewer, rollout and training apart leave one replica."""
LARGE_PROMPT = 20
"""In an instance with two kinds of tasks the prompt of one is so many times as long as the other's."""
DELAYS_IN_A_RUN = 30.0
"""A typical delay of a fault is this part of the undisturbed run."""
LIVENESS_FACTOR, LIVENESS_DEADLINES, LIVENESS_DELAYS = 3.0, 2.0, 10.0
"""After calm a run may take so many times the undisturbed run, which is the bound that it can reach (everything may
have to be made again, of prompts with longer waits), as many environment deadlines where environments hang (the last
one, and its slot), and as many typical delays (ranks that are away, slots that are taken)."""
SEEDS_FOR_SOMETIMES = 200
"""From so many seeds on, every situation of `SOMETIMES` must have occurred."""

SITUATIONS = (
    "a trajectory spans two versions",
    "the staleness bound is full",
    "consumed at the staleness bound",
    "all slots taken",
    "a task tried again",
    "an interrupted turn goes on",
    "an evaluation",
    "an update made",
    "an update redone",
    "the trainer restored",
    "a rank lost",
    "a role changed",
    "a driver resumed",
    *(f"dropped: {reason}" for reason in ("lost", "rank_lost", "infrastructure", "channel_timeout", "group_dropped")),
    *(f"dropped: environment_{what}" for what in ("raised", "timeout", "nonsense")),
    "dropped: verifier_fault",
)
"""What a large swarm must have seen: a rule that nothing exercised proves nothing."""
MIGRATIONS = tuple(f"a task migrated: {reason}" for reason in ("no_room", "lost"))
OFFLOADED = "KV of a waiting task: offload"
BY_TASK = (
    "a task paused",
    "an evaluation paused",
    "an environment pauses",
    "an environment closed while it is paused",
    "a paused task ended",
    "a task paused while its rank is away",
    "a task waited beyond the patience",
    *MIGRATIONS,
    "a rank lost while a task is paused",
    "a rank lost while a task holds KV",
    "weights loaded while a task is paused",
    "turns outgrow the pool",
    "KV of a waiting task: keep",
    OFFLOADED,
    "KV of a waiting task: drop",
)
"""The same, of what there is under `ctb` alone."""
FORKS = "a context forks"


@dataclass(frozen=True)
class FileSize:
    """What an instance may not exceed, the file's own sizes, and what it may not change."""

    ranks: int
    global_batch_groups: int
    group_size: int
    updates: int
    max_turns: int
    max_context_tokens: int
    max_new_tokens_per_turn: int
    environment: Mapping[str, Any] | None
    """The file's `env`, in plain values; None: a mixture."""
    first_tokens: int
    """Of a first observation, in the median; of a mixture the largest."""
    turn_tokens: int
    """That a turn and its answer add, in the median."""
    kv_capacity_tokens: int
    """KV that the simulated memory of a replica holds."""
    kv_policy: str = "auto"
    """What the file or the command asks for."""
    images: bool = False
    """`sim.workload` is the file's own, so that it can say that observations are images."""
    offloads: bool = False
    """Its engines have host memory for KV."""

    def at_most(self, name: str, limit: int) -> int:
        return max(1, min(int(getattr(self, name)), limit))


def out_of_reach(file: FileSize) -> frozenset[str]:
    """Faults and situations that no instance of the file can have, or only some odd ones."""
    found: list[str] = []
    if file.kv_policy == "lru":
        found += ["env_pause_fails", "offload_lost", *BY_TASK]
    if not file.offloads:
        found += ["offload_lost", OFFLOADED]
    if not file.images or file.kv_policy == "lru":
        found += [FORKS]
    if file.ranks < RANKS_TO_MIGRATE:
        found += MIGRATIONS
    return frozenset(found)


class InstanceDraws:
    """The draws of one seed's instance, one stream for each name, so that a new one shifts no other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def between(self, name: str, low: int, high: int) -> int:
        """A whole number from `low` to `high`, at least `low`."""
        return int(stream(self._seed, "swarm", name).integers(low, max(low, high) + 1))

    def one_of(self, name: str, *choices: Any) -> Any:
        return choices[self.between(name, 0, len(choices) - 1)]


def draw_instance(seed: int, file: FileSize) -> tuple[str, ...]:
    """The overrides that make the seed's instance of the file, as after `-o`."""
    draws = InstanceDraws(seed)
    between, one_of = draws.between, draws.one_of
    steps = between("steps", 1, 2)
    groups = steps * between("groups", 1, max(1, file.at_most("global_batch_groups", MAX_GROUPS) // steps))
    size = between("members", 2, file.at_most("group_size", MAX_MEMBERS))
    strategy = one_of("strategy", "areal", "areal", "areal", "sync")
    stale = strategy != "sync"
    staleness = between("staleness", 0, MAX_STALENESS) if stale else 0
    turns = between("turns", 1, file.at_most("max_turns", MAX_TURNS))
    ranks = between("ranks", 1, file.at_most("ranks", MAX_RANKS))
    context = file.max_context_tokens
    policy = one_of("kv policy", "lru", "ctb", "ctb") if file.kv_policy == "auto" else file.kv_policy
    by_task: dict[str, Any] = {}
    if policy == "ctb":
        replicas = ranks if not stale or ranks == 1 else ranks // 2
        by_task = _by_task(draws, file, turns, tasks_each=-(-(staleness + 1) * groups * size // replicas))
        context = by_task["rollout.max_context_tokens"]
    chosen: dict[str, Any] = {
        "seed": seed,
        "train.global_batch_groups": groups,
        "train.steps_per_batch": steps,
        "train.updates": between("updates", 2, file.at_most("updates", MAX_UPDATES)),
        "train.micro_batch_tokens": context * between("micro-batch", 1, 3),
        "algorithm.group_size": size,
        "algorithm.kl_coef": one_of("reference", 0.0, 0.01),
        "schedule.strategy": strategy,
        "schedule.max_staleness": staleness,
        "schedule.staleness_counts": one_of("counts", "oldest_token", "window") if stale else "oldest_token",
        "schedule.publish_every_updates": between("publish", 1, min(3, staleness + 1)),
        "cluster.ranks": ranks,
        "cluster.rollout_ranks": "auto",
        "rollout.max_turns": turns,
        "rollout.kv_policy": policy,
        "rollout.kv_budget_tokens": one_of("kv", "auto", "auto", context, 2 * context),
        "checkpoint.every_updates": one_of("checkpoint", "auto", 1, 2, 3),
        "checkpoint.keep": between("keep", 1, 3),
        "eval.every_updates": between("eval", 0, 3),
        "eval.prompts": between("eval prompts", 1, 4),
    }
    if file.environment is not None:
        slots = one_of("slots", "auto", "auto", between("slot count", 1, 2 * groups * size))
        if "env" not in by_task:
            chosen["env.slots"] = slots
    return tuple(f"{key}={_written(value)}" for key, value in (chosen | by_task).items())


def _by_task(draws: InstanceDraws, file: FileSize, turns: int, *, tasks_each: int) -> dict[str, Any]:
    """What counts under `ctb` alone: the rules, and contexts and pools so small that tasks have to wait for room.
    `tasks_each`: tasks that one replica may have."""
    one_of = draws.one_of
    found: dict[str, Any] = {
        "rollout.growth_z": one_of("growth", 0.0, 1.0, 2.0),
        "rollout.patience_s": one_of("patience", 0.01, 0.3, 3.0, 30.0),
        "rollout.priority": one_of("priority", *get_args(PriorityName)),
    }
    if found["rollout.priority"] == "weighted":
        weights = {name: one_of(f"weight of {name}", 0.0, 1.0, 8.0) for name in WEIGHTS}
        found["rollout.priority_weights"] = weights
    first = file.first_tokens
    if file.environment is not None and one_of("sizes", False, False, True):
        rare = one_of("share of large prompts", 0.25, 1.0)
        found["env"] = [file.environment, {**file.environment, "weight": rare}]
        first = LARGE_PROMPT * first
    if file.images and one_of("images", False, False, True):
        window = draws.between("window", 1, 3)
        found["sim.workload.observation_images"] = True
        found["rollout.image_window"] = window
        found["rollout.image_window_drop"] = draws.between("window drop", 1, window)
    need = first + turns * file.turn_tokens
    least = max(first + file.turn_tokens, file.max_new_tokens_per_turn + 1)
    context = max(least, round(need * one_of("context", 0.75, 1.5, 3.0)))
    found["rollout.max_context_tokens"] = context
    share = one_of("pool", None, 1.0, 0.5, 0.25, 0.1)
    if share is not None:
        found["rollout.kv_budget_tokens"] = max(
            context, min(round(share * tasks_each * need), file.kv_capacity_tokens)
        )
    return found


def _written(value: Any) -> str:
    """As after the `=` of an override: JSON is YAML."""
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def draw_plan(
    seed: int, *, undisturbed_s: float, deadline_s: float, given: Mapping[str, float] | None = None
) -> FaultPlan:
    """The seed's faults, or those `given`, in the time scale of its instance."""
    rng = stream(seed, "swarm", "calm")
    return FaultPlan(
        seed=seed,
        probabilities=draw_probabilities(seed) if given is None else given,
        calm_s=undisturbed_s * float(rng.uniform(*CALM_AFTER)),
        delay_s=undisturbed_s / DELAYS_IN_A_RUN,
        hang_s=deadline_s,
    )


def may_take_s(plan: FaultPlan, undisturbed_s: float) -> float:
    """Liveness: the moment at which the run must be done."""
    hangs = any(name in plan.probabilities for name in ("env_hang", "env_never_returns"))
    still_out_s = LIVENESS_DEADLINES * plan.hang_s * hangs + LIVENESS_DELAYS * plan.delay_s
    return plan.calm_s + LIVENESS_FACTOR * undisturbed_s + still_out_s


@dataclass(frozen=True)
class SeedReport:
    """One instance, run under its faults. Seconds are virtual."""

    seed: int
    overrides: tuple[str, ...]
    probabilities: dict[str, float]
    violations: tuple[str, ...]
    fired: dict[str, int]
    seen: dict[str, int]
    drivers: int
    undisturbed_s: float
    calm_s: float
    done_s: float
    limit_s: float
    events: int
    log_sha256: str


@dataclass
class SwarmReport:
    """Many seeds of one file."""

    file: str
    seeds: list[SeedReport] = field(default_factory=list)
    out_of_reach: frozenset[str] = frozenset()
    """Of faults and situations, what is not asked for."""

    @property
    def failed(self) -> list[SeedReport]:
        return [report for report in self.seeds if report.violations]

    @property
    def fired(self) -> Counter[str]:
        return sum((Counter(report.fired) for report in self.seeds), Counter())

    @property
    def seen(self) -> Counter[str]:
        return sum((Counter(report.seen) for report in self.seeds), Counter())

    def never(self) -> list[str]:
        """Faults and situations that should have occurred in so many seeds, and did not."""
        if len(self.seeds) < SEEDS_FOR_SOMETIMES:
            return []
        occurred = self.fired + self.seen
        asked = [name for name in (*FAULTS, *SITUATIONS, *BY_TASK, FORKS) if name not in self.out_of_reach]
        return [name for name in asked if not occurred[name]]

    def replay(self, report: SeedReport, *, overrides: Sequence[str] = ()) -> str:
        """The one command that shows this seed again."""
        given = "".join(f" -o {override}" for override in overrides)
        return f"tiderl sim {self.file}{given} --swarm 1 --seed {report.seed}"

    def slowest(self) -> float:
        """The largest part of its limit that a seed took after calm came."""
        return max(
            ((r.done_s - r.calm_s) / (r.limit_s - r.calm_s) for r in self.seeds if not r.violations), default=0.0
        )

    def to_json(self, *, overrides: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "file": self.file,
            "seeds": len(self.seeds),
            "first_seed": self.seeds[0].seed if self.seeds else None,
            "violations": [
                {"seed": r.seed, "what": list(r.violations), "replay": self.replay(r, overrides=overrides)}
                for r in self.failed
            ],
            "never": self.never(),
            "faults": {name: self.fired[name] for name in FAULTS},
            "situations": dict(sorted(self.seen.items())),
            "drivers": sum(r.drivers for r in self.seeds),
            "events": sum(r.events for r in self.seeds),
            "virtual_s": float(np.sum([r.done_s for r in self.seeds])),
            "liveness_fraction_max": self.slowest(),
            "log_sha256": [r.log_sha256 for r in self.seeds],
        }
