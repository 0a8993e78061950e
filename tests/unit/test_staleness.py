"""I3 as a property: whatever starts, finishes or drops in whatever order, nothing is ever consumed too late."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tiderl.schedule.staleness import (
    GroupView,
    StartView,
    choose_batch,
    choose_whole_batch,
    deadline,
    hall_violation,
    starts_allowed,
)


def test_bucket_counts_started_groups_against_loaded_version() -> None:
    view = StartView(started_groups=9, total_groups=100, global_batch_groups=4, max_staleness=1)
    assert starts_allowed(view, version=0) == 0  # (1 + 1 + 0) * 4 = 8
    assert starts_allowed(view, version=1) == 3  # 12 - 9
    assert starts_allowed(view, version=2) == 7


def test_no_group_starts_beyond_what_the_run_consumes() -> None:
    assert starts_allowed(StartView(10, total_groups=12, global_batch_groups=4, max_staleness=8), version=3) == 2


def test_earliest_deadline_goes_first_and_ids_break_ties() -> None:
    groups = [GroupView(0, 3, True), GroupView(1, 2, True), GroupView(2, 2, True), GroupView(3, 3, False)]
    assert choose_batch(groups, updates_done=1, batch_groups=2, max_staleness=2) == (1, 2)


def test_waits_for_an_unready_group_that_is_due_now() -> None:
    # Two groups are due by index 0 and one of them is not ready: a younger ready one must not take its place.
    groups = [GroupView(0, 0, True), GroupView(1, 0, False), GroupView(2, 1, True)]
    assert choose_batch(groups, updates_done=0, batch_groups=2, max_staleness=1) is None


def test_whole_batch_takes_groups_in_order_of_start_only() -> None:
    late = [GroupView(0, 0, False), GroupView(1, 0, True), GroupView(2, 0, True)]
    assert choose_whole_batch(late, 2) is None
    assert choose_whole_batch([GroupView(0, 0, True), *late[1:]], 2) == (0, 1)


def oldest_ready_first(groups, updates_done, batch_groups, max_staleness):
    """The mutant: AReaL's bucket with the rule `any ready, oldest first`, no feasibility check."""
    ready = sorted(g.prompt_id for g in groups if g.ready)
    return tuple(ready[:batch_groups]) if len(ready) >= batch_groups else None


def play(choose, draw, *, batch_groups: int, max_staleness: int, updates: int, steps: int) -> None:
    """A random legal run: start, finish, drop, consume, replicas that load late. Raises AssertionError on a breach."""
    started, next_id, done = 0, 0, 0
    live: dict[int, list] = {}  # prompt id -> [start version, ready]
    loaded = [0, 0]
    for _ in range(steps):
        action = draw(st.sampled_from(["start", "start", "finish", "finish", "consume", "load", "drop"]))
        if action == "start":
            replica = draw(st.integers(0, 1))
            view = StartView(started, updates * batch_groups, batch_groups, max_staleness)
            if starts_allowed(view, loaded[replica]) > 0:
                live[next_id] = [loaded[replica], False]
                next_id, started = next_id + 1, started + 1
        elif action == "load":
            loaded[draw(st.integers(0, 1))] = done
        elif action == "finish" and (waiting := [g for g in live if not live[g][1]]):
            live[draw(st.sampled_from(waiting))][1] = True
        elif action == "drop" and (waiting := [g for g in live if not live[g][1]]):
            del live[draw(st.sampled_from(waiting))]
            started -= 1
        elif action == "consume":
            views = [GroupView(g, deadline(v, max_staleness), ready) for g, (v, ready) in live.items()]
            batch = choose(views, done, batch_groups, max_staleness)
            if batch is not None:
                for g in batch:
                    version, ready = live.pop(g)
                    assert ready
                    assert done - version <= max_staleness
                done += 1
        views = [GroupView(g, deadline(v, max_staleness), ready) for g, (v, ready) in live.items()]
        assert hall_violation(views, done, batch_groups, max_staleness) is None
    # Waiting is always possible and never for ever: once everything in flight is ready, a batch exists or more may
    # start.
    views = [GroupView(g, deadline(v, max_staleness), True) for g, (v, _) in live.items()]
    if len(views) >= batch_groups:
        assert choose(views, done, batch_groups, max_staleness) is not None


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_bound_holds_for_every_order_of_events(data, batch_groups, max_staleness) -> None:
    play(choose_batch, data.draw, batch_groups=batch_groups, max_staleness=max_staleness, updates=12, steps=60)


def test_oldest_ready_first_breaks_the_bound() -> None:
    """The property has teeth: the published bucket with oldest-ready-first consumption fails it."""

    @settings(max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.data())
    def run(data) -> None:
        play(oldest_ready_first, data.draw, batch_groups=1, max_staleness=1, updates=12, steps=40)

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run()
