"""The rules of tasks that wait for room under `ctb`: I3, I4, I6, in pairs, in order, and not for ever.

Reads events, the turns that are asked of engines and what the pools say of themselves, never how they decide. Under
`lru` nobody waits, and nothing is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiderl.data.events import (
    Dropped,
    Event,
    Fault,
    KvRetention,
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
)
from tiderl.data.pools import PoolBook
from tiderl.data.records import TaskKey
from tiderl.data.settings import RunSettings
from tiderl.data.turns import Turn, TurnResult
from tiderl.sim.checks.events import EventBook
from tiderl.sim.checks.running import Replica

Place = tuple[str, int, int]
"""Split, prompt and member: what a pause names."""
SAME_MOMENT_S = 1e-9
ENDS_TASKS = ("task", "evaluation")
"""Where a fault comes from that ends an attempt."""


@dataclass
class Wait:
    """A task that waits for room."""

    replica: int
    since_s: float
    here_s: float
    """When it came to this replica."""
    ahead: int
    """Tasks that waited there before it, at any moment of its wait."""
    excused: bool = False
    """Its rank was away meanwhile."""
    longest_s: float = 0.0
    """That a turn took where it waited before."""


class SeatBook:
    """The waits of one driver. `books`: what each replica's pool says now; none under `lru`. `common_tokens`: what
    prompts may have in common at most."""

    def __init__(self, events: EventBook, settings: RunSettings, common_tokens: int = 0) -> None:
        self.events, self.settings, self.findings = events, settings, events.findings
        self.common_tokens = common_tokens
        self.books: Callable[[], Mapping[int, PoolBook]] = dict
        self.alive: Callable[[], bool] = lambda: True
        """Whether the driver lives: what a dead one does is not among the events."""
        self.replicas: dict[int, Replica] = {}
        self.waits: dict[Place, Wait] = {}
        self.went_on: dict[Place, tuple[float, float]] = {}
        """When a wait ended last, and since when it had lasted."""
        self.lives: Counter[Place] = Counter()
        self.unclear: set[Place] = set()
        """Of two evaluations at once: their events cannot be told apart."""
        self.newest: dict[Place, int] = {}
        """The version of a training task's newest token."""
        self.holds: dict[Place, int] = {}
        """Tasks whose environment works, and the replica where they have KV."""

    # ------------------------------------------------------------------ turns

    def asks(self, replica: int, turn: Turn, now_s: float) -> None:
        book, place, where = self.books().get(replica), _place(turn.task), self.replicas[replica]
        where.starts(turn, now_s)
        self.holds.pop(place, None)
        if book is None or place in self.unclear or not self.alive():
            return
        require, name = self.findings.require, f"a turn of {turn.task}"
        require(place not in self.waits, "I4", f"{name} starts, which is paused")
        needed, room = where.needed_tokens(), where.capabilities.kv_budget_tokens or book.budget_tokens
        require(needed <= room, "I4", f"turns with {needed} tokens run in {room}")
        outgrown = book.used_tokens > book.budget_tokens and now_s > where.outgrown_s
        require(not outgrown, "I4", f"{name} starts with {book.used_tokens} of {book.budget_tokens} tokens charged")
        ended_s, since_s = self.went_on.get(place, (-1.0, now_s))
        mine_s = since_s if now_s - ended_s <= SAME_MOMENT_S else now_s
        patience_s = self.settings.patience_s
        for other, wait in self.waits.items():
            waits_here = wait.replica == replica and wait.here_s < now_s and other in map(_place, book.waiting)
            passed_by = waits_here and now_s - wait.since_s > patience_s + SAME_MOMENT_S and wait.since_s < mine_s
            require(not passed_by, "I4", f"{name} starts before {other}, which waits since {wait.since_s:.6g} s")
        self.look(now_s)

    def answered(self, replica: int, result: TurnResult) -> None:
        place = _place(result.task)
        self.holds[place] = replica
        if len(result.versions) and place[0] == "train":
            self.newest[place] = int(result.versions[-1])

    def over(self, replica: int, task: TaskKey, now_s: float) -> None:
        """A turn ended, whichever way."""
        self.replicas[replica].ends(task, now_s)

    # ------------------------------------------------------------------ events

    def emit(self, event: Event) -> None:
        saw = self.findings.saw
        match event:
            case TaskAdmitted():
                self._admitted(_place_of(event))
            case TaskPaused():
                self._paused(event)
            case TaskResumed():
                self._resumed(event)
            case TaskMigrated():
                self._migrated(event)
            case TurnFinished():
                self._not_paused(_place_of(event), "sampled a turn")
            case TaskFinished():
                self._not_paused(_place_of(event), "finished")
                self._ended(_place_of(event))
            case Dropped():
                self._ended(("train", event.prompt_id, event.member))
            case Fault() if event.where in ENDS_TASKS:
                split = "train" if event.where == "task" else "eval"
                self._ended((split, event.prompt_id, event.member))
            case KvRetention():
                saw(f"KV of a waiting task: {event.choice}")
            case RankLostEvent() | RankBack():
                self._rank(event)
            case VersionLoaded():
                self.loads(event.replica)
            case RunEnded():
                self._run_ended(event)
        self.look(event.t_s)

    def _admitted(self, place: Place) -> None:
        self.lives[place] += 1
        if self.lives[place] > 1:
            self.unclear.add(place)
            self.waits.pop(place, None)
        self.newest.pop(place, None)

    def _ended(self, place: Place) -> None:
        if self.waits.pop(place, None) is not None:
            self.findings.saw("a paused task ended")
        self.holds.pop(place, None)
        if self.lives[place]:
            self.lives[place] -= 1
        if not self.lives[place]:
            del self.lives[place]
            self.unclear.discard(place)

    def _paused(self, event: TaskPaused) -> None:
        place = _place_of(event)
        self.findings.saw("a task paused" if event.split == "train" else "an evaluation paused")
        if event.reason == "lost":
            self.findings.saw("a task paused while its rank is away")
        if place in self.unclear:
            return
        self.findings.require(place not in self.waits, "I4", f"{place} is paused twice")
        ahead = sum(wait.replica == event.replica for wait in self.waits.values())
        book = self.books().get(event.replica)
        if book is not None:  # those that cannot be told apart wait there too
            ahead = max(ahead, sum(_place(key) != place for key in book.waiting))
        self.waits[place] = Wait(event.replica, event.t_s, event.t_s, ahead, excused=event.reason == "lost")

    def _resumed(self, event: TaskResumed) -> None:
        place = _place_of(event)
        if place in self.unclear:
            return
        wait = self.waits.pop(place, None)
        if wait is None:
            self.findings.wrong("I4", f"{place} is resumed, and was not paused")
            return
        self.went_on[place] = (event.t_s, wait.since_s)
        self.findings.require(wait.replica == event.replica, "I4", f"{place} is resumed on {event.replica}, not {wait}")
        patience_s, waited_s = self.settings.patience_s, event.t_s - wait.since_s
        if waited_s > patience_s:
            self.findings.saw("a task waited beyond the patience")
        longest_s = max(wait.longest_s, self.replicas[event.replica].longest_until(event.t_s))
        bound_s = patience_s + (1 + wait.ahead) * longest_s
        self.findings.require(
            wait.excused or waited_s <= bound_s * (1 + SAME_MOMENT_S),
            "I4",
            f"{place} waited {waited_s:.6g} s for room, more than {bound_s:.6g} s",
        )

    def _migrated(self, event: TaskMigrated) -> None:
        place, to = _place_of(event), event.to_replica
        self.findings.saw(f"a task migrated: {event.reason}")
        version, prompt = self.events.loaded.get(to, -1), self.events.journal.prompts[event.prompt_id]
        needs = max(prompt.start_version, self.newest.get(place, -1))
        self.findings.require(
            version >= needs, "I6", f"{place} goes to replica {to} with version {version}, and needs {needs}"
        )
        wait = self.waits.get(place)
        if wait is None:
            self.findings.wrong("I4", f"{place} migrates, and was not paused")
            return
        if event.reason == "lost":
            self._excuse(wait)
        wait.longest_s = max(wait.longest_s, self.replicas[wait.replica].longest_until(event.t_s))
        wait.replica, wait.here_s = to, event.t_s
        others = [other for other in self.waits.values() if other.replica == to and other is not wait]
        wait.ahead += sum(other.since_s <= wait.since_s for other in others)
        for other in others:
            other.ahead += wait.since_s <= other.since_s

    def _not_paused(self, place: Place, what: str) -> None:
        if place not in self.unclear:
            self.findings.require(place not in self.waits, "I4", f"{place} {what} while it is paused")

    def _rank(self, event: RankLostEvent | RankBack) -> None:
        replicas = [replica for replica, ranks in self.events.engine_ranks.items() if event.rank in ranks]
        waits = [wait for wait in self.waits.values() if wait.replica in replicas]
        for wait in waits:
            self._excuse(wait)
        held = [place for place, replica in self.holds.items() if replica in replicas]
        for place in held:
            del self.holds[place]
        if held and isinstance(event, RankLostEvent):
            self.findings.saw("a rank lost while a task holds KV")

    def _excuse(self, wait: Wait) -> None:
        """Its rank is away."""
        if not wait.excused:
            wait.excused = True
            self.findings.saw("a rank lost while a task is paused")

    def loads(self, replica: int) -> None:
        """It begins to load weights, or has them."""
        if any(wait.replica == replica for wait in self.waits.values()):
            self.findings.saw("weights loaded while a task is paused")

    def _run_ended(self, event: RunEnded) -> None:
        if event.outcome == "done":
            left = ", ".join(map(str, self.waits))
            self.findings.require(not self.waits, "I4", f"the run is done, and {left} wait for room")

    # ------------------------------------------------------------------ pools

    def look(self, now_s: float) -> None:
        """What must hold at every moment."""
        for replica, book in self.books().items():
            if not book.is_open:
                for wait in self.waits.values():
                    if wait.replica == replica:
                        self._excuse(wait)
            where = self.replicas[replica]
            if book.used_tokens <= book.budget_tokens:
                where.outgrown_s = math.inf
            elif math.isinf(where.outgrown_s):
                where.outgrown_s = now_s
                self.findings.saw("turns outgrow the pool")
            self._evaluations_first(replica, book, now_s)

    def _evaluations_first(self, replica: int, book: PoolBook, now_s: float) -> None:
        """An evaluation does not wait where it fits, unless room is kept for who has waited too long."""
        found = [tokens for key, tokens in book.waiting.items() if key.split == "eval"]
        if not found or not book.is_open or self.settings.priority != "tiers":
            return
        patience_s = self.settings.patience_s
        if any(w.replica == replica and now_s - w.since_s >= patience_s for w in self.waits.values()):
            return
        block = self.replicas[replica].capabilities.kv_block_tokens
        free = book.budget_tokens - book.used_tokens
        self.findings.require(
            max(found) + 2 * block > free, "I4", f"an evaluation waits on {replica} with {free} tokens free"
        )

    def driver_over(self) -> None:
        """Nothing of the driver is left: what was charged is given back."""
        for replica, book in self.books().items():
            empty = not book.used_tokens and not book.tasks and not book.waiting
            self.findings.require(empty, "I4", f"the pool of replica {replica} is left with {book}")


def _place(key: TaskKey) -> Place:
    return (key.split, key.prompt_id, key.member)


def _place_of(
    event: TaskAdmitted | TaskPaused | TaskResumed | TaskMigrated | TurnFinished | TaskFinished,
) -> Place:
    return (event.split, event.prompt_id, event.member)
