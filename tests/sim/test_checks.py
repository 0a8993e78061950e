"""Each rule of the swarm sees its invariant broken, and says nothing about a right run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from support.virtual_runs import resolved_example

from tiderl.data.events import Dropped, PromptIssued, RankState, RoleChanged, RunEnded, VersionLoaded, VersionPublished
from tiderl.data.records import MicroBatch, Sequence, TaskKey, Trajectory, TurnSpan
from tiderl.data.turns import EngineStats, Sampling, Turn, TurnResult
from tiderl.runtime.ports import PromptRow, TrajectoryRow, VersionRow
from tiderl.sim.checks.events import EventBook
from tiderl.sim.checks.journal import JournalBook
from tiderl.sim.checks.report import Findings
from tiderl.sim.checks.tasks import TaskBook
from tiderl.sim.checks.training import TrainerBook

SETTINGS = msgspec.structs.replace(
    resolved_example().settings,
    updates=2,
    global_batch_groups=1,
    group_size=2,
    steps_per_batch=1,
    max_staleness=0,
    staleness_counts="oldest_token",
)
"""Two updates of one group of two, nothing stale."""


def book(**changes: Any) -> JournalBook:
    return JournalBook(msgspec.structs.replace(SETTINGS, **changes), Findings())


def trajectory(number: int, prompt_id: int, member: int, versions: tuple[int, ...] = (0, 0), **changes: Any) -> Any:
    """Three tokens of context, then one sampled for each version."""
    sampled = len(versions)
    fields = {
        "id": number,
        "key": TaskKey("train", prompt_id, member),
        "ids": np.zeros(3 + sampled, np.int32),
        "loss_mask": np.array([False] * 3 + [True] * sampled),
        "logprobs": np.array([0.0] * 3 + [-1.0] * sampled, np.float32),
        "versions": np.array([-1] * 3 + list(versions), np.int32),
        "turns": (TurnSpan(3, 3 + sampled, 0.0, "", "stop"),),
        "reward": float(number),
        "success": False,
        "ending": "terminated",
    }
    return Trajectory(**{**fields, **changes})


def issue(journal: JournalBook, prompt_id: int = 0, version: int = 0) -> None:
    first = 2 * prompt_id
    journal.append(
        [
            PromptRow(prompt_id, f"p{prompt_id}", 0, version),
            TrajectoryRow(first, prompt_id, 0, 0, "running"),
            TrajectoryRow(first + 1, prompt_id, 1, 0, "running"),
        ]
    )


def ready(journal: JournalBook, number: int, versions: tuple[int, ...] = (0, 0)) -> None:
    prompt_id, member = divmod(number, 2)
    journal.stored(trajectory(number, prompt_id, member, versions), f"sha{number}")
    journal.append([TrajectoryRow(number, prompt_id, member, 0, "ready", sha256=f"sha{number}")])


def started(**changes: Any) -> JournalBook:
    """Version 0 is published, group 0 is issued and ready."""
    journal = book(**changes)
    journal.append([VersionRow(0, 0)])
    issue(journal)
    ready(journal, 0)
    ready(journal, 1)
    return journal


def finished() -> JournalBook:
    journal = started()
    journal.commit(1, [0, 1])
    journal.append([VersionRow(1, 1)])
    issue(journal, 1, version=1)
    ready(journal, 2, (1, 1))
    ready(journal, 3, (1, 1))
    journal.commit(2, [2, 3])
    return journal


def test_a_right_journal_breaks_no_rule() -> None:
    journal = finished()
    journal.check_whole(finished=True)
    assert journal.findings.violations == []


def test_consumption_at_the_bound_is_seen_and_allowed() -> None:
    journal = started(max_staleness=1)
    issue(journal, 1)
    ready(journal, 2)
    ready(journal, 3)
    journal.commit(1, [0, 1])
    journal.commit(2, [2, 3])
    assert journal.findings.violations == []
    assert journal.findings.seen["consumed at the staleness bound"] == 1


def stale_by_window(journal: JournalBook) -> None:
    journal.settings = msgspec.structs.replace(journal.settings, staleness_counts="window", max_staleness=1, updates=4)
    for prompt_id in (1, 2):
        journal.append([PromptRow(prompt_id, "p", 0, 0)])
        for member in (0, 1):
            number = 2 * prompt_id + member
            journal.append([TrajectoryRow(number, prompt_id, member, 0, "running")])
            ready(journal, number)
    journal.commit(1, [2, 3])
    journal.commit(2, [4, 5])
    journal.commit(3, [0, 1])


BROKEN: list[tuple[str, str, Callable[[JournalBook], None]]] = [
    ("I1", "ended as trained", lambda j: (j.commit(1, [0, 1]), j.append([TrajectoryRow(0, 0, 0, 0, "running")]))),
    ("I1", "without a reason", lambda j: j.append([TrajectoryRow(0, 0, 0, 0, "dropped")])),
    ("I1", "changes its place", lambda j: j.append([TrajectoryRow(0, 0, 1, 0, "running")])),
    ("I1", "lives twice", lambda j: (j.append([TrajectoryRow(7, 0, 0, 1, "running")]), j.check_whole())),
    ("I1", "have no end", lambda j: j.check_whole(finished=True)),
    ("I1", "not the next one", lambda j: issue(j, 5)),
    ("I2", "not the next after", lambda j: j.commit(2, [0, 1])),
    ("I2", "trains a trajectory twice", lambda j: j.commit(1, [0, 0])),
    ("I2", "which are not ready", lambda j: (j.commit(1, [0, 1]), j.commit(2, [0, 1]))),
    ("I2", "before its update is committed", lambda j: j.append([VersionRow(1, 1)])),
    ("I2", "without a payload", lambda j: j.append([TrajectoryRow(0, 0, 0, 0, "ready", sha256="none")])),
    ("I2", "has tokens of version 4", lambda j: ready(j, 0, (0, 4))),
    ("I2", "starts at no version", lambda j: issue(j, 1, version=3)),
    ("I3", "that may start", lambda j: issue(j, 1)),
    (
        "I3",
        "is 1 updates old",
        lambda j: (j.commit(1, [0, 1]), issue(j, 1), ready(j, 2), ready(j, 3), j.commit(2, [2, 3])),
    ),
    ("I3", "is 2 updates old", stale_by_window),
    ("I6", "token versions", lambda j: j.stored(trajectory(0, 0, 0, (1, 0)), "x")),
    ("I8", "columns", lambda j: j.stored(trajectory(0, 0, 0, logprobs=np.zeros(4, np.float32)), "x")),
    ("I8", "columns", lambda j: j.stored(trajectory(0, 0, 0, loss_mask=np.zeros(5, np.bool_)), "x")),
    ("I8", "where nothing was sampled", lambda j: j.stored(trajectory(0, 0, 0, logprobs=np.ones(5, np.float32)), "x")),
    ("I8", "outside its turns", lambda j: j.stored(trajectory(0, 0, 0, turns=(TurnSpan(3, 4, 0.0, "", "stop"),)), "x")),
    ("I9", "not finite", lambda j: j.stored(trajectory(0, 0, 0, reward=float("nan")), "x")),
    ("I9", "has the payload of", lambda j: j.append([TrajectoryRow(0, 0, 0, 0, "ready", sha256="sha1")])),
    ("I9", "consumes groups", lambda j: j.commit(1, [0])),
]


@pytest.mark.parametrize(("invariant", "words", "breaks"), BROKEN, ids=[f"{b[0]} {b[1]}" for b in BROKEN])
def test_a_broken_journal_is_seen(invariant: str, words: str, breaks: Callable[[JournalBook], None]) -> None:
    journal = started()
    assert journal.findings.violations == []
    breaks(journal)
    assert any(found.startswith(invariant) and words in found for found in journal.findings.violations)


def sequence(number: int, *, rewards: tuple[float, ...] = (0.0, 1.0)) -> Sequence:
    t = trajectory(number, 0, number)
    return Sequence(number, 0, number, t.ids, t.loss_mask, t.logprobs, t.versions, t.reward, np.array(rewards))


def trained(trainer: TrainerBook, update: int, *sequences: Sequence) -> None:
    trainer.begins(update)
    for index, found in enumerate(sequences):
        trainer.trains(MicroBatch(update, 0, index, (found,)))
    trainer.finishes(update)


def trainer_of(journal: JournalBook) -> TrainerBook:
    trainer = TrainerBook(journal, journal.findings, {})
    trainer.lineage = ()
    trainer.saves("u0")
    return trainer


def test_a_restored_and_redone_update_is_in_the_weights_once() -> None:
    journal = started()
    trainer = trainer_of(journal)
    trained(trainer, 1, sequence(0), sequence(1))
    trainer.lost()
    trainer.restores("u0")
    journal.commit(1, [0, 1])
    trained(trainer, 1, sequence(0), sequence(1))
    trainer.exports(1)
    assert journal.findings.violations == []


WRONGLY_TRAINED: list[tuple[str, str, Callable[[TrainerBook], None]]] = [
    ("I2", "empty trainer", lambda t: t.lost()),
    ("I2", "holds the updates []", lambda t: t.restores("u0")),
    ("I2", "holds the updates [1, 1]", lambda t: trained(t, 1, sequence(0), sequence(1))),
    ("I9", "is compared with", lambda t: trained(t, 1, sequence(0, rewards=(0.0, 5.0)))),
    ("I9", "not at its place", lambda t: trained(t, 1, sequence(0, rewards=(1.0, 0.0)))),
]


@pytest.mark.parametrize(("invariant", "words", "breaks"), WRONGLY_TRAINED, ids=[b[1] for b in WRONGLY_TRAINED])
def test_wrong_weights_are_seen(invariant: str, words: str, breaks: Callable[[TrainerBook], None]) -> None:
    journal = started()
    trainer = trainer_of(journal)
    trained(trainer, 1, sequence(0), sequence(1))
    journal.commit(1, [0, 1])
    trainer.exports(1)
    assert journal.findings.violations == []
    breaks(trainer)
    trainer.exports(1)
    assert any(found.startswith(invariant) and words in found for found in journal.findings.violations)


def test_an_update_computed_from_other_trajectories_than_the_journal_s_is_seen() -> None:
    journal = started()
    trainer = trainer_of(journal)
    trained(trainer, 1, sequence(0))
    journal.commit(1, [0, 1])
    trainer.exports(1)
    assert "computed from [0], not [0, 1]" in journal.findings.violations[0]


KEY = TaskKey("train", 0, 0)
STATS = EngineStats(version=0, running=1, waiting=0, resident_tokens=10, budget_tokens=10)


def turn(tokens: int = 3, number: int = 0) -> Turn:
    return Turn(KEY, number, np.zeros(tokens, np.int32), Sampling(1.0, 2, ()), remaining_tokens=9)


def result(*versions: int, number: int = 0, logprobs: int | None = None) -> TurnResult:
    count = len(versions)
    shown = count if logprobs is None else logprobs
    return TurnResult(
        KEY, number, np.zeros(count, np.int32), np.zeros(shown, np.float32), np.array(versions, np.int32), "stop"
    )


def tasks(slots: int = 2) -> TaskBook:
    found = TaskBook(Findings(), slots)
    found.opens(KEY)
    return found


def test_a_right_task_breaks_no_rule() -> None:
    found = tasks()
    found.asks(turn())
    found.answers(turn(), result(0, 0), STATS, 0, 0)
    found.asks(turn(6, 1))
    found.answers(turn(6, 1), result(0, 1, number=1), STATS, 0, 1)
    found.closes(KEY)
    found.over()
    assert found.findings.violations == []


WRONG_TASKS: list[tuple[str, str, Callable[[TaskBook], None]]] = [
    ("I1", "lives twice", lambda t: t.opens(KEY)),
    ("I1", "left open", lambda t: t.over()),
    ("I1", "no environment", lambda t: (t.closes(KEY), t.asks(turn()))),
    ("I4", "2 slots", lambda t: (t.opens(TaskKey("train", 1, 0)), t.opens(TaskKey("train", 2, 0)))),
    (
        "I4",
        "resident",
        lambda t: t.answers(turn(), result(0), msgspec.structs.replace(STATS, resident_tokens=11), 0, 0),
    ),
    ("I6", "has versions", lambda t: t.answers(turn(), result(0, 2), STATS, 0, 1)),
    ("I6", "has versions", lambda t: t.answers(turn(), result(0), STATS, 1, 2)),
    ("I8", "shrinks", lambda t: (t.answers(turn(), result(0, 0), STATS, 0, 0), t.asks(turn(4, 1)))),
    ("I8", "lacks", lambda t: t.answers(turn(), result(0, 0, logprobs=1), STATS, 0, 0)),
    ("I8", "more than it may", lambda t: t.answers(turn(), result(0, 0, 0), STATS, 0, 0)),
    ("I8", "the answer of", lambda t: t.answers(turn(), result(0, number=1), STATS, 0, 0)),
]


@pytest.mark.parametrize(("invariant", "words", "breaks"), WRONG_TASKS, ids=[b[1] for b in WRONG_TASKS])
def test_a_wrong_task_is_seen(invariant: str, words: str, breaks: Callable[[TaskBook], None]) -> None:
    found = tasks()
    found.asks(turn())
    breaks(found)
    assert any(what.startswith(invariant) and words in what for what in found.findings.violations)


def events(journal: JournalBook) -> EventBook:
    found = EventBook(journal, journal.findings, {0: (0,)}, [1])
    found.emit(VersionPublished(t_s=0.0, version=0, nbytes=1))
    found.emit(VersionLoaded(t_s=1.0, version=0, replica=0, seconds=1.0))
    found.emit(PromptIssued(t_s=1.0, prompt_id=0, task_id="p0", start_version=0, replica=0))
    found.emit(RankState(t_s=1.0, rank=0, role="rollout", activity="generating"))
    return found


WRONG_EVENTS: list[tuple[str, str, Any]] = [
    ("I1", "was dropped", Dropped(t_s=2.0, trajectory_id=0, prompt_id=0, member=0, reason="lost", tokens=0)),
    ("I1", "not so written", PromptIssued(t_s=2.0, prompt_id=9, task_id="", start_version=0, replica=0)),
    ("I2", "before its update", VersionPublished(t_s=2.0, version=1, nbytes=1)),
    ("I2", "published after", VersionPublished(t_s=2.0, version=0, nbytes=1)),
    ("I2", "before it is published", VersionLoaded(t_s=2.0, version=1, replica=0, seconds=1.0)),
    ("I2", "goes from version", VersionLoaded(t_s=2.0, version=0, replica=0, seconds=1.0)),
    ("I3", "starts on version -1", PromptIssued(t_s=2.0, prompt_id=0, task_id="", start_version=0, replica=3)),
    ("I5", "reports as actor", RankState(t_s=2.0, rank=0, role="actor", activity="training")),
    ("I5", "not actor", RoleChanged(t_s=2.0, rank=0, from_role="actor", to_role="rollout")),
    ("I10", "back in time", RunEnded(t_s=0.5, outcome="done", updates=0)),
]


@pytest.mark.parametrize(("invariant", "words", "event"), WRONG_EVENTS, ids=[b[1] for b in WRONG_EVENTS])
def test_an_event_that_contradicts_the_journal_is_seen(invariant: str, words: str, event: Any) -> None:
    journal = started()
    found = events(journal)
    assert journal.findings.violations == []
    found.emit(event)
    assert any(what.startswith(invariant) and words in what for what in journal.findings.violations)
