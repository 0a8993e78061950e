"""The rules of tasks that wait for room: each sees its invariant broken, in books by hand and in a broken runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.virtual_runs import resolved_example

from tiderl.api.swarm import swarm
from tiderl.data.events import (
    Dropped,
    Event,
    Fault,
    RankBack,
    RankLostEvent,
    RunEnded,
    TaskAdmitted,
    TaskFinished,
    TaskMigrated,
    TaskPaused,
    TaskResumed,
    TurnFinished,
    VersionLoaded,
    VersionPublished,
)
from tiderl.data.pools import PoolBook
from tiderl.data.records import TaskKey
from tiderl.data.turns import EngineCapabilities, Sampling, Turn, TurnResult
from tiderl.runtime.kv import TaskLevel
from tiderl.runtime.ports import PromptRow, VersionRow
from tiderl.runtime.run import Loops, Run
from tiderl.runtime.seats import TaskSeats
from tiderl.schedule.pool import TaskPool, Verdict
from tiderl.schedule.tasks import KvRules
from tiderl.sim.checks.events import EventBook
from tiderl.sim.checks.journal import JournalBook
from tiderl.sim.checks.report import Findings
from tiderl.sim.checks.running import Replica
from tiderl.sim.checks.seats import SeatBook

EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"
WEBSHOP, MEMORY_BOUND = EXAMPLES / "webshop-7b-32xh100.yaml", EXAMPLES / "family-kv.yaml"
PATIENCE_S = 2.0
SETTINGS = msgspec.structs.replace(
    resolved_example().settings, kv_policy="ctb", patience_s=PATIENCE_S, priority="tiers"
)
EMPTY = PoolBook(is_open=True, budget_tokens=100, used_tokens=0, tasks=0, waiting={})


def key(member: int, split: str = "train") -> TaskKey:
    return TaskKey(split, 0, member)


def named(member: int, split: str = "train") -> dict[str, Any]:
    return {"split": split, "prompt_id": 0, "member": member}


class Driver:
    """A driver's seat book, told by hand. Two replicas of 100 tokens, version 3 on replica 0, version 2 on replica 1;
    prompt 0 started at version 1."""

    def __init__(self, *, shares_prompts: bool = False) -> None:
        journal = JournalBook(SETTINGS, Findings())
        journal.versions = {0, 1, 2, 3}
        journal.updates = {1: (), 2: (), 3: ()}
        journal.append([VersionRow(1, 1), PromptRow(0, "p0", 0, 1)])
        events = EventBook(journal, journal.findings, {0: (0,), 1: (1,)}, [2])
        events.loaded = {0: 3, 1: 2}
        self.book = SeatBook(events, SETTINGS)
        self.findings = journal.findings
        self.pools = {0: EMPTY, 1: EMPTY}
        self.book.books = lambda: self.pools
        for replica in self.pools:
            self.book.replicas[replica] = Replica(
                EngineCapabilities(retain=True, offload=False, kv_budget_tokens=100, shares_prompts=shares_prompts)
            )

    def pool(self, replica: int = 0, **changes: Any) -> None:
        self.pools = {**self.pools, replica: dataclasses.replace(self.pools[replica], **changes)}

    def emit(self, *events: Event) -> None:
        for event in events:
            self.book.emit(event)

    def pause(
        self, member: int, t_s: float, *, replica: int = 0, split: str = "train", reason: str = "no_room"
    ) -> None:
        self.pool(replica, waiting={**self.pools[replica].waiting, key(member, split): 60})
        self.emit(TaskPaused(t_s=t_s, replica=replica, reason=reason, **named(member, split)))

    def resume(self, member: int, t_s: float, *, replica: int = 0, split: str = "train") -> None:
        left = {k: tokens for k, tokens in self.pools[replica].waiting.items() if k != key(member, split)}
        self.pool(replica, waiting=left)
        self.emit(TaskResumed(t_s=t_s, replica=replica, **named(member, split)))

    def start(self, member: int, t_s: float, *, tokens: int = 10, number: int = 0, replica: int = 0) -> None:
        ids = np.zeros(tokens, np.int32)
        self.book.asks(replica, Turn(key(member), number, ids, Sampling(1.0, 5, ()), remaining_tokens=9), t_s)

    def end(self, member: int, t_s: float, *, version: int = 3, replica: int = 0) -> None:
        self.book.over(replica, key(member), t_s)
        one = np.zeros(1, np.int32)
        self.book.answered(
            replica, TurnResult(key(member), 0, one, np.zeros(1, np.float32), one + np.int32(version), "stop")
        )

    def migrate(self, member: int, t_s: float, *, to: int = 1) -> None:
        self.emit(TaskMigrated(t_s=t_s, from_replica=1 - to, to_replica=to, reason="no_room", **named(member)))


def admitted(member: int, split: str = "train") -> TaskAdmitted:
    return TaskAdmitted(t_s=0.0, trajectory_id=member, attempt=0, replica=0, **named(member, split))


def finished(member: int, t_s: float = 9.0) -> TaskFinished:
    of_task = {"trajectory_id": member, "attempt": 0, "ending": "terminated", "reward": 0.0, "success": False}
    return TaskFinished(t_s=t_s, turns=1, tokens=9, loss_tokens=1, oldest_version=0, **of_task, **named(member))


def sampled(member: int, t_s: float = 9.0) -> TurnFinished:
    of_turn = {"attempt": 0, "turn": 0, "replica": 0, "context_tokens": 9, "new_tokens": 1, "cached_tokens": 0}
    timed = {"queued_s": 0.0, "prefill_s": 0.0, "decode_s": 0.0}
    return TurnFinished(t_s=t_s, version=3, finish_reason="stop", **of_turn, **timed, **named(member))


def test_right_waits_break_no_rule() -> None:
    d = Driver()
    d.emit(admitted(0), admitted(1), admitted(0, "eval"))
    d.start(0, 0.0, tokens=90)
    d.pool(used_tokens=90)
    d.pause(1, 1.0)
    d.pause(0, 1.0, split="eval")
    d.end(0, 4.0)
    d.pool(used_tokens=0, waiting={key(1): 60})
    d.resume(0, 4.0, split="eval")
    d.resume(1, 4.0)
    d.start(1, 4.0, tokens=50)
    d.end(1, 5.0)
    d.emit(sampled(1, 5.0), finished(1, 5.0), RunEnded(t_s=6.0, outcome="done", updates=3))
    d.book.driver_over()
    assert d.findings.violations == []
    seen = d.findings.seen
    assert (seen["a task paused"], seen["an evaluation paused"], seen["a task waited beyond the patience"]) == (1, 1, 2)


def test_a_wait_ends_with_its_task() -> None:
    d = Driver()
    d.emit(admitted(0), admitted(1), admitted(2))
    for member in range(3):
        d.pause(member, 1.0)
    d.emit(Fault(t_s=2.0, where="task", what="EnvironmentRaised", prompt_id=0, member=0))
    d.emit(Dropped(t_s=2.0, trajectory_id=1, prompt_id=0, member=1, reason="group_dropped", tokens=0))
    d.pool(waiting={})
    d.emit(admitted(0))
    d.pause(0, 3.0)
    d.resume(0, 3.0)
    d.resume(2, 3.0)
    assert d.findings.violations == []
    assert d.findings.seen["a paused task ended"] == 2


def test_two_evaluations_of_one_name_are_not_mistaken_for_one() -> None:
    """The same held-out prompt at two versions, on two replicas: nothing tells their events apart."""
    d = Driver()
    d.emit(admitted(0, "eval"), admitted(0, "eval"))
    for replica in (0, 1):
        d.pool(replica, used_tokens=90)
        d.pause(0, 1.0, split="eval", replica=replica)
    d.pools = {0: EMPTY, 1: EMPTY}
    d.resume(0, 2.0, split="eval", replica=1)
    d.resume(0, 3.0, split="eval", replica=0)
    assert d.findings.violations == []


def test_a_wait_that_another_evaluation_of_its_name_joins_is_not_held_against_others() -> None:
    d = Driver()
    d.emit(admitted(0, "eval"), admitted(1))
    d.pool(used_tokens=90)
    d.pause(0, 1.0, split="eval")
    d.emit(admitted(0, "eval"))
    d.resume(0, 2.0, split="eval")
    d.pause(0, 5.0, split="eval")  # of one of the two, nobody knows which
    d.pool(used_tokens=80)
    d.start(1, 6.0)
    assert d.findings.violations == []


@pytest.mark.parametrize(("resumes_s", "wrong"), [(8.0, False), (8.1, True)])
def test_evaluations_of_one_name_count_among_those_before_who_waits(resumes_s: float, wrong: bool) -> None:
    """A turn of 3 s and one that waits before: 2 + (1 + 1)·3 s are allowed, though nobody tells which of two it is."""
    d = Driver()
    d.emit(admitted(0), admitted(0, "eval"), admitted(0, "eval"), admitted(1))
    d.start(0, 0.0)
    d.pool(used_tokens=90)
    d.pause(0, 0.0, split="eval")
    d.pause(1, 0.0)
    d.end(0, 3.0)
    d.resume(1, resumes_s)
    assert [text.partition(" waited ")[0] for text in d.findings.violations] == (
        ["I4 at 0 s: ('train', 0, 1)"] if wrong else []
    )


def test_a_migrated_task_may_have_waited_for_the_turns_of_both_replicas() -> None:
    """A turn of 3 s on its own: 2 + 3 s are allowed, whatever ran where it goes."""
    d = Driver()
    d.emit(admitted(0), admitted(1))
    d.start(0, 0.0)
    d.pause(1, 0.0)
    d.end(0, 3.0)
    d.book.events.loaded[1] = 3
    d.pools = {0: EMPTY, 1: dataclasses.replace(EMPTY, waiting={key(1): 60})}
    d.migrate(1, 5.0)
    d.resume(1, 5.0, replica=1)
    assert d.findings.violations == []


def test_situations_of_waits_are_seen() -> None:
    d = Driver()
    d.emit(admitted(0), admitted(1))
    d.start(1, 0.0)
    d.end(1, 1.0)
    d.pause(0, 1.0)
    d.emit(VersionPublished(t_s=1.0, version=3, nbytes=1))
    d.emit(VersionLoaded(t_s=1.0, version=3, replica=0, seconds=1.0))
    d.emit(RankLostEvent(t_s=2.0, rank=0, reason="died", tasks=2))
    d.emit(RankBack(t_s=50.0, rank=0))
    d.resume(0, 50.0)  # its rank was away: the bound of the wait does not count
    d.pause(0, 51.0, reason="lost")
    d.pool(used_tokens=101)
    d.emit(admitted(3))
    assert d.findings.violations == []
    assert set(d.findings.seen) == {
        "a task paused",
        "a task waited beyond the patience",
        "a task paused while its rank is away",
        "a rank lost while a task is paused",
        "a rank lost while a task holds KV",
        "weights loaded while a task is paused",
        "turns outgrow the pool",
    }


def waits_too_long(d: Driver) -> None:
    """One turn of 3 s ran and nobody was before it: at most 2 + 3 s, not 5.5."""
    d.start(0, 0.0)
    d.pause(1, 1.0)
    d.end(0, 3.0)
    d.resume(1, 6.5)


def waits_behind_one(d: Driver) -> None:
    """With one that waited before it, at most 2 + 2 · 3 s, not 8.5."""
    d.start(0, 0.0)
    d.pause(1, 1.0)
    d.pause(2, 1.0)
    d.end(0, 3.0)
    d.resume(1, 3.0)
    d.resume(2, 9.5)


def overtakes(d: Driver) -> None:
    d.pause(1, 1.0)
    d.pause(2, 2.0)
    d.resume(2, 4.0)
    d.start(2, 4.0)


def outgrown_before(d: Driver) -> None:
    d.pool(used_tokens=101)
    d.emit(sampled(0, 1.0))
    d.start(1, 2.0)


def older_weights(d: Driver) -> None:
    d.start(0, 0.0)
    d.end(0, 1.0, version=3)
    d.pause(0, 1.0)
    d.migrate(0, 2.0)


BROKEN: list[tuple[str, str, Callable[[Driver], None]]] = [
    ("I4", "is paused twice", lambda d: (d.pause(0, 1.0), d.pause(0, 2.0))),
    ("I4", "is resumed, and was not paused", lambda d: (d.pause(0, 1.0), d.resume(0, 2.0), d.resume(0, 2.0))),
    ("I4", "is resumed on 1", lambda d: (d.pause(0, 1.0), d.resume(0, 2.0, replica=1))),
    ("I4", "starts, which is paused", lambda d: (d.pause(0, 1.0), d.start(0, 1.0))),
    ("I4", "sampled a turn while it is paused", lambda d: (d.pause(0, 1.0), d.emit(sampled(0)))),
    ("I4", "finished while it is paused", lambda d: (d.pause(0, 1.0), d.emit(finished(0)))),
    ("I4", "wait for room", lambda d: (d.pause(0, 1.0), d.emit(RunEnded(t_s=2.0, outcome="done", updates=3)))),
    ("I4", "waited 5.5 s for room, more than 5 s", waits_too_long),
    ("I4", "waited 8.5 s for room, more than 8 s", waits_behind_one),
    ("I4", "starts before ('train', 0, 1)", overtakes),
    ("I4", "with 101 of 100 tokens charged", outgrown_before),
    ("I4", "turns with 101 tokens", lambda d: (d.start(0, 1.0, tokens=51), d.start(1, 1.0, tokens=50))),
    ("I4", "migrates, and was not paused", lambda d: d.migrate(0, 1.0, to=0)),
    ("I6", "with version 2, and needs 3", older_weights),
    (
        "I6",
        "with version -1, and needs 1",
        lambda d: (d.book.events.loaded.clear(), d.pause(0, 1.0), d.migrate(0, 1.0)),
    ),
    ("I4", "an evaluation waits on 0", lambda d: (d.pool(used_tokens=30), d.pause(0, 1.0, split="eval"))),
    ("I4", "is left with", lambda d: (d.pool(used_tokens=1), d.book.driver_over())),
    ("I4", "is left with", lambda d: (d.pool(tasks=1), d.book.driver_over())),
]


@pytest.mark.parametrize(("invariant", "words", "breaks"), BROKEN, ids=[b[1] for b in BROKEN])
def test_a_wrong_wait_is_seen(invariant: str, words: str, breaks: Callable[[Driver], None]) -> None:
    d = Driver()
    d.emit(*(admitted(member) for member in range(3)), admitted(0, "eval"))
    assert d.findings.violations == []
    breaks(d)
    assert any(found.startswith(invariant) and words in found for found in d.findings.violations)


def test_a_prompt_in_common_counts_once() -> None:
    """Two turns of 60 tokens, the first 30 of which are the group's: 90 of 100."""
    for shared, fits in ((True, True), (False, False)):
        d = Driver(shares_prompts=shared)
        for member in (0, 1):
            d.start(member, 0.0, tokens=30)
            d.end(member, 0.0)
        for member in (0, 1):
            d.start(member, 1.0, tokens=60, number=1)
        assert (d.findings.violations == []) is fits


@pytest.mark.parametrize(("common_tokens", "fits"), [(9, False), (10, True), (99, True)])
def test_what_groups_may_have_in_common_counts_once(common_tokens: int, fits: bool) -> None:
    """Two prompts of 55 tokens, 10 of which may be the same: 100 of 100."""
    d = Driver(shares_prompts=True)
    d.book.replicas[0].common_tokens = common_tokens
    for prompt in range(2):
        turn = Turn(TaskKey("train", prompt, 0), 0, np.zeros(55, np.int32), Sampling(1.0, 5, ()), remaining_tokens=9)
        d.book.asks(0, turn, 0.0)
    assert (d.findings.violations == []) is fits


# --- broken runtimes


class ByTask(Run):
    """A run whose seats can be broken before they are used."""

    def _build(self, *arguments: object) -> Loops:
        loops = super()._build(*arguments)  # type: ignore[arg-type]
        assert isinstance(loops.rollout.kv, TaskLevel)
        self.breaks(loops.rollout.kv._seats)
        return loops

    def breaks(self, seats: TaskSeats) -> None:
        raise NotImplementedError


class ForgetsToResume(ByTask):
    """Whoever waits goes on waiting."""

    def breaks(self, seats: TaskSeats) -> None:
        apply = seats.apply
        seats.apply = lambda replica, verdict: apply(replica, Verdict(departures=verdict.departures))  # type: ignore[method-assign]


class EmitsOtherwise(ByTask):
    def breaks(self, seats: TaskSeats) -> None:
        emit = seats._emit

        def emitted(event: Event) -> None:
            for _ in range(self.times(event)):
                emit(event)

        seats._emit = emitted

    def times(self, event: Event) -> int:
        raise NotImplementedError


class SaysNoResume(EmitsOtherwise):
    def times(self, event: Event) -> int:
        return 0 if isinstance(event, TaskResumed) else 1


class SaysResumeTwice(EmitsOtherwise):
    def times(self, event: Event) -> int:
        return 2 if isinstance(event, TaskResumed) else 1


class NeverFrees(ByTask):
    """What a task was charged stays charged."""

    def breaks(self, seats: TaskSeats) -> None:
        for pool in seats.pools.values():
            pool.leave = lambda key, finished: None  # type: ignore[method-assign]


class MovesAnywhere(ByTask):
    """Moves whoever waits to the next replica, whatever weights it has."""

    def breaks(self, seats: TaskSeats) -> None:
        def next_one(pool: TaskPool, key: TaskKey, replica: int, candidates: list[int]) -> int | None:
            others = [other for other in seats.pools if other != replica and seats.pools[other].open]
            return min(others, key=lambda other: (other < replica, other), default=None)

        seats._roomy = next_one  # type: ignore[method-assign]


class WithoutPatience(Run):
    """Whoever is worth most goes first, for ever."""

    def _kv_rules(self) -> KvRules | None:
        rules = super()._kv_rules()
        return None if rules is None else dataclasses.replace(rules, patience_s=1e6)


class TwiceThePool(ByTask):
    """Believes that every replica has twice the room."""

    def breaks(self, seats: TaskSeats) -> None:
        for pool in seats.pools.values():
            pool._charges.budget_tokens *= 2


class LeavesEvaluations(ByTask):
    """Gives no room that comes free while an evaluation waits."""

    def breaks(self, seats: TaskSeats) -> None:
        for replica, pool in seats.pools.items():
            pump = pool.pump

            def pumped(now_s: float, replica: int = replica, pump: Any = pump) -> Verdict:
                waits = any(key.split == "eval" for key in seats._waiting[replica])
                return Verdict() if waits else pump(now_s)

            pool.pump = pumped  # type: ignore[method-assign]


MUTANTS = [
    (ForgetsToResume, "nothing can happen any more", WEBSHOP, range(30)),
    (SaysNoResume, "while it is paused", WEBSHOP, range(30)),
    (SaysResumeTwice, "is resumed, and was not paused", WEBSHOP, range(30)),
    (NeverFrees, "is left with", WEBSHOP, range(30)),
    (MovesAnywhere, "I6", MEMORY_BOUND, range(13, 73)),
    (WithoutPatience, "which waits since", MEMORY_BOUND, range(15, 45)),
    (TwiceThePool, "tokens run in", WEBSHOP, range(30)),
    (LeavesEvaluations, "an evaluation waits on", WEBSHOP, range(60)),
]
"""Runtime, what tells of it, in which file, among which seeds."""


@pytest.mark.parametrize(("mutant", "words", "file", "seeds"), MUTANTS, ids=[m[0].__name__ for m in MUTANTS])
def test_a_runtime_that_keeps_no_seats_right_is_found(mutant: type[Run], words: str, file: Path, seeds: range) -> None:
    for seed in seeds:
        (report,) = swarm(file, [seed], ["rollout.kv_policy=ctb"], make_run=mutant).seeds
        if any(words in what for what in report.violations):
            return
    pytest.fail(f"{mutant.__name__} is not found in {seeds}")
