"""Figures of KV and of pauses from hand-made events, with the arithmetic written out."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from tiderl.data.events import (
    Dropped,
    EvalFinished,
    Event,
    KvRetention,
    RunEnded,
    RunStarted,
    TaskAdmitted,
    TaskFinished,
    TaskMigrated,
    TaskPaused,
    TaskResumed,
    TurnFinished,
    decode_event,
    encode_event,
)
from tiderl.observe.kv import KvBook

OF_TASKS = (
    *("kv_departures", "kv_retention_ratio", "tasks_paused", "tasks_migrated", "paused_s"),
    *("kv_priority", "kv_priority_weights"),
)


def started(t_s: float = 0.0, kv_policy: str = "ctb", **changes: Any) -> RunStarted:
    return RunStarted(
        t_s=t_s, strategy="areal", seed=0, ranks=2, replicas=1, updates=1, global_batch_groups=1, group_size=2,
        max_staleness=1, staleness_counts="oldest_token", kv_policy=kv_policy,
        **{"priority": "tiers" if kv_policy == "ctb" else "", **changes},
    )  # fmt: skip


def turn(
    number: int, context: int, new: int, cached: int, *, member: int = 0, attempt: int = 0, split: str = "train"
) -> TurnFinished:
    return TurnFinished(
        t_s=1.0, split=split, prompt_id=0, member=member, attempt=attempt, turn=number, replica=0,
        context_tokens=context, new_tokens=new, cached_tokens=cached, version=0, finish_reason="stop", queued_s=0.0,
        prefill_s=0.0, decode_s=0.0,
    )  # fmt: skip


def paused(t_s: float, member: int = 0, *, split: str = "train") -> TaskPaused:
    return TaskPaused(t_s=t_s, split=split, prompt_id=0, member=member, replica=0, reason="no_room")


def resumed(t_s: float, member: int = 0, *, split: str = "train") -> TaskResumed:
    return TaskResumed(t_s=t_s, split=split, prompt_id=0, member=member, replica=0)


def migrated(t_s: float, member: int = 0) -> TaskMigrated:
    return TaskMigrated(
        t_s=t_s, split="train", prompt_id=0, member=member, from_replica=0, to_replica=1, reason="no_room"
    )


def admitted(t_s: float, *, attempt: int, split: str = "train") -> TaskAdmitted:
    return TaskAdmitted(
        t_s=t_s, split=split, trajectory_id=0, prompt_id=0, member=0, attempt=attempt, replica=0
    )  # fmt: skip


def finished(t_s: float, *, split: str = "train") -> TaskFinished:
    return TaskFinished(
        t_s=t_s, split=split, trajectory_id=0, prompt_id=0, member=0, attempt=0, ending="terminated", reward=0.0,
        success=False, turns=1, tokens=9, loss_tokens=3, oldest_version=0,
    )  # fmt: skip


def dropped(t_s: float) -> Dropped:
    return Dropped(t_s=t_s, trajectory_id=0, prompt_id=0, member=0, reason="lost", tokens=0)


def evaluated(t_s: float) -> EvalFinished:
    return EvalFinished(
        t_s=t_s, version=0, prompts=1, successes=0, failed=0, reward_mean=0.0, turns_mean=0.0, seconds=1.0
    )


def ended(t_s: float) -> RunEnded:
    return RunEnded(t_s=t_s, outcome="done", updates=1)


def retention(choice: str, cost_s: float, clairvoyant_s: float) -> KvRetention:
    return KvRetention(
        t_s=1.0, split="train", prompt_id=0, member=0, replica=0, choice=choice, tokens=10, waited_s=1.0, held_s=1.0,
        hold_s=1.0, token_second=1.0, back_token_s=1.0, cost_s=cost_s, clairvoyant_s=clairvoyant_s,
    )  # fmt: skip


def figures(*events: Event) -> dict[str, Any]:
    book = KvBook()
    for event in events:
        book.observe(event)
    return book.figures()


@pytest.mark.parametrize("kv_policy", ["lru", "ctb"])
def test_computed_again_is_what_an_earlier_turn_had_computed_and_is_not_cached(kv_policy: str) -> None:
    shown = figures(
        started(kv_policy=kv_policy),
        turn(0, 20, 5, 8),  # 12 computed for the first time; then 24 are: the last of the 5 has no KV
        turn(1, 30, 4, 24),  # 6 computed, all of them new
        turn(2, 40, 3, 10),  # 30 computed; 33 were computed before, so 23 of them again
        turn(2, 43, 1, 0),  # the same turn goes on: 43 computed, 42 again
        turn(0, 20, 5, 0, member=1),  # another task
    )
    assert shown["kv_reprefilled_tokens"] == 23 + 42
    assert shown["kv_hit_fraction"] == (8 + 24 + 10) / (20 + 30 + 40 + 43 + 20)


@pytest.mark.parametrize("between", [(), (dropped(2.0),), (started(2.0),)], ids=["retry", "drop", "resumed run"])
def test_a_new_attempt_had_computed_nothing(between: tuple[Event, ...]) -> None:
    shown = figures(started(), turn(0, 20, 5, 0), *between, turn(0, 20, 5, 0, attempt=1), turn(1, 30, 5, 4, attempt=1))
    assert shown["kv_reprefilled_tokens"] == 20  # of 24


def test_evaluation_computes_again_without_being_counted() -> None:
    shown = figures(started(), turn(0, 20, 5, 0, split="eval"), turn(1, 30, 5, 0, split="eval"))
    assert (shown["kv_reprefilled_tokens"], shown["kv_hit_fraction"]) == (0, None)


def test_under_lru_what_is_of_tasks_has_no_meaning() -> None:
    shown = figures(started(kv_policy="lru"), turn(0, 20, 5, 0))
    assert shown == {
        "kv_policy": "lru",
        "kv_hit_fraction": 0.0,
        "kv_reprefilled_tokens": 0,
        **dict.fromkeys(OF_TASKS),
    }


def test_a_pause_lasts_until_its_task_resumes_whoever_else_does() -> None:
    shown = figures(
        started(),
        paused(1.0),
        paused(2.0, member=1),
        paused(2.5, split="eval"),  # the held-out prompt of the same number
        resumed(4.0),
        resumed(4.5, split="eval"),
        resumed(7.0, member=1),
        paused(8.0),
        resumed(9.0),
    )
    assert shown["tasks_paused"] == 4
    assert shown["paused_s"] == (4.0 - 1.0) + (7.0 - 2.0) + (4.5 - 2.5) + (9.0 - 8.0)


@pytest.mark.parametrize(
    "end",
    [finished(5.0), dropped(5.0), admitted(5.0, attempt=1), started(5.0), ended(5.0)],
    ids=lambda event: type(event).__name__,
)
def test_a_pause_ends_with_its_attempt(end: Event) -> None:
    assert figures(started(), paused(2.0), end, resumed(9.0))["paused_s"] == 5.0 - 2.0


def test_a_held_out_task_that_is_given_up_is_paused_until_its_evaluation_ends() -> None:
    events = [started(), paused(2.0, split="eval"), paused(3.0), evaluated(5.0), resumed(9.0)]
    assert figures(*events)["paused_s"] == (5.0 - 2.0) + (9.0 - 3.0)


def test_pauses_that_last_count_so_far_and_are_the_tasks_paused_now() -> None:
    book = KvBook()
    for event in [started(), paused(2.0), paused(3.0, member=1), turn(0, 9, 1, 0, member=2)]:
        book.observe(event)
    assert (book.paused_now, book.figures()["paused_s"]) == (2, 1.0)
    book.observe(resumed(10.0))
    assert (book.paused_now, book.figures()["paused_s"]) == (1, 8.0 + 7.0)


def test_a_task_that_migrates_stays_paused() -> None:
    shown = figures(started(), paused(1.0), migrated(3.0), resumed(6.0), migrated(7.0))
    assert (shown["tasks_migrated"], shown["tasks_paused"], shown["paused_s"]) == (2, 1, 5.0)


def test_retention_is_set_against_a_clairvoyant_over_all_waits() -> None:
    waits = [retention("keep", 1.0, 1.0), retention("drop", 6.0, 4.0), retention("offload", 3.0, 3.0)]
    shown = figures(started(), *waits)
    assert shown["kv_departures"] == 2
    assert shown["kv_retention_ratio"] == (1.0 + 6.0 + 3.0) / (1.0 + 4.0 + 3.0)
    free = figures(started(), retention("drop", 6.0, 0.0))
    assert (free["kv_departures"], free["kv_retention_ratio"]) == (1, None)
    assert figures(started())["kv_retention_ratio"] is None


def test_a_wait_that_was_worth_holding_for_ever_is_read_again() -> None:
    for_ever = msgspec.structs.replace(retention("keep", 0.5, 0.25), hold_s=math.inf)
    read = decode_event(encode_event(for_ever))
    assert isinstance(read, KvRetention) and read.hold_s is None
    assert encode_event(read) == encode_event(for_ever)
    assert figures(started(), read)["kv_retention_ratio"] == 2.0


def test_the_rule_is_told_and_its_weights_where_it_weighs() -> None:
    weights = {"evaluation": 8.0, "group": 9.0, "active": 2.0, "context": 1.0}
    weighing = figures(started(priority="weighted", priority_weights=weights))
    assert (weighing["kv_priority"], weighing["kv_priority_weights"]) == ("weighted", weights)
    assert (figures(started())["kv_priority"], figures(started())["kv_priority_weights"]) == ("tiers", None)


def test_events_from_before_there_was_a_policy_say_none() -> None:
    line = json.loads(encode_event(started()))
    for later in ("kv_policy", "priority", "priority_weights"):
        del line[later]
    shown = figures(decode_event(json.dumps(line).encode()), turn(0, 20, 5, 5))
    assert (shown["kv_policy"], shown["kv_hit_fraction"], shown["tasks_paused"]) == (None, 0.25, None)
