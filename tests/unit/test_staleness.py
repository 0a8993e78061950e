"""I3 as a property: whatever starts, finishes or drops in whatever order, nothing is ever consumed too late."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tiderl.schedule.staleness import (
    GroupView,
    ReadyView,
    StartView,
    choose_batch,
    choose_more,
    choose_oldest_ready,
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


def play_streamed(more, draw, *, batch_groups: int, max_staleness: int, updates: int, steps: int) -> None:
    """As `play`, with a trainer that takes groups one burst at a time. Raises AssertionError on a breach."""
    started, next_id, done = 0, 0, 0
    live: dict[int, list] = {}  # prompt id -> [start version, ready]
    taken: list[int] = []
    loaded = [0, 0]

    def views(all_ready: bool = False) -> list[GroupView]:
        return [GroupView(g, deadline(v, max_staleness), ready or all_ready) for g, (v, ready) in live.items()]

    for _ in range(steps):
        action = draw(st.sampled_from(["start", "start", "finish", "finish", "take", "load", "drop"]))
        if action == "start":
            replica = draw(st.integers(0, 1))
            view = StartView(started, updates * batch_groups, batch_groups, max_staleness)
            if starts_allowed(view, loaded[replica]) > 0:
                live[next_id] = [loaded[replica], False]
                next_id, started = next_id + 1, started + 1
        elif action == "load":
            loaded[draw(st.integers(0, 1))] = done
        elif action in ("finish", "drop") and (waiting := [g for g in live if not live[g][1]]):
            chosen = draw(st.sampled_from(waiting))
            if action == "finish":
                live[chosen][1] = True
            else:
                del live[chosen]
                started -= 1
        elif action == "take":
            for g in more(views(), taken, done, batch_groups, max_staleness):
                version, ready = live[g]
                assert ready
                assert g not in taken
                assert done - version <= max_staleness
                taken.append(g)
            assert len(taken) <= batch_groups
            if len(taken) == batch_groups:
                for g in taken:
                    del live[g]
                taken, done = [], done + 1
        assert hall_violation(views(), done, batch_groups, max_staleness, taken) is None
    # Waiting is always possible and never for ever.
    if len(live) - len(taken) >= batch_groups - len(taken) > 0:
        assert more(views(all_ready=True), taken, done, batch_groups, max_staleness)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_bound_holds_for_a_trainer_that_takes_groups_as_they_come(data, batch_groups, max_staleness) -> None:
    play_streamed(choose_more, data.draw, batch_groups=batch_groups, max_staleness=max_staleness, updates=12, steps=60)


def test_taking_whatever_is_ready_breaks_the_bound() -> None:
    """The mutant: streamed consumption without the feasibility check."""

    def greedy(groups, taken, updates_done, batch_groups, max_staleness):
        ready = sorted((g.deadline, g.prompt_id) for g in groups if g.ready and g.prompt_id not in taken)
        return tuple(g for _, g in ready[: batch_groups - len(taken)])

    @settings(max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.data())
    def run(data) -> None:
        play_streamed(greedy, data.draw, batch_groups=1, max_staleness=1, updates=12, steps=40)

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run()


def test_streamed_consumption_keeps_the_slots_that_unready_groups_need() -> None:
    # Two slots this update, and two groups due now: 0 is ready and may go, 2 is not due before the next update but
    # would take the slot that 1 needs.
    groups = [GroupView(0, 0, True), GroupView(1, 0, False), GroupView(2, 1, True)]
    assert choose_more(groups, (), updates_done=0, batch_groups=2, max_staleness=1) == (0,)
    assert choose_more(groups, (0,), updates_done=0, batch_groups=2, max_staleness=1) == ()
    free = [GroupView(0, 0, True), GroupView(1, 1, False), GroupView(2, 1, True)]
    assert choose_more(free, (), updates_done=0, batch_groups=2, max_staleness=1) == (0, 2)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=10), st.integers(1, 4), st.integers(0, 3))
def test_all_at_once_both_rules_agree(drawn, batch_groups, max_staleness) -> None:
    groups = [GroupView(g, min(d, max_staleness), ready) for g, (d, ready) in enumerate(drawn)]
    if hall_violation(groups, 0, batch_groups, max_staleness) is not None:
        return
    whole = choose_batch(groups, 0, batch_groups, max_staleness)
    streamed = choose_more(groups, (), 0, batch_groups, max_staleness)
    assert (whole is not None) == (len(streamed) == batch_groups)
    assert whole is None or whole == streamed


def play_window(choose, draw, *, batch_groups: int, max_staleness: int, updates: int, steps: int) -> None:
    """A random legal run under `window`; raises AssertionError when a group waits more than η updates once ready."""
    started, next_id, done, now = 0, 0, 0, 0.0
    live: dict[int, ReadyView | None] = {}
    for _ in range(steps):
        now += 1.0
        action = draw(st.sampled_from(["start", "start", "finish", "finish", "consume", "drop"]))
        waiting = [g for g, ready in live.items() if ready is None]
        if action == "start":
            view = StartView(started, updates * batch_groups, batch_groups, max_staleness, "window", done)
            if starts_allowed(view, version=0) > 0:
                live[next_id] = None
                next_id, started = next_id + 1, started + 1
        elif action == "finish" and waiting:
            chosen = draw(st.sampled_from(waiting))
            live[chosen] = ReadyView(done, now, chosen)
        elif action == "drop" and waiting:
            del live[draw(st.sampled_from(waiting))]
            started -= 1
        elif action == "consume":
            batch = choose([ready for ready in live.values() if ready is not None], (), batch_groups)
            if len(batch) == batch_groups:
                for g in batch:
                    assert done - live.pop(g).ready_update <= max_staleness
                done += 1
        assert len(live) <= (max_staleness + 1) * batch_groups


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_under_window_no_ready_group_waits_longer_than_the_bound(data, batch_groups, max_staleness) -> None:
    play_window(
        choose_oldest_ready, data.draw, batch_groups=batch_groups, max_staleness=max_staleness, updates=12, steps=60
    )


def test_under_window_newest_ready_first_breaks_the_bound() -> None:
    def newest(ready, taken, batch_groups):
        return tuple(group.prompt_id for group in sorted(ready, reverse=True)[:batch_groups])

    @settings(max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.data())
    def run(data) -> None:
        play_window(newest, data.draw, batch_groups=1, max_staleness=1, updates=12, steps=40)

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run()


def test_window_starts_count_updates_not_loaded_versions() -> None:
    view = StartView(9, total_groups=100, global_batch_groups=4, max_staleness=1, counts="window", updates_done=2)
    assert starts_allowed(view, version=0) == starts_allowed(view, version=2) == 7  # (1 + 1 + 2) * 4 - 9


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
