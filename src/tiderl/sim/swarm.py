"""A swarm: many small instances of one file, each with other sizes and other faults, all rules checked in each.

What a seed means is decided here: its instance, its faults, when calm comes and how long the run may take after that.
Also what a whole swarm must have seen at least once. Pure: running is the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiderl.data.rng import stream
from tiderl.sim.faults.plan import CALM_AFTER, FAULTS, FaultPlan, draw_probabilities

MAX_RANKS, MAX_GROUPS, MAX_MEMBERS, MAX_UPDATES, MAX_STALENESS, MAX_TURNS = 6, 4, 4, 6, 4, 8
"""An instance has at most these: about 0.1 to 0.3 s of one core."""
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


@dataclass(frozen=True)
class FileSize:
    """What an instance may not exceed: the file's own sizes."""

    ranks: int
    global_batch_groups: int
    group_size: int
    updates: int
    max_turns: int
    max_context_tokens: int
    mixture: bool

    def at_most(self, name: str, limit: int) -> int:
        return max(1, min(int(getattr(self, name)), limit))


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
    context = file.max_context_tokens
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
        "cluster.ranks": between("ranks", 1, file.at_most("ranks", MAX_RANKS)),
        "cluster.rollout_ranks": "auto",
        "rollout.max_turns": between("turns", 1, file.at_most("max_turns", MAX_TURNS)),
        "rollout.kv_budget_tokens": one_of("kv", "auto", "auto", context, 2 * context),
        "checkpoint.every_updates": one_of("checkpoint", "auto", 1, 2, 3),
        "checkpoint.keep": between("keep", 1, 3),
        "eval.every_updates": between("eval", 0, 3),
        "eval.prompts": between("eval prompts", 1, 4),
    }
    if not file.mixture:
        chosen["env.slots"] = one_of("slots", "auto", "auto", between("slot count", 1, 2 * groups * size))
    return tuple(f"{key}={value}" for key, value in chosen.items())


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
        fired, seen = self.fired, self.seen
        return [name for name in FAULTS if not fired[name]] + [name for name in SITUATIONS if not seen[name]]

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
