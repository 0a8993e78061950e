"""Admission and placement of tasks at request level: the `lru` policy, where the engine's cache knows no tasks.

Order of admission: evaluation first (it pins a version and so blocks publishing), then members of groups that have
started (groups complete before others begin), then new groups while the staleness rule allows. Work conserving: nothing
waits for a certain replica while another eligible one has room. A replica has room for its part of all slots, else the
first to load a new version, by a moment, would take the whole batch that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiderl.schedule.staleness import StartView, starts_allowed

EVAL_PRIORITY = 1.0
"""Evaluation turns go before training turns in an engine's queue."""
TRAIN_PRIORITY = 0.0


@dataclass(frozen=True)
class ReplicaView:
    """One replica that is up and has weights."""

    replica: int
    version: int
    tasks: int
    """In flight on it, waiting on their environment included."""


@dataclass(frozen=True)
class AdmissionView:
    free_slots: int
    replicas: Sequence[ReplicaView]
    eval_version: int | None
    """The version that waiting evaluation tasks are pinned to; None when none wait."""
    member_min_version: int | None
    """The version of the group of the first waiting member; None when none wait."""
    start: StartView
    replica_slots: int
    """Tasks that one replica may have in flight."""


@dataclass(frozen=True)
class Admission:
    """Start the first waiting one of `what` on `replica`."""

    what: str  # eval | member | group
    replica: int


@dataclass(frozen=True)
class Blocked:
    """Nothing can be admitted now; why, in one word: slots, weights, staleness, done."""

    reason: str


def place(replicas: Sequence[ReplicaView], *, min_version: int, exact: bool = False) -> int | None:
    """The least loaded replica that may take the task, lowest number first; None if there is none."""
    eligible = [r for r in replicas if (r.version == min_version if exact else r.version >= min_version)]
    return min(eligible, key=lambda r: (r.tasks, r.replica)).replica if eligible else None


def next_admission(view: AdmissionView) -> Admission | Blocked:
    """The one next thing to start, or why nothing can."""
    if view.free_slots < 1:
        return Blocked("slots")
    roomy = [r for r in view.replicas if r.tasks < view.replica_slots]
    if view.eval_version is not None:
        replica = place(roomy, min_version=view.eval_version, exact=True)
        if replica is not None:
            return Admission("eval", replica)
    if view.member_min_version is not None:
        replica = place(roomy, min_version=view.member_min_version)
        if replica is not None:
            return Admission("member", replica)
    if not view.replicas:
        return Blocked("weights")
    startable = [r for r in view.replicas if starts_allowed(view.start, r.version) > 0]
    replica = place([r for r in startable if r in roomy], min_version=0)
    if replica is not None:
        return Admission("group", replica)
    if startable:
        return Blocked("slots")
    if view.start.started_groups >= view.start.total_groups:
        return Blocked("done")
    return Blocked("staleness")
