"""What a run knows after a crash: the journal read back, updates to redo, groups to go on with.

Keeps I1 and I2 over crashes: what was in flight is dropped as `lost` and issued again, what was ready is kept, what was
committed after the last whole checkpoint is redone from its recorded trajectories in recorded order, without
generating.
Every counter of admission comes from the journal. Pure but for `load_group`, which reads payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiderl.data.errors import CheckpointError
from tiderl.data.records import Prompt
from tiderl.runtime.buffer import Group, Member
from tiderl.runtime.ports import Blobs, PromptRow, Replay, TrajectoryRow

FAULT_REASONS = ("environment", "verifier")
"""Reasons that count as refills of a group begin with these."""


@dataclass(frozen=True)
class LiveGroup:
    """A group that is neither consumed nor dropped: its prompt and the newest trajectory of each member."""

    prompt: PromptRow
    members: tuple[TrajectoryRow, ...]
    refills: int


@dataclass(frozen=True)
class Recovered:
    """The state to resume from."""

    checkpoints: tuple[tuple[int, str], ...]
    """(update, name) of those that look whole, oldest first."""
    torn: tuple[str, ...]
    """Names of newer ones that are missing or not whole: what they held is redone."""
    updates: tuple[tuple[int, tuple[TrajectoryRow, ...]], ...]
    """Committed updates after the oldest of them, in order, with their trajectories in recorded order."""
    groups: tuple[LiveGroup, ...]
    updates_done: int
    started_groups: int
    next_prompt_id: int
    next_trajectory_id: int


def recover(replay: Replay, whole: Callable[[str], bool]) -> Recovered | None:
    """Reads the journal. None when no checkpoint is whole and none was ever written: the run starts again.

    Raises `CheckpointError` when there were checkpoints and none of them is whole.
    """
    if not replay.checkpoints:
        return None
    checkpoints = tuple((row.update_no, row.checkpoint) for row in replay.checkpoints if whole(row.checkpoint))
    if not checkpoints:
        names = ", ".join(row.checkpoint for row in replay.checkpoints[-3:])
        raise CheckpointError(
            "no checkpoint of this run is whole",
            where=names,
            hint="start it again under another name, or with --overwrite",
        )
    by_id = {row.id: row for row in replay.trajectories}
    by_prompt: dict[int, list[TrajectoryRow]] = {row.prompt_id: [] for row in replay.prompts}
    for row in replay.trajectories:
        by_prompt[row.prompt_id].append(row)
    oldest = checkpoints[0][0]
    dropped = [p for p in replay.prompts if all(row.status == "dropped" for row in by_prompt[p.prompt_id])]
    newest = checkpoints[-1][0]
    return Recovered(
        checkpoints=checkpoints,
        torn=tuple(row.checkpoint for row in replay.checkpoints if row.update_no > newest),
        updates=tuple((number, tuple(by_id[i] for i in ids)) for number, ids in replay.updates if number > oldest),
        groups=tuple(
            live for prompt in replay.prompts if (live := _live_group(prompt, by_prompt[prompt.prompt_id])) is not None
        ),
        updates_done=len(replay.updates),
        started_groups=len(replay.prompts) - len(dropped),
        next_prompt_id=len(replay.prompts),
        next_trajectory_id=max((row.id for row in replay.trajectories), default=-1) + 1,
    )


def _live_group(prompt: PromptRow, rows: Sequence[TrajectoryRow]) -> LiveGroup | None:
    live = {row.member: row for row in rows if row.status in ("running", "ready")}
    if not live:
        return None
    refills = sum(row.status == "dropped" and str(row.reason).startswith(FAULT_REASONS) for row in rows)
    return LiveGroup(prompt, tuple(live[member] for member in sorted(live)), refills)


def _ready_update(rows: Sequence[TrajectoryRow], otherwise: int) -> int:
    """Updates done when the last of these members became ready; a journal of schema 1 does not say."""
    return max(otherwise if row.ready_update is None else row.ready_update for row in rows)


async def load_group(
    live: LiveGroup, prompts: Mapping[str, Prompt], blobs: Blobs, *, last_update: int, updates_done: int
) -> tuple[Group, list[Member]]:
    """The group as the buffer holds it, and its members that must be issued again: those that were running, and those
    whose payload cannot be read. `last_update`: its deadline. Raises `CheckpointError` when the task set no longer has
    the prompt."""
    if live.prompt.task_id not in prompts:
        raise CheckpointError(
            f"the task set has no prompt {live.prompt.task_id!r} any more",
            where="env",
            hint="resume with the environment that the run was started with",
        )
    members, lost = [], []
    for row in live.members:
        member = Member(row.member, row.id, attempt=row.attempt)
        if row.status == "ready" and row.sha256 is not None:
            try:
                member.trajectory, member.sha256 = await blobs.get(row.sha256), row.sha256
            except CheckpointError:
                lost.append(member)
        else:
            lost.append(member)
        members.append(member)
    group = Group(
        prompt_id=live.prompt.prompt_id,
        prompt=prompts[live.prompt.task_id],
        start_version=live.prompt.start_version,
        deadline=last_update,
        members=members,
        refills=live.refills,
        ready_update=_ready_update(live.members, updates_done),
    )
    return group, lost


async def load_consumed(update: int, rows: Sequence[TrajectoryRow], blobs: Blobs) -> list[Group]:
    """The groups of a committed update, in the order in which they were consumed, for its redo. Raises
    `CheckpointError`."""
    groups: dict[int, Group] = {}
    for row in rows:
        if row.sha256 is None:
            raise CheckpointError("a committed trajectory has no payload", where=f"trajectory {row.id}")
        group = groups.setdefault(row.prompt_id, Group(row.prompt_id, Prompt(id=""), 0, 0, []))
        member = Member(row.member, row.id, attempt=row.attempt, sha256=row.sha256)
        member.trajectory = await blobs.get(row.sha256)
        group.members.append(member)
        group.ready_update = max(group.ready_update, _ready_update([row], update - 1))
    return list(groups.values())
