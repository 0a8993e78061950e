"""Admission and placement of tasks: what starts next, and on which replica. Under `lru` every replica has room for
everything; under `ctb` the views say what theirs has room for, and a group's members prefer the one that it was opened
on.

Order of admission: evaluation first (it pins a version and so blocks publishing), then members of groups that have
started (groups complete before others begin), then new groups while the staleness rule allows. Work conserving: nothing
waits for a certain replica while another eligible one has room and nothing else to start. A replica has room for its
part of all slots, else the first to load a new version, by a moment, would take the whole batch that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tiderl.schedule.priority import STANDARD, PriorityName, Weights
from tiderl.schedule.staleness import StartView, starts_allowed

EVAL_PRIORITY = 1.0
"""Evaluation turns go before training turns in an engine's queue."""
TRAIN_PRIORITY = 0.0


LEAD_SHARE = 1 / 8
"""Of the tasks of the least loaded replica: so many more another may have for the sake of a prompt that is there."""

What = Literal["eval", "member", "own", "group"]
"""`member`: the first that waits. `own`: the first of a group that was opened on this replica, where that is another
one."""
EVERYTHING: frozenset[What] = frozenset(("eval", "member", "group"))


@dataclass(frozen=True)
class KvRules:
    """What continuous task batching is told of a run."""

    max_turns: int
    max_context_tokens: int
    group_size: int
    unlimited_tokens: int
    """The budget of an engine that does not say its own."""
    growth_z: float = 1.0
    """Standard deviations of growth for which admission leaves room."""
    patience_s: float = 30.0
    """Who waits for room longer than this goes first."""
    priority: PriorityName = "tiers"
    weights: Weights = STANDARD


@dataclass(frozen=True)
class ReplicaView:
    """One replica that is up and has weights."""

    replica: int
    version: int
    tasks: int
    """In flight on it, waiting on their environment included."""
    room: frozenset[What] = EVERYTHING
    """What its KV has room for: the first waiting one of each. For a group only where no `own` waits."""
    pressed: bool = False
    """Tasks wait for room there: memory and not their number says how many turns run."""


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
    member_home: int | None = None
    """The replica where the group of the first waiting member has its prompt."""
    home_lead: int = 0
    """Tasks that it may have more than the least loaded one and is still preferred."""


@dataclass(frozen=True)
class Admission:
    """Start the first waiting one of `what` on `replica`."""

    what: What
    replica: int


@dataclass(frozen=True)
class Blocked:
    """Nothing can be admitted now; why, in one word: slots, weights, kv, staleness, done."""

    reason: str


def place(
    replicas: Sequence[ReplicaView],
    *,
    min_version: int,
    exact: bool = False,
    home: int | None = None,
    home_lead: int = 0,
) -> int | None:
    """The least loaded replica that may take the task, lowest number first; None if there is none. `home` is preferred
    while it has no more than `home_lead` tasks more, nor more than `LEAD_SHARE`: turns in a larger batch take longer,
    and a prompt is computed once. Where memory says how many turns run, a prompt that is there saves room."""
    eligible = [r for r in replicas if (r.version == min_version if exact else r.version >= min_version)]
    if not eligible:
        return None
    least = min(eligible, key=lambda r: (r.tasks, r.replica))
    lead = min(home_lead, int(least.tasks * LEAD_SHARE))
    if any(r.replica == home and (least.pressed or r.tasks <= least.tasks + lead) for r in eligible):
        return home
    return least.replica


def next_admission(view: AdmissionView) -> Admission | Blocked:
    """The one next thing to start, or why nothing can."""
    if view.free_slots < 1:
        return Blocked("slots")
    free = [r for r in view.replicas if r.tasks < view.replica_slots]
    full = stays = False
    if view.eval_version is not None:
        replica = place([r for r in free if "eval" in r.room], min_version=view.eval_version, exact=True)
        if replica is not None:
            return Admission("eval", replica)
    if view.member_min_version is not None:
        roomy = [r for r in free if "member" in r.room]
        elsewhere = place(roomy, min_version=view.member_min_version, home=view.member_home, home_lead=view.home_lead)
        stays = any(
            r.replica == view.member_home and r.version >= view.member_min_version and "member" not in r.room
            for r in free
        )
        if elsewhere is not None and not stays:
            return Admission("member", elsewhere)
        full = len(roomy) < len(free)
    if not view.replicas:
        return Blocked("weights")
    replica = place([r for r in free if "own" in r.room], min_version=0)
    if replica is not None:
        return Admission("own", replica)
    startable = [r for r in view.replicas if starts_allowed(view.start, r.version) > 0]
    if stays or not full:
        replica = place([r for r in startable if r in free and "group" in r.room], min_version=0)
        if replica is not None:
            return Admission("group", replica)
    if stays and elsewhere is not None:
        return Admission("member", elsewhere)
    if startable:
        return Blocked("kv" if full or any("group" not in r.room for r in startable) else "slots")
    if view.start.started_groups >= view.start.total_groups:
        return Blocked("done")
    return Blocked("staleness")
