"""Where every rank-second went (I11): useful work and each named loss, adding up to ranks × time.

Time is the goodput's: from the first issued task to the last committed update. Everything comes from events:

* a replica's turns share each moment in which it computes equally (n turns at once: 1/n each), so that what its turns
  get adds up to the time in which any was computed (`shares.py`). A turn's time goes to prefill and decode, and by what
  became of its trajectory: trained (useful), given up, still in flight. Prefill of context that had been computed
  before is a loss of its own: forced by a version change (I6), or by eviction;
* a replica that computes nothing is charged for what it waits for: environments, memory (`kv_stall`: turns queue or
  tasks are paused, and none runs), the staleness bound, new work, new weights;
* the rank that trains is charged for what it does. Ranks of one trainer work in step and are charged alike.

Memory stays flat: turns before the oldest moment at which an open task may still have begun one are folded into sums.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from tiderl.data.events import (
    Dropped,
    Event,
    PromptIssued,
    RankLostEvent,
    RankState,
    RunStarted,
    TaskAdmitted,
    TaskFinished,
    TurnFinished,
    UpdateCommitted,
    VersionPublished,
)
from tiderl.observe.kv import computed_again, computed_by
from tiderl.observe.pauses import Pause, Pauses
from tiderl.observe.shares import Floats, Shares, intervals

USEFUL = ("useful_prefill", "useful_decode", "useful_reference", "useful_train")
LOSSES = (
    *("recompute_version", "recompute_evicted", "discarded", "in_flight", "eval"),
    *("env_wait", "kv_stall", "staleness_wait", "no_work", "starve_wait"),
    *("swap", "sync", "checkpoint", "restart", "other"),
)
CATEGORIES = USEFUL + LOSSES
OF_A_TURN = ("useful_prefill", "useful_decode", "recompute_version", "recompute_evicted")

IDLE = {
    "generating": "env_wait",
    "evaluating": "eval",
    "idle_staleness": "staleness_wait",
    "idle_no_work": "no_work",
    "loading": "sync",
    "stopped": "restart",
}
"""A rollout rank's activity to what it is charged with while none of its turns is computed."""
MASKED = frozenset({"loading", "stopped"})
"""Activities during which no turn is computed, whatever turns are open."""
WAITING = "waiting_data"
ACTING = {
    WAITING: "starve_wait",
    "reference": "useful_reference",
    "training": "useful_train",
    "publishing": "sync",
    "checkpointing": "checkpoint",
    "restoring": "restart",
}
"""The trainer's activity to its category."""
SWAPS = {"swap_to_reference_s": "useful_reference", "swap_to_actor_s": "useful_train"}
"""Metrics of an update: seconds of loading one model over the other, and the activity in which they were spent."""
FOLD_TURNS = 50_000
"""Turns kept before they are folded: a few megabytes."""


@dataclass
class _Task:
    """One attempt at a member: how much of its context has been computed, and its rank-seconds by `OF_A_TURN`."""

    last_s: float
    """No turn of it that has not been seen began earlier."""
    computed_tokens: int = 0
    version: int = -1
    over: bool = False
    fate: str = "in_flight"
    spent: np.ndarray = field(default_factory=lambda: np.zeros(len(OF_A_TURN)))


@dataclass(frozen=True, slots=True)
class _Turn:
    """Seconds on the run's clock."""

    task: _Task
    queued_s: float
    started_s: float
    decoding_s: float
    ended_s: float
    again: float  # fraction of the prefill that had been computed before
    by_version: bool  # because the version changed
    void: float  # fraction of the decoding spent on context that new weights or a preemption had made void
    void_by_version: bool


class Account:
    """Feed it every event in order; `summary()` gives rank-seconds by category."""

    def __init__(self) -> None:
        self.ranks = 0
        self.last_commit_s: float | None = None
        self._kept_s = 0.0  # what the trainer did before is committed or published
        self._until_s: float | None = None  # all before is folded into `_spent` and the tasks
        self._spent = dict.fromkeys(CATEGORIES, 0.0)
        self._total = 0.0
        self._engine_ranks: tuple[tuple[int, ...], ...] = ()
        self._actor_ranks: tuple[int, ...] = ()
        self._states: dict[tuple[int, str], list[tuple[float, str]]] = defaultdict(list)  # (rank, role): changes
        self._turns: dict[int, list[_Turn]] = defaultdict(list)  # by replica
        self._pauses = Pauses()
        self._paused: dict[int, list[Pause]] = defaultdict(list)  # by replica
        self._kept = 0
        self._groups: dict[tuple[str, int], dict[int, dict[int, _Task]]] = {}  # (split, prompt) -> member -> attempt

    def observe(self, event: Event) -> None:
        for pause in self._pauses.observe(event):
            self._paused[pause.replica].append(pause)
        match event:
            case TurnFinished():
                self._turn(event)
            case RankState():
                self._states[event.rank, event.role].append((event.t_s, event.activity))
            case PromptIssued():
                self._start(event.t_s)
            case TaskAdmitted():
                self._start(event.t_s)
                self._task(event.split, event.prompt_id, event.member, event.attempt).last_s = event.t_s
            case TaskFinished():
                self._task(event.split, event.prompt_id, event.member, event.attempt).over = True
            case Dropped():
                self._drop(event.prompt_id, event.member)
            case UpdateCommitted():
                self._commit(event)
            case RankLostEvent():
                self._lose(event)
            case VersionPublished():
                self._kept_s = event.t_s
            case RunStarted():
                self._begin(event)

    def _start(self, t_s: float) -> None:
        if self._until_s is None:
            self._until_s = t_s

    def _lose(self, event: RankLostEvent) -> None:
        """A rank that trains died: what all of them did since the last commit or publication is done again."""
        if event.rank not in self._actor_ranks:
            return
        changes = self._states[self._actor_ranks[0], "actor"]
        since_s = max(self._kept_s, self._until_s or 0.0)
        doing = changes[bisect_right(changes, since_s, key=itemgetter(0)) - 1][1] if changes else WAITING
        lost = [(since_s, doing), *(change for change in changes if change[0] > since_s)]
        changes[:] = [change for change in changes if change[0] <= since_s] + [
            (at_s, activity if activity == WAITING else "restoring") for at_s, activity in lost
        ]

    def _begin(self, event: RunStarted) -> None:
        """A driver starts (again): what an earlier one's ranks and tasks did is over."""
        self.ranks, self._engine_ranks, self._actor_ranks = event.ranks, event.engine_ranks, event.actor_ranks
        for changes in self._states.values():
            changes.append((event.t_s, "stopped"))
        for members in self._groups.values():
            for attempts in members.values():
                for task in attempts.values():
                    task.over = True

    def _task(self, split: str, prompt_id: int, member: int, attempt: int) -> _Task:
        attempts = self._groups.setdefault((split, prompt_id), {}).setdefault(member, {})
        if attempt not in attempts:
            for earlier in attempts.values():
                earlier.over, earlier.fate = True, "discarded"
            attempts[attempt] = _Task(0.0, fate="in_flight" if split == "train" else "eval")
        return attempts[attempt]

    def _turn(self, event: TurnFinished) -> None:
        task = self._task(event.split, event.prompt_id, event.member, event.attempt)
        computed = max(0, event.context_tokens - event.cached_tokens)
        again = computed_again(event, task.computed_tokens)
        decoding_s = event.t_s - event.decode_s
        started_s = decoding_s - event.prefill_s
        self._turns[event.replica].append(
            _Turn(
                task,
                queued_s=started_s - event.queued_s,
                started_s=started_s,
                decoding_s=decoding_s,
                ended_s=event.t_s,
                again=again / computed if computed else 0.0,
                by_version=task.version != event.version,
                void=event.recompute_s / event.decode_s if event.decode_s else 0.0,
                void_by_version=event.first_version != event.version,
            )
        )
        self._kept += 1
        task.computed_tokens, task.version = computed_by(event), event.version
        task.last_s = event.t_s

    def _drop(self, prompt_id: int, member: int) -> None:
        for task in self._groups.get(("train", prompt_id), {}).get(member, {}).values():
            task.over, task.fate = True, "discarded"

    def _commit(self, event: UpdateCommitted) -> None:
        self.last_commit_s = self._kept_s = event.t_s
        for name, category in SWAPS.items():
            seconds = len(self._actor_ranks) * event.metrics.get(name, 0.0)
            self._spent[category] -= seconds
            self._spent["swap"] += seconds
        for prompt_id in event.prompt_ids:
            for attempts in self._groups.get(("train", prompt_id), {}).values():
                for task in attempts.values():
                    task.over = True
                    if task.fate == "in_flight":
                        task.fate = "useful"
        if self._kept >= FOLD_TURNS:
            open_since = [
                task.last_s
                for members in self._groups.values()
                for attempts in members.values()
                for task in attempts.values()
                if not task.over
            ]
            self._fold(min([event.t_s, *open_since]))

    # ---- the sums

    def summary(self) -> dict[str, float] | None:
        """Rank-seconds by category, all of `CATEGORIES`; None before the first committed update."""
        if self._until_s is None or self.last_commit_s is None:
            return None
        if self.last_commit_s <= self._until_s and not self._total:  # else all of it is in the sums already
            return None
        last = copy.deepcopy(self)
        last._fold(self.last_commit_s)
        spent = last._spent
        for members in last._groups.values():
            for attempts in members.values():
                for task in attempts.values():
                    _settle(spent, task)
        spent["other"] += last._total - sum(spent.values())
        return spent

    def _fold(self, until_s: float) -> None:
        """Take everything between the last fold and `until_s` into the sums."""
        since_s = self._until_s
        assert since_s is not None
        if until_s <= since_s:
            return
        rollout = {rank for ranks in self._engine_ranks for rank in ranks}
        shared = rollout & set(self._actor_ranks)
        states = self._states.get((self._actor_ranks[0], "actor"), []) if self._actor_ranks else []
        acting = intervals(states, since_s, until_s)
        away = [(start, end) for start, end, activity in acting if activity != WAITING]
        for replica, ranks in enumerate(self._engine_ranks):
            for rank in ranks:
                self._rollout_rank(replica, rank, away if rank in shared else [], since_s, until_s)
        for start, end, activity in acting:
            # A rank with both roles has the rollout's while the trainer waits.
            count = len(self._actor_ranks) - (len(shared) if activity == WAITING else 0)
            self._spent[ACTING.get(activity, "restart")] += count * (end - start)
        self._total += self.ranks * (until_s - since_s)
        self._until_s = until_s
        self._forget(until_s)

    def _forget(self, until_s: float) -> None:
        for changes in self._states.values():
            while len(changes) > 1 and changes[1][0] <= until_s:
                del changes[0]
        for replica, turns in self._turns.items():
            self._turns[replica] = [turn for turn in turns if turn.ended_s > until_s]
        for replica, pauses in self._paused.items():
            self._paused[replica] = [pause for pause in pauses if pause.until_s > until_s]
        self._kept = sum(map(len, self._turns.values()))
        open_tasks = {id(turn.task) for turns in self._turns.values() for turn in turns}
        for group, members in list(self._groups.items()):
            tasks = [task for attempts in members.values() for task in attempts.values()]
            if all(task.over and task.fate != "in_flight" and id(task) not in open_tasks for task in tasks):
                for task in tasks:
                    _settle(self._spent, task)
                del self._groups[group]

    def _rollout_rank(
        self, replica: int, rank: int, trains: list[tuple[float, float]], since_s: float, until_s: float
    ) -> None:
        """Charges one rank of a replica, but for the time in which it `trains`."""
        states = intervals(self._states[rank, "rollout"], since_s, until_s)
        masked = [(start, end) for start, end, activity in states if activity in MASKED] + trains
        turns = [turn for turn in self._turns.get(replica, ()) if turn.queued_s < until_s]
        queued, started, decoding, ended = (
            np.clip(np.array([getattr(turn, name) for turn in turns], dtype=np.float64), since_s, until_s)
            for name in ("queued_s", "started_s", "decoding_s", "ended_s")
        )
        busy = Shares(started, ended, masked, (since_s, until_s), also=decoding)
        _charge_turns(turns, busy.of(started, decoding), busy.of(decoding, ended))
        pauses = [*self._paused.get(replica, ()), *(p for p in self._pauses.lasting(until_s) if p.replica == replica)]
        paused, resumed = (
            np.clip(np.array([getattr(pause, name) for pause in pauses], dtype=np.float64), since_s, until_s)
            for name in ("since_s", "until_s")
        )
        queue = Shares(np.append(queued, paused), np.append(started, resumed), masked, (since_s, until_s))
        here = Shares(np.array([since_s]), np.array([until_s]), trains, (since_s, until_s))
        starts = np.array([start for start, _, _ in states])
        edges = np.unique(np.concatenate([busy.edges, queue.edges, here.edges, starts]))
        begins = edges[:-1]  # not the middles: between neighbouring floats there is none
        idle = (busy.count_at(begins) == 0) & (here.count_at(begins) > 0)
        stalled = idle & (queue.count_at(begins) > 0)
        lengths = np.diff(edges)
        self._spent["kv_stall"] += float(lengths[stalled].sum())
        state_at = np.searchsorted(starts, begins, side="right") - 1
        sums = np.bincount(state_at[idle & ~stalled] + 1, lengths[idle & ~stalled], minlength=len(states) + 1)
        for seconds, (_, _, activity) in zip(sums[1:], states, strict=True):
            self._spent[IDLE.get(activity, "other")] += float(seconds)


def _charge_turns(turns: list[_Turn], prefill_s: Floats, decode_s: Floats) -> None:
    for turn, prefill, decode in zip(turns, prefill_s.tolist(), decode_s.tolist(), strict=True):
        again, void = prefill * turn.again, decode * turn.void
        turn.task.spent += (
            prefill - again,
            decode - void,
            (again if turn.by_version else 0.0) + (void if turn.void_by_version else 0.0),
            (0.0 if turn.by_version else again) + (0.0 if turn.void_by_version else void),
        )


def _settle(spent: dict[str, float], task: _Task) -> None:
    if task.fate == "useful":
        for category, seconds in zip(OF_A_TURN, task.spent.tolist(), strict=True):
            spent[category] += seconds
    else:
        spent[task.fate] += float(task.spent.sum())
