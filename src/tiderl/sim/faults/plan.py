"""The faults that virtual time can inject, as data, and the plan of one run: which, how likely, until when.

Chaos first, then calm: after `calm_s` nothing new goes wrong, so that liveness can be asked for. Each fault draws from
a stream of its own, so that switching one on shifts no other (I10). Knows names and numbers, no port.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiderl.data.errors import ConfigurationError
from tiderl.data.rng import stream


@dataclass(frozen=True)
class FaultKind:
    """One way in which the world fails."""

    name: str
    what: str
    each: str
    """The opportunity that its probability counts for."""
    likely: tuple[float, float]
    """Between these a swarm draws its probability, evenly in the logarithm."""


FAULTS: Mapping[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("engine_crash", "a replica's process dies and comes back empty", "turn", (0.002, 0.03)),
        FaultKind("slow_replica", "a replica answers 2 to 20 times as late for a while", "turn", (0.005, 0.05)),
        FaultKind("preemption_storm", "every turn of a replica is cut short at once", "turn", (0.005, 0.05)),
        FaultKind("out_of_memory", "a turn fails in the engine and leaves nothing", "turn", (0.005, 0.05)),
        FaultKind("request_timeout", "a turn gets no answer within its deadline", "turn", (0.005, 0.05)),
        FaultKind("late_completion", "a cancelled turn goes on in its engine to its end", "turn", (0.2, 1.0)),
        FaultKind("kv_hint_ignored", "the engine ignores what it is told of a task's KV", "hint", (0.1, 1.0)),
        FaultKind("kv_hints_unheard", "a replica hears no hint at all for a while", "hint", (0.02, 0.2)),
        FaultKind("crash_at_pause", "the replica of a task dies as the task pauses", "pause", (0.1, 0.6)),
        FaultKind("kv_dropped", "an engine drops what it was to keep for waiting tasks", "turn", (0.02, 0.3)),
        FaultKind("offload_lost", "all KV in a replica's host memory is lost", "offload", (0.05, 0.5)),
        FaultKind("turn_outgrows", "a turn says 2 to 20 times as much as it would", "turn", (0.01, 0.2)),
        FaultKind("reorder", "what becomes ready at one instant runs in another order", "pass of the loop", (0.1, 1.0)),
        FaultKind("env_crash", "an environment raises", "reset or step", (0.003, 0.1)),
        FaultKind("env_hang", "an environment does not answer within its deadline", "reset or step", (0.002, 0.02)),
        FaultKind("env_never_returns", "it hangs, and its slot comes back late", "reset or step", (0.001, 0.01)),
        FaultKind("env_slow", "an environment takes longer", "reset or step", (0.01, 0.2)),
        FaultKind("env_garbage", "an environment answers nonsense", "reset or step", (0.002, 0.03)),
        FaultKind("env_poisoned", "one member of a prompt fails in every attempt", "first opening", (0.01, 0.1)),
        FaultKind("env_worker_lost", "the worker of all open environments dies", "reset or step", (0.001, 0.01)),
        FaultKind("env_pause_fails", "an environment raises where it should pause", "pause or resume", (0.02, 0.2)),
        FaultKind("env_slot_lost", "a slot is taken away for a while", "opened environment", (0.02, 0.2)),
        FaultKind("verifier_fault", "the verifier fails", "score", (0.05, 0.5)),
        FaultKind("trainer_crash", "the trainer's rank dies in the middle of a step", "training call", (0.005, 0.05)),
        FaultKind("crash_before_publish", "the trainer's rank dies before it exports", "version", (0.05, 0.3)),
        FaultKind("crash_after_publish", "it dies after the export, before the answer", "version", (0.05, 0.3)),
        FaultKind("straggler", "a training call takes 2 to 20 times as long", "training call", (0.02, 0.2)),
        FaultKind("load_fails", "new weights arrive in part or with a wrong checksum", "load", (0.05, 0.4)),
        FaultKind("load_repeated", "new weights are loaded twice", "load", (0.05, 0.5)),
        FaultKind("load_late", "weights are loaded, the answer comes much later", "load", (0.05, 0.5)),
        FaultKind("notice_late", "the loss or return of a rank is noticed late", "notice", (0.2, 1.0)),
        FaultKind("checkpoint_fails", "the disk refuses a checkpoint", "checkpoint", (0.05, 0.5)),
        FaultKind("checkpoint_torn", "a checkpoint looks whole and cannot be read", "checkpoint", (0.1, 0.6)),
        FaultKind("write_fails", "the disk refuses a payload or a commit: the driver ends", "write", (0.005, 0.05)),
        FaultKind("driver_crash", "the driver dies at a write, before or after it", "write", (0.002, 0.05)),
        FaultKind("power_cut", "a crash of the driver loses the journal's tail or tears it", "crash", (0.1, 0.7)),
        FaultKind("driver_stopped", "the driver is asked to stop, and resumed", "write", (0.001, 0.02)),
        FaultKind("consumer_cancelled", "everything is cancelled at once, and resumed", "write", (0.001, 0.02)),
    )
}

ENDURABLE = frozenset(
    {
        *("slow_replica", "late_completion", "reorder", "env_slow", "env_slot_lost", "straggler"),
        *("kv_hint_ignored", "kv_hints_unheard", "kv_dropped", "offload_lost", "turn_outgrows"),
        *(
            "load_fails",
            "load_repeated",
            "load_late",
            "notice_late",
            "checkpoint_fails",
            "checkpoint_torn",
            "power_cut",
        ),
    }
)
"""What may strike at every opportunity and lets the run go on."""

BY_TASK = frozenset({"crash_at_pause", "env_pause_fails", "offload_lost"})
"""What strikes where tasks pause or their KV is offloaded: under `rollout.kv_policy: ctb` alone."""

NOT_APPLICABLE: Mapping[str, str] = {
    "duplicate completion": "the channel matches an answer to its request once and drops a second one",
    "stale weights arriving late": "the channel keeps the order, and a replica asks for one version at a time",
    "KV hint clipped": "a hint names a task, never an amount",
    "role switch aborted": "ranks do not change their role by a plan yet",
    "configuration changed in the middle": "a resume with another configuration is refused",
    "clock jump": "virtual time only goes forward; live, nothing but the loop's monotonic clock is read",
}
"""Of the usual list: what cannot happen at these ports, and why."""

ENABLED_FRACTION = 0.35
"""Of the faults, in each run of a swarm: a random subset finds more than all at once (Groce et al., ISSTA 2012)."""
CALM_AFTER = (0.3, 1.5)
"""When calm comes, in durations of the undisturbed run."""
SLOWED_AT_MOST = 10.0
"""Typical delays that one slow call may take longer: else a long one outlives every calm."""
DELAY = (0.02, 3.0)
"""Delays, absences and repairs, in typical delays of the run, evenly in the logarithm."""


@dataclass(frozen=True)
class FaultPlan:
    """`probabilities`: of each enabled fault, for each opportunity. `delay_s`: a typical delay of this run."""

    seed: int
    probabilities: Mapping[str, float]
    calm_s: float = math.inf
    delay_s: float = 1.0
    hang_s: float = 30.0
    """What an environment's deadline is."""

    def __post_init__(self) -> None:
        for name, probability in self.probabilities.items():
            if name not in FAULTS:
                raise ConfigurationError(f"unknown fault {name!r}", hint=f"known: {', '.join(FAULTS)}")
            if not 0.0 <= probability <= 1.0:
                raise ConfigurationError(f"the fault {name} has the probability {probability}, not one of 0 to 1")


def draw_probabilities(seed: int) -> dict[str, float]:
    """A random subset of the faults, each with a probability of its own; a fault's draw depends on no other's."""
    found: dict[str, float] = {}
    for kind in FAULTS.values():
        rng = stream(seed, "swarm", "fault", kind.name)
        if rng.random() < ENABLED_FRACTION:
            found[kind.name] = float(np.exp(rng.uniform(*np.log(kind.likely))))
    return found


class Dice:
    """Says at every opportunity whether the fault strikes now, and counts those that did."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.fired: Counter[str] = Counter()
        self._streams = {name: stream(plan.seed, "fault", name) for name in plan.probabilities}

    def calm(self) -> bool:
        return asyncio.get_running_loop().time() >= self.plan.calm_s

    def enabled(self, name: str) -> bool:
        return self.plan.probabilities.get(name, 0.0) > 0.0

    def strikes(self, name: str) -> bool:
        """Never in calm, and never a fault that is not in the plan."""
        if not self.enabled(name) or self.calm():
            return False
        struck = bool(self._streams[name].random() < self.plan.probabilities[name])
        self.fired[name] += struck
        return struck

    def delay_s(self, name: str) -> float:
        """A delay that belongs to the fault."""
        low, high = np.log(DELAY)
        return self.plan.delay_s * float(np.exp(self._streams[name].uniform(low, high)))

    def factor(self, name: str) -> float:
        """How many times slower: 2 to 20, evenly in the logarithm."""
        return float(np.exp(self._streams[name].uniform(math.log(2.0), math.log(20.0))))

    def slowed_s(self, seconds: float, factor: float) -> float:
        """How much longer a call of so many seconds takes, `factor` times as slow."""
        return min(seconds * (factor - 1.0), SLOWED_AT_MOST * self.plan.delay_s)

    def chance(self, name: str) -> float:
        """An even draw from [0, 1) that belongs to the fault."""
        return float(self._streams[name].random())

    def reorder(self, ready: deque[Any]) -> None:
        """Shuffles what is ready to run, where that strikes now."""
        if self.strikes("reorder"):
            before = list(ready)
            ready.clear()
            ready.extend(before[index] for index in self._streams["reorder"].permutation(len(before)))
