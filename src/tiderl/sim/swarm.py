"""A swarm: many small instances of one file, each with other sizes and other faults, all rules checked in each.

What a seed means beside its instance (`instances.py`) is decided here: its faults, when calm comes and how long the run
may take after that. Also what a whole swarm must have seen at least once. Pure: running is the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiderl.data.rng import stream
from tiderl.sim.faults.plan import BY_TASK as FAULTS_BY_TASK
from tiderl.sim.faults.plan import CALM_AFTER, FAULTS, FaultPlan, draw_probabilities
from tiderl.sim.instances import FileSize

RANKS_TO_MIGRATE = 4
"""With fewer, rollout and training apart leave one replica."""
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


def out_of_reach(file: FileSize) -> frozenset[str]:
    """Faults and situations that no instance of the file can have, or only some odd ones."""
    found: list[str] = []
    if file.kv_policy == "lru":
        found += [*FAULTS_BY_TASK, *BY_TASK]
    if not file.offloads:
        found += ["offload_lost", OFFLOADED]
    if not file.images or file.kv_policy == "lru":
        found += [FORKS]
    if file.ranks < RANKS_TO_MIGRATE:
        found += MIGRATIONS
    return frozenset(found)


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
    given: frozenset[str] = frozenset()
    """Faults that the configuration names."""

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

    def no_effect(self) -> list[str]:
        """Faults that were asked for, and that no instance can have."""
        why = "no instance of this file can have it"
        return [f"sim.faults.{name} has no effect: {why}" for name in sorted(self.given & self.out_of_reach)]

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
            "no_effect": self.no_effect(),
            "faults": {name: self.fired[name] for name in FAULTS},
            "situations": dict(sorted(self.seen.items())),
            "drivers": sum(r.drivers for r in self.seeds),
            "events": sum(r.events for r in self.seeds),
            "virtual_s": float(np.sum([r.done_s for r in self.seeds])),
            "liveness_fraction_max": self.slowest(),
            "log_sha256": [r.log_sha256 for r in self.seeds],
        }
