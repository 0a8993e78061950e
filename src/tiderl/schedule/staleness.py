"""Who may start and what may be consumed, so that consumed staleness never exceeds the bound η (I3).

Updates are counted from 0 here: `updates_done` = u means that update u (the u+1-st) is the next. Two definitions:

`oldest_token` (strict). A group that starts on a replica with loaded version v must be consumed by update index
d = v + η, its deadline. Two rules keep the Hall condition, with B groups an update of which k are taken already:
#{started, not consumed, not taken, d ≤ u'} ≤ (u' − u + 1)·B − k  for every u' ≥ u.
* start: only while groups started and not dropped < (η + 1 + v)·B  (the token bucket of AReaL, arXiv 2505.24298);
* consume: ready groups by (deadline, id), each only if the condition still holds afterwards, so that no slot of this
  update goes to a younger group while an unready one needs it. Oldest ready first without this check breaks the bound.

`window`. In flight + ready stays within (η + 1)·B groups, and the oldest ready is consumed first: then at most
(η + 1)·B − 1 groups are ahead of one that became ready, and it waits at most η updates. Trajectories go on over new
weights; each token keeps its version, and the loss weights it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tiderl.data.settings import StalenessCounts

NO_DEADLINE = -1
"""Under `window` no update is the last that may consume a group: its wait counts from when it is ready."""


@dataclass(frozen=True)
class StartView:
    """What the start rule looks at; counts are groups."""

    started_groups: int
    """Started since the beginning of the run and not dropped, consumed ones included."""
    total_groups: int
    """What all updates of the run will consume together."""
    global_batch_groups: int
    max_staleness: int
    counts: StalenessCounts = "oldest_token"
    updates_done: int = 0
    """Counts for `window` alone."""


def starts_allowed(view: StartView, version: int) -> int:
    """How many more groups may start on a replica with this loaded version."""
    since = version if view.counts == "oldest_token" else view.updates_done
    bucket = (view.max_staleness + 1 + since) * view.global_batch_groups
    return max(0, min(bucket, view.total_groups) - view.started_groups)


def deadline(start_version: int, max_staleness: int, counts: StalenessCounts = "oldest_token") -> int:
    """The last update index (from 0) that may consume a group started at this version; `NO_DEADLINE` under `window`."""
    return start_version + max_staleness if counts == "oldest_token" else NO_DEADLINE


@dataclass(frozen=True)
class GroupView:
    """A started group that is neither consumed nor dropped."""

    prompt_id: int
    deadline: int
    ready: bool


def choose_batch(
    groups: Sequence[GroupView], updates_done: int, batch_groups: int, max_staleness: int
) -> tuple[int, ...] | None:
    """The prompt ids of the next batch, earliest deadline first, or None: wait."""
    ready = sorted((g.deadline, g.prompt_id) for g in groups if g.ready)
    if len(ready) < batch_groups:
        return None
    batch = ready[:batch_groups]
    for horizon in range(updates_done, updates_done + max_staleness + 1):
        due = sum(g.deadline <= horizon for g in groups)
        needed_now = due - (horizon - updates_done) * batch_groups
        if sum(d <= horizon for d, _ in batch) < needed_now:
            return None
    return tuple(prompt_id for _, prompt_id in batch)


def choose_more(
    groups: Sequence[GroupView], taken: Collection[int], updates_done: int, batch_groups: int, max_staleness: int
) -> tuple[int, ...]:
    """The prompt ids that a streaming trainer may take now for this update, of which it has `taken` some, earliest
    deadline first; none: wait. The same condition as `choose_batch`, group by group: it may take the first ready group
    as soon as the unready ones with earlier deadlines have slots enough without it."""
    untaken = [g for g in groups if g.prompt_id not in taken]
    ready = sorted((g.deadline, g.prompt_id) for g in untaken if g.ready)
    due = Counter(g.deadline for g in untaken)
    return choose_more_of(ready, due, len(taken), updates_done, batch_groups, max_staleness)


def choose_more_of(
    ready: Sequence[tuple[int, int]],
    due: Mapping[int, int],
    taken: int,
    updates_done: int,
    batch_groups: int,
    max_staleness: int,
) -> tuple[int, ...]:
    """As `choose_more`, from what its caller counts: untaken ready groups as (deadline, prompt id) in order, and the
    untaken groups by deadline."""
    horizons = range(updates_done, updates_done + max_staleness + 1)
    slack = [(horizon - updates_done + 1) * batch_groups - taken - _due_by(due, horizon) for horizon in horizons]
    chosen: list[int] = []
    for deadline_, prompt_id in ready:
        before_due = slack[: max(0, deadline_ - updates_done)]
        if taken + len(chosen) == batch_groups or min(before_due, default=1) < 1:
            break  # a later deadline has these horizons before it too
        chosen.append(prompt_id)
        for index in range(len(before_due)):
            slack[index] -= 1
    return tuple(chosen)


@dataclass(frozen=True, order=True)
class ReadyView:
    """A ready group, in the order of `window`: longest ready first."""

    ready_update: int
    """Updates done when it became ready."""
    ready_s: float
    prompt_id: int


def choose_oldest_ready(ready: Sequence[ReadyView], taken: Collection[int], batch_groups: int) -> tuple[int, ...]:
    """The prompt ids that may be consumed now under `window`, of the `batch_groups` of which some are `taken`."""
    untaken = sorted(group for group in ready if group.prompt_id not in taken)
    return tuple(group.prompt_id for group in untaken[: batch_groups - len(taken)])


def choose_whole_batch(groups: Sequence[GroupView], batch_groups: int) -> tuple[int, ...] | None:
    """The first B groups in order of start, once all of them are ready; or None: wait."""
    first = sorted(groups, key=lambda g: g.prompt_id)[:batch_groups]
    if len(first) < batch_groups or not all(g.ready for g in first):
        return None
    return tuple(g.prompt_id for g in first)


def hall_violation(
    groups: Sequence[GroupView],
    updates_done: int,
    batch_groups: int,
    max_staleness: int,
    taken: Collection[int] = (),
) -> int | None:
    """The first update index by which more groups fall due than can be consumed, or None. Always None by the rules
    above."""
    due = Counter(g.deadline for g in groups if g.prompt_id not in taken)
    return hall_violation_of(due, len(taken), updates_done, batch_groups, max_staleness)


def hall_violation_of(
    due: Mapping[int, int], taken: int, updates_done: int, batch_groups: int, max_staleness: int
) -> int | None:
    """As `hall_violation`, from the number of untaken groups by deadline."""
    for horizon in range(updates_done - 1, updates_done + max_staleness + 1):
        # Before the next update there are no slots, and what is taken has left them already.
        slots = (horizon - updates_done + 1) * batch_groups - (taken if horizon >= updates_done else 0)
        if _due_by(due, horizon) > slots:
            return horizon
    return None


def _due_by(due: Mapping[int, int], horizon: int) -> int:
    return sum(count for deadline_, count in due.items() if deadline_ <= horizon)
