"""Random events played to two task pools and to the slow books: what `tests/unit/test_task_pool*.py` share."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.slow_pool import SlowPools, SlowTask

from tiderl.data.records import TaskKey
from tiderl.schedule.pool import TaskPool, Verdict
from tiderl.schedule.priority import TaskFacts, priority
from tiderl.schedule.rates import EngineRates
from tiderl.schedule.residents import Resident

CONTEXT = 96
"""The longest context of a task; budgets hold one of them at least."""
MAX_TURNS = 6


def rates_of(compute_token_s: float) -> EngineRates:
    """Of an engine that computes a token so fast, whose batches gain half; 0: nothing is known."""
    rates = EngineRates()
    for _ in range(32 if compute_token_s else 0):
        rates.observe(computed_tokens=100, new_tokens=10, prefill_s=100 * compute_token_s, decode_s=1.0, running=4)
    return rates


def pool_of(budget: int, compute_token_s: float = 0.0, **changes: object) -> TaskPool:
    values: dict[str, object] = {"max_turns": MAX_TURNS, "max_context_tokens": CONTEXT, "patience_s": 3.0, **changes}
    return TaskPool(budget, {}, rates_of(compute_token_s), **values)  # type: ignore[arg-type]


def train(number: int, group: int = 0) -> TaskKey:
    return TaskKey("train", group, number)


def of_kind(resident: Resident, now_s: float) -> TaskFacts:
    return TaskFacts(evaluation=resident.key.split == "eval")


def admitted(pool: TaskPool, *keys: TaskKey) -> None:
    for key in keys:
        pool.admit(key, f"{key.split}:web", (key.split, key.prompt_id), 20.0, of_kind, 0.0)


@dataclass(frozen=True)
class Setting:
    budget: int
    block: int
    shares: bool
    patience_s: float
    compute_token_s: float
    reload_token_s: float | None


RULES = (
    ("ask",) * 9 + ("turn ends",) * 7 + ("admit",) * 5 + ("time passes",) * 4 + ("leave", "transfer", "void", "open")
)
COMINGS_AND_GOINGS = (
    ("ask",) * 10
    + ("turn ends",) * 8
    + ("admit",) * 5
    + ("leave",) * 3
    + ("time passes", "time passes", "transfer", "void")
)
"""Rules under which many groups open: in a pool with room for them, what they have in common is learned."""


@dataclass
class Play:
    """Two replicas, their real pools and the slow books. Every event is a rule and two numbers."""

    setting: Setting
    pools: list[TaskPool]
    saw: Counter[str] = field(default_factory=Counter)
    now_s: float = 0.0
    tasks: int = 0
    due_s: dict[int, float] = field(default_factory=lambda: {0: math.inf, 1: math.inf})
    """When a pool wants to be pumped, as it said last."""

    def __post_init__(self) -> None:
        self.slow = SlowPools(self.pools, self.setting.block, self.setting.shares, self.setting.patience_s)

    def event(self, what: str, number: int, tokens: int) -> None:
        getattr(self, what.replace(" ", "_"))(number, tokens)
        for pool in range(2):
            self.slow.settled(pool, self.now_s)

    def pick(self, number: int, *states: str) -> SlowTask | None:
        found = [task for task in self.slow.tasks.values() if task.state in states]
        return found[number % len(found)] if found else None

    def decided(self, pool: int, verdict: Verdict) -> None:
        waited = self.slow.of(pool, "ready")
        self.saw["went"] += len(verdict.go)
        self.saw["left"] += len(verdict.departures)
        self.saw["left while ready"] += sum(departure.ready for departure in verdict.departures)
        self.saw["aged"] += any(self.now_s >= task.ready_s + self.setting.patience_s for task in waited)
        self.slow.decided(pool, verdict, self.now_s)
        self.saw["waits"] += len(self.slow.of(pool, "ready"))
        due_s = self.pools[pool].next_due_s(self.now_s)
        assert due_s is None or due_s > self.now_s
        self.due_s[pool] = math.inf if due_s is None else due_s

    def pump(self, pool: int) -> None:
        self.decided(pool, self.pools[pool].pump(self.now_s))

    # ------------------------------------------------------------------ the rules

    def admit(self, number: int, tokens: int) -> None:
        self.tasks += 1
        key = TaskKey("eval" if number % 9 == 0 else "train", number % 3 + self.tasks // 4, self.tasks)
        facts = TaskFacts(evaluation=key.split == "eval", group_done_fraction=number % 5 / 4)
        task = SlowTask(key, (key.split, key.prompt_id), priority(facts), number % 2)
        self.slow.tasks[key] = task
        self.pools[task.pool].admit(
            key, f"{key.split}:web", task.group, 20.0, lambda resident, now_s: facts, self.now_s
        )

    def ask(self, number: int, tokens: int) -> None:
        """Its context has grown, or images have left it; what is left of a turn asks with what it had."""
        task = self.pick(number, "admitted", "waiting")
        if task is None:
            return
        new = 1 + number % 30
        context = task.context
        if not task.interrupted:
            context = max(1, context - 30) if number % 7 == 6 else context + tokens
        context = min(context, CONTEXT - new)
        pool = self.pools[task.pool]
        verdict = pool.ask(task.key, context, new, self.now_s)
        cheap = (self.setting.reload_token_s or math.inf) < self.setting.compute_token_s
        reserved = pool.kinds[f"{task.key.split}:web"].growth.reserved_tokens(new, cheap=cheap)
        assert 0 < reserved <= new
        self.slow.asked(task, context, context + reserved, self.now_s)
        self.decided(task.pool, verdict)

    def turn_ends(self, number: int, said: int) -> None:
        """It may have said more than was reserved for it."""
        task = self.pick(number, "active")
        if task is None:
            return
        context, interrupted = min(CONTEXT, task.context + said), number % 6 == 5
        new, cached = context - task.context, (12, 14, 17, said)[number % 4]
        pool = self.pools[task.pool]
        pool.ended(task.key, context, new, self.now_s, interrupted=interrupted, cached_tokens=cached)
        self.slow.ended(task, context, interrupted=interrupted, cached=cached)
        groups = Counter(
            self.slow.commons.get((task.pool, group)) for group in {t.group for t in self.slow.of(task.pool)}
        )
        self.saw["common"] += any(tokens and groups[tokens] > 1 for tokens in groups)
        self.saw["outgrown"] += self.slow.used(task.pool) > self.setting.budget
        self.pump(task.pool)

    def leave(self, number: int, tokens: int) -> None:
        task = self.pick(number, "admitted", "waiting", "ready", "active")
        if task is not None:
            self.pools[task.pool].leave(task.key, finished=task.state == "waiting")
            self.slow.left(task)
            self.pump(task.pool)

    def transfer(self, number: int, tokens: int) -> None:
        task = self.pick(number, "ready")
        if task is not None:
            here, to = task.pool, 1 - task.pool
            verdict = self.pools[here].transfer(task.key, self.pools[to], self.now_s)
            self.slow.moved(task, to)
            self.decided(to, verdict)
            self.pump(here)
            self.saw["moved"] += 1

    def void(self, number: int, tokens: int) -> None:
        self.pools[number % 2].void()
        self.slow.voided(number % 2)
        self.pump(number % 2)

    def open(self, number: int, tokens: int) -> None:
        """Closed pools open, else one may close."""
        closed = [pool for pool in self.pools if not pool.open]
        for pool in closed:
            pool.open = True
        if not closed and number % 2:
            self.pools[number // 2 % 2].open = False
        for pool in range(2):
            self.pump(pool)

    def time_passes(self, number: int, tokens: int) -> None:
        """Pools are pumped when they say so. Nothing is missed before."""
        until_s = self.now_s + (0.1, 0.2, 0.7, 3.0)[number % 4]
        while True:
            due_s, pool = min((due_s, pool) for pool, due_s in self.due_s.items())
            before_s = self.now_s + 0.99 * (min(due_s, until_s) - self.now_s)
            if before_s < due_s:
                assert all(copy.deepcopy(pool).pump(before_s) == Verdict() for pool in self.pools)
            if due_s > until_s:
                break
            self.now_s = due_s
            self.pump(pool)
        self.now_s = until_s

    def close(self) -> None:
        for task in list(self.slow.tasks.values()):
            self.pools[task.pool].leave(task.key, finished=False)
            self.slow.left(task)
        for pool in self.pools:
            assert (len(pool), pool.used_tokens, pool.booked_tokens) == (0, 0, 0.0)


def play(setting: Setting, events: Sequence[tuple[str, int, int]], make: type[TaskPool] = TaskPool) -> Counter[str]:
    """What was seen in it. Raises `AssertionError` where pools and books do not agree."""
    kinds: dict = {}
    pools = [
        make(
            setting.budget,
            kinds,
            rates_of(setting.compute_token_s),
            max_turns=MAX_TURNS,
            max_context_tokens=CONTEXT,
            block_tokens=setting.block,
            shares_prompts=setting.shares,
            reload_token_s=setting.reload_token_s,
            patience_s=setting.patience_s,
        )
        for _ in range(2)
    ]
    played = Play(setting, pools)
    for what, number, tokens in events:
        played.event(what, number, tokens)
    played.close()
    return played.saw
