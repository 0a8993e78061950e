"""Who may start and what may be consumed, so that no token is ever trained more than η updates old (I3).

Updates are counted from 0 here: `updates_done` = u means that update u (the u+1-st) is the next. A group that starts
on a replica with loaded version v must be consumed by update index d = v + η, its deadline. Two rules together keep
the Hall condition  #{unconsumed started, d ≤ u'} ≤ (u' − u + 1)·B  for every u' ≥ u, with B groups an update:

* start: only while groups started and not dropped < (η + 1 + v)·B  (the token bucket of AReaL, arXiv 2505.24298);
* consume: the first B ready groups by (deadline, id), unless this spends a slot that an unready group with an earlier
  deadline needs. Taking the oldest ready groups without this check breaks the bound on heavy tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StartView:
    """What the start rule looks at; counts are groups."""

    started_groups: int
    """Started since the beginning of the run and not dropped, consumed ones included."""
    total_groups: int
    """What all updates of the run will consume together."""
    global_batch_groups: int
    max_staleness: int


def starts_allowed(view: StartView, version: int) -> int:
    """How many more groups may start on a replica with this loaded version."""
    bucket = (view.max_staleness + 1 + version) * view.global_batch_groups
    return max(0, min(bucket, view.total_groups) - view.started_groups)


def deadline(start_version: int, max_staleness: int) -> int:
    """The last update index (from 0) that may consume a group started at this version."""
    return start_version + max_staleness


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


def choose_whole_batch(groups: Sequence[GroupView], batch_groups: int) -> tuple[int, ...] | None:
    """The first B groups in order of start, once all of them are ready; or None: wait."""
    first = sorted(groups, key=lambda g: g.prompt_id)[:batch_groups]
    if len(first) < batch_groups or not all(g.ready for g in first):
        return None
    return tuple(g.prompt_id for g in first)


def hall_violation(groups: Sequence[GroupView], updates_done: int, batch_groups: int, max_staleness: int) -> int | None:
    """The first update index by which more groups fall due than can be consumed, or None. Always None by the rules
    above."""
    for horizon in range(updates_done - 1, updates_done + max_staleness + 1):
        if sum(g.deadline <= horizon for g in groups) > (horizon - updates_done + 1) * batch_groups:
            return horizon
    return None
