"""What the runtime counts as it goes against the slow way: a look at everything."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiderl.data.records import Prompt, TaskKey, Trajectory
from tiderl.data.settings import StalenessCounts
from tiderl.runtime.buffer import Buffer
from tiderl.runtime.loads import Loads
from tiderl.schedule.signals import ReadinessSignals
from tiderl.schedule.staleness import (
    ReadyView,
    StartView,
    choose_batch,
    choose_more,
    choose_oldest_ready,
    hall_violation,
    starts_allowed,
)
from tiderl.schedule.tasks import ReplicaView

CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("task"), st.integers(0, 5), st.sampled_from([1, 1, -1])),
        st.tuples(st.just("version"), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 2))),
    ),
    max_size=120,
)


@given(CHANGES)
def test_the_least_loaded_replica_of_each_version_is_found(changes: list[tuple[str, int, int | None]]) -> None:
    loads, tasks, versions = Loads(range(6)), dict.fromkeys(range(6), 0), {}
    for what, replica, value in changes:
        if what == "task":
            change = value if tasks[replica] + value >= 0 else 1
            tasks[replica] += change
            loads.add(replica, change)
        else:
            versions[replica] = value
            loads.usable(replica, value)
        best: dict[int, ReplicaView] = {}
        for number in sorted(tasks):
            version = versions.get(number)
            if version is not None and (version not in best or tasks[number] < best[version].tasks):
                best[version] = ReplicaView(number, version, tasks[number])
        assert sorted(loads.least(), key=lambda view: view.version) == [best[version] for version in sorted(best)]
        assert loads.total == sum(tasks.values())


def trajectory(number: int, prompt_id: int) -> Trajectory:
    one = np.zeros(1, np.int32)
    return Trajectory(
        number, TaskKey("train", prompt_id, 0), one, one > -1, one.astype(np.float32), one, (), 0.0, False, "terminated"
    )


@given(
    st.sampled_from(["oldest_token", "window"]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.lists(st.integers(0, 99), max_size=80),
)
def test_the_buffer_counts_what_a_look_at_all_groups_would(
    counts: StalenessCounts, batch: int, eta: int, choices: list[int]
) -> None:
    buffer = Buffer(batch, eta, "earliest_deadline", ReadinessSignals(64), counts)
    for step, choice in enumerate(choices):
        unready = [group for group in buffer.groups.values() if not group.ready]
        view = StartView(buffer.started_groups, 10**6, batch, eta, counts, buffer.updates_done)
        if choice % 4 < 2 and starts_allowed(view, buffer.updates_done):
            buffer.start(Prompt("p"), buffer.updates_done, 1, replica=0)
        elif choice % 4 == 2 and unready:
            group = unready[choice % len(unready)]
            buffer.fill(group, group.members[0], trajectory(step, group.prompt_id), "x", float(step))
        elif choice % 4 == 3:
            buffer.take(buffer.more())
            if len(buffer.taken) == batch:
                buffer.consume([buffer.groups[prompt_id] for prompt_id in buffer.taken])
            elif unready and choice > 90:
                buffer.drop(unready[0])
        more, whole = looked_at(buffer)
        assert [group.prompt_id for group in buffer.more()] == more
        if not buffer.taken:
            assert [group.prompt_id for group in buffer.choose()] == whole


def looked_at(buffer: Buffer) -> tuple[list[int], list[int]]:
    """What may be taken now, and the next whole batch, by the rules of `schedule` over every group."""
    batch, eta = buffer.batch_groups, buffer.max_staleness
    if buffer.counts == "window":
        ready = [
            ReadyView(g.ready_update, g.ready_s, g.prompt_id) for g in buffer.groups.values() if g.ready_s is not None
        ]
        more = list(choose_oldest_ready(ready, buffer.taken, batch))
        return more, more if len(more) == batch else []
    views = buffer.views()
    assert hall_violation(views, buffer.updates_done, batch, eta, buffer.taken) is None
    more = list(choose_more(views, buffer.taken, buffer.updates_done, batch, eta))
    return more, list(choose_batch(views, buffer.updates_done, batch, eta) or ())
