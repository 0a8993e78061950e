"""Each rule of the swarm sees its invariant broken, and says nothing about a right run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest
from support.virtual_runs import resolved_example

from tiderl.data.errors import EnvironmentRaised
from tiderl.data.events import Dropped, PromptIssued, RankState, RoleChanged, RunEnded, VersionLoaded, VersionPublished
from tiderl.data.forks import Fork
from tiderl.data.records import Action, MicroBatch, Observation, Sequence, Step, TaskKey, Trajectory, TurnSpan
from tiderl.data.turns import EngineStats, Sampling, Turn, TurnResult
from tiderl.runtime.ports import PromptRow, TrajectoryRow, VersionRow
from tiderl.sim.checks.events import EventBook
from tiderl.sim.checks.journal import JournalBook
from tiderl.sim.checks.report import Findings
from tiderl.sim.checks.tasks import TaskBook, WatchedHandle
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


def older_than_its_group(journal: JournalBook) -> None:
    journal.commit(1, [0, 1])
    journal.append([VersionRow(1, 1)])
    issue(journal, 1, version=1)
    ready(journal, 2, (0, 1))


ONCE = Fork(3, ((1, 2),))


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
    ("I3", "its group starts at 1", older_than_its_group),
    ("I6", "token versions", lambda j: j.stored(trajectory(0, 0, 0, (1, 0)), "x")),
    ("I8", "columns", lambda j: j.stored(trajectory(0, 0, 0, logprobs=np.zeros(4, np.float32)), "x")),
    ("I8", "columns", lambda j: j.stored(trajectory(0, 0, 0, loss_mask=np.zeros(5, np.bool_)), "x")),
    ("I8", "where nothing was sampled", lambda j: j.stored(trajectory(0, 0, 0, logprobs=np.ones(5, np.float32)), "x")),
    ("I8", "outside its turns", lambda j: j.stored(trajectory(0, 0, 0, turns=(TurnSpan(3, 4, 0.0, "", "stop"),)), "x")),
    ("I8", "out of place", lambda j: j.stored(trajectory(0, 0, 0, forks=(Fork(5, ((0, 1),)),)), "x")),
    ("I8", "out of place", lambda j: j.stored(trajectory(0, 0, 0, forks=(Fork(2, ((1, 3),)),)), "x")),
    ("I8", "out of place", lambda j: j.stored(trajectory(0, 0, 0, forks=(Fork(4, ()),)), "x")),
    ("I8", "what was sampled", lambda j: j.stored(trajectory(0, 0, 0, forks=(Fork(4, ((2, 4),)),)), "x")),
    ("I8", "had left before", lambda j: j.stored(trajectory(0, 0, 0, forks=(ONCE, Fork(4, ((0, 2),)))), "x")),
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


def part_of(number: int, *bearing: int) -> Sequence:
    """The sequence with loss for these of its two sampled tokens only."""
    whole = sequence(number)
    return msgspec.structs.replace(whole, loss_mask=np.isin(np.arange(5), [3 + at for at in bearing]))


def test_a_trajectory_in_several_sequences_is_in_the_weights_once() -> None:
    journal = started()
    trainer = trainer_of(journal)
    trained(trainer, 1, part_of(0, 0), part_of(0, 1), sequence(1))
    journal.commit(1, [0, 1])
    trainer.exports(1)
    assert journal.findings.violations == []


def test_the_tokens_of_an_update_are_those_of_all_sequences() -> None:
    journal = started()
    # Of five tokens, one leaves before the last is sampled: 4 and then 4.
    early = TurnSpan(3, 4, 0.0, "", "stop"), TurnSpan(5, 6, 0.0, "", "stop")
    mask = np.array([False, False, False, True, False, True])
    logprobs, versions = np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
    forked = msgspec.structs.replace(
        trajectory(0, 0, 0),
        ids=np.zeros(6, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        turns=early,
        forks=(Fork(4, ((1, 2),)),),
    )
    journal.stored(forked, "x")
    assert journal.findings.violations == []
    assert journal.payloads["x"].tokens == 4 + 5
    journal.stored(trajectory(0, 0, 0), "y")
    assert journal.payloads["y"].tokens == 5


WRONGLY_TRAINED: list[tuple[str, str, Callable[[TrainerBook], None]]] = [
    ("I2", "empty trainer", lambda t: t.lost()),
    ("I2", "holds the updates []", lambda t: t.restores("u0")),
    ("I2", "holds the updates [1, 1]", lambda t: trained(t, 1, sequence(0), sequence(1))),
    ("I9", "is compared with", lambda t: trained(t, 1, sequence(0, rewards=(0.0, 5.0)))),
    ("I8", "bore loss for 3 tokens, it has 2", lambda t: trained(t, 1, sequence(0), part_of(0, 1), sequence(1))),
    ("I8", "bore loss for 1 tokens, it has 2", lambda t: trained(t, 1, part_of(0, 1), sequence(1))),
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


def test_a_trajectory_that_is_trained_twice_is_seen() -> None:
    journal = started()
    trainer = trainer_of(journal)
    trained(trainer, 1, sequence(0), sequence(1), sequence(0))
    journal.commit(1, [0, 1])
    trainer.exports(1)
    assert "computed from [0, 0, 1], not [0, 1]" in journal.findings.violations[0]


KEY = TaskKey("train", 0, 0)
STATS = EngineStats(version=0, running=1, waiting=0, resident_tokens=10, budget_tokens=10)


def turn(tokens: int = 3, number: int = 0, rewrites: tuple[int, ...] = ()) -> Turn:
    return Turn(KEY, number, np.zeros(tokens, np.int32), Sampling(1.0, 2, ()), remaining_tokens=9, rewrites=rewrites)


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


def test_a_context_may_shrink_where_it_says_so() -> None:
    found = tasks()
    found.asks(turn())
    found.answers(turn(), result(0, 0), STATS, 0, 0)
    found.asks(turn(4, 1, (2,)))
    found.answers(turn(4, 1, (2,)), result(0, number=1), STATS, 0, 0)
    found.asks(turn(6, 2, (2,)))
    assert found.findings.violations == []
    assert found.findings.seen["a context forks"] == 1


def shrinks(t: TaskBook, *later: Turn) -> None:
    t.answers(turn(), result(0, 0), STATS, 0, 0)
    for one in later:
        t.asks(one)
        t.answers(one, result(0, number=one.turn), STATS, 0, 0)


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
    ("I8", "shrinks", lambda t: shrinks(t, turn(4, 1, (5,)))),  # less than what it says it begins with
    ("I8", "shrinks", lambda t: shrinks(t, turn(8, 1, (6,)))),  # more than there was
    ("I8", "shrinks", lambda t: shrinks(t, turn(4, 1, (2,)), turn(4, 2, (2,)))),  # the second time it does not say so
    ("I8", "shrinks", lambda t: shrinks(t, turn(4, 1, (2,)), turn(9, 2))),  # a fork is never undone
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


class World:
    """A handle whose calls take one pass of the loop, and which raises in `fails_in`."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in

    async def reset(self) -> Observation:
        await asyncio.sleep(0)
        return Observation(("start",))

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(0)
        return Step(Observation(("on",)))

    async def score(self, trajectory: Trajectory) -> float | None:
        return None

    async def pause(self) -> None:
        await self._at_once("pause")

    async def resume(self) -> None:
        await self._at_once("resume")

    async def close(self) -> None:
        pass

    async def _at_once(self, call: str) -> None:
        await asyncio.sleep(0)
        if call == self.fails_in:
            raise EnvironmentRaised("on purpose", where=str(KEY))


def watched(scenario: Callable[[WatchedHandle], Coroutine[Any, Any, object]], world: World | None = None) -> Findings:
    """What is found where the scenario has a handle that was reset and stepped."""
    found = tasks()

    async def main() -> None:
        handle = WatchedHandle(world or World(), KEY, found)
        await handle.reset()
        await handle.step(Action("go"))
        with contextlib.suppress(EnvironmentRaised):
            await scenario(handle)
        await handle.close()

    asyncio.run(main())
    found.over()
    return found.findings


async def in_turn(*calls: Coroutine[Any, Any, object]) -> None:
    for call in calls:
        await call


def go(handle: WatchedHandle) -> Coroutine[Any, Any, object]:
    return handle.step(Action("go"))


RIGHT_PAUSES: list[tuple[str, Callable[[WatchedHandle], Coroutine[Any, Any, object]], World]] = [
    ("pairs", lambda h: in_turn(h.pause(), h.resume(), go(h), h.pause(), h.resume(), go(h)), World()),
    ("ends while paused", lambda h: in_turn(h.pause()), World()),
    ("pause raises", lambda h: in_turn(h.pause()), World("pause")),
    ("resume raises", lambda h: in_turn(h.pause(), h.resume()), World("resume")),
]


@pytest.mark.parametrize(("scenario", "world"), [p[1:] for p in RIGHT_PAUSES], ids=[p[0] for p in RIGHT_PAUSES])
def test_right_pauses_break_no_rule(scenario: Callable[[WatchedHandle], Any], world: World) -> None:
    findings = watched(scenario, world)
    assert findings.violations == []
    assert findings.seen["an environment pauses"] >= 1


def test_a_task_that_ends_while_it_is_paused_is_seen() -> None:
    assert watched(lambda h: h.pause()).seen["an environment closed while it is paused"] == 1
    assert not watched(lambda h: in_turn(h.pause(), h.resume())).seen["an environment closed while it is paused"]


WRONG_PAUSES: list[tuple[str, Callable[[WatchedHandle], Coroutine[Any, Any, object]]]] = [
    ("pause of train/0.0#0, which is paused", lambda h: in_turn(h.pause(), h.pause())),
    ("resume of train/0.0#0, which is not paused", lambda h: h.resume()),
    ("resume of train/0.0#0, which is not paused", lambda h: in_turn(h.pause(), h.resume(), h.resume())),
    ("step of train/0.0#0, which is paused", lambda h: in_turn(h.pause(), go(h))),
    ("pause of train/0.0#0 while its step is running", lambda h: asyncio.gather(go(h), h.pause())),
    ("step of train/0.0#0 while its pause is running", lambda h: asyncio.gather(h.pause(), go(h))),
    ("resume of train/0.0#0 while its pause is running", lambda h: asyncio.gather(h.pause(), h.resume())),
]


@pytest.mark.parametrize(("words", "scenario"), WRONG_PAUSES, ids=[f"{n} {p[0]}" for n, p in enumerate(WRONG_PAUSES)])
def test_a_wrong_pause_is_seen(words: str, scenario: Callable[[WatchedHandle], Any]) -> None:
    (first, *_) = watched(scenario).violations
    assert first.startswith("I1") and words in first


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
