"""What is told of a task's waits for room, and of its KV meanwhile."""

from __future__ import annotations

from tiderl.data.events import KvRetention, TaskMigrated, TaskPaused, TaskResumed
from tiderl.data.records import TaskKey
from tiderl.schedule.retention import Outcome


def paused(key: TaskKey, replica: int, reason: str, now_s: float) -> TaskPaused:
    """It waits for room; `reason`: `no_room`, or `lost` where the replica's rank is away."""
    return TaskPaused(
        t_s=now_s, split=key.split, prompt_id=key.prompt_id, member=key.member, replica=replica, reason=reason
    )


def resumed(key: TaskKey, replica: int, now_s: float) -> TaskResumed:
    return TaskResumed(t_s=now_s, split=key.split, prompt_id=key.prompt_id, member=key.member, replica=replica)


def migrated(key: TaskKey, replica: int, to: int, reason: str, now_s: float) -> TaskMigrated:
    """It goes on elsewhere; `reason` as in `paused`."""
    return TaskMigrated(
        t_s=now_s,
        split=key.split,
        prompt_id=key.prompt_id,
        member=key.member,
        from_replica=replica,
        to_replica=to,
        reason=reason,
    )


def retention(key: TaskKey, replica: int, outcome: Outcome, now_s: float) -> KvRetention:
    """What became of its KV while it waited."""
    return KvRetention(
        t_s=now_s,
        split=key.split,
        prompt_id=key.prompt_id,
        member=key.member,
        replica=replica,
        choice=outcome.choice,
        tokens=outcome.tokens,
        waited_s=outcome.waited_s,
        held_s=outcome.held_s,
        hold_s=outcome.price.hold_s,
        token_second=outcome.price.token_second,
        back_token_s=outcome.price.back_token_s(outcome.tokens),
        cost_s=outcome.cost_s,
        clairvoyant_s=outcome.clairvoyant_s,
    )
