"""The embedded engine equals an unbatched Hugging Face forward, whatever is interleaved; its mutants do not.

Drawn: turns of groups that share a prompt, growth that preempts, offload, aborts, pauses, new weights between chunks,
contexts at the exact capacity, zero new tokens, a stop id as first token, NaN logits, and turns that are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine_core_suite import drain
from support.tiny_models import (
    FAMILIES,
    MAX_CONTEXT_TOKENS,
    VOCAB_SIZE,
    check_against_oracle,
    engine_settings,
    oracle_logprobs,
    replace,
    state,
    turn,
    weights,
    write_weights,
)

from tiderl.data.errors import BudgetError, InvariantViolation, RequestTooLarge
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings
from tiderl.data.turns import PauseMode, Turn, TurnFailure, TurnResult
from tiderl.engines.admission import Admission
from tiderl.engines.growth import FIRST_TURNS
from tiderl.engines.live_turn import LiveTurn
from tiderl.engines.residency import KV_POLICIES, HeldKv, Residency
from tiderl.engines.reuse import Reuse, Sources
from tiderl.engines.torch_engine import TorchEngine, build

GROUPS, MEMBERS = 3, 3
TASKS = GROUPS * MEMBERS
PROMPT_TOKENS = 20
VERSIONS = 3
POISON = 60  # in the poisoned family, a context with this id has NaN logits
STOP_IDS = (1, 2, 3, POISON)
SMALL = {
    "kv_budget_tokens": 75,
    "max_batch": 4,
    "prefill_tokens_per_step": 24,
    "prefill_tokens_beside_decoding": 12,
    "growth_quantile": 0.1,
    "host_kv_budget_tokens": 60,
}


def key(number: int) -> TaskKey:
    return TaskKey("train", number // MEMBERS, number % MEMBERS)


def poisoned(version: int) -> WeightHandle:
    """Llama's weights (their head is not tied) with a NaN in one row of the embedding."""
    tensors = state("llama", version)
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    return write_weights(tensors, f"poisoned-v{version}", version)


class Driver:
    """Plays a drawn interleaving against an engine and checks every result against the oracle."""

    def __init__(
        self, family: str, make: Callable[..., TorchEngine] = build, *, poison: bool = False, kv_policy: str = "lru"
    ) -> None:
        self.family = family
        self.handles = [poisoned(v) if poison else weights(family, v) for v in range(VERSIONS)]
        self.poison = poison
        self.engine = make(engine_settings(family, kv_policy=kv_policy, **SMALL))
        self.rng = np.random.default_rng(0)
        self.prompts = self.rng.integers(4, POISON, (GROUPS, PROMPT_TOKENS)).tolist()
        self.histories: dict[int, list[int]] = {}
        self.turns: dict[tuple[TaskKey, int], Turn] = {}  # asked and not yet answered
        self.asked = 0
        self.version = 0
        self.failures = self.cached = 0
        self.engine.load_weights(self.handles[0])
        self.teach_that_turns_are_short()

    def teach_that_turns_are_short(self) -> None:
        """So that later turns start on a small reservation, and have to grow."""
        for n in range(FIRST_TURNS):
            one = turn(n, [5, 6], 6, stop_ids=range(VOCAB_SIZE), retain=False)
            self.engine.add(replace(one, task=TaskKey("eval", n, 0)))
        drain(self.engine)

    def add(self, number: int, new_ids: int, max_new_tokens: int, temperature: float, kind: str) -> None:
        """`kind`: `next` turn; `fork` from an earlier one; `full`: up to the capacity; `stop`: ends with any token."""
        task, history = key(number), self.histories.get(number)
        if history is None:
            history = self.prompts[number // MEMBERS]
            new_ids = new_ids % 3  # members often start from equal ids
        if kind == "fork" or len(history) + new_ids + max_new_tokens > MAX_CONTEXT_TOKENS:
            history = history[: len(history) // 2]
        room = MAX_CONTEXT_TOKENS - max_new_tokens - len(history)
        new_ids = room if kind == "full" else min(new_ids, room)
        one = turn(
            number,
            [*history, *self.rng.integers(0, VOCAB_SIZE, new_ids).tolist()],
            max_new_tokens,
            at=self.asked,
            temperature=temperature,
            stop_ids=range(VOCAB_SIZE) if kind == "stop" else STOP_IDS,
            priority=float(new_ids % 3),
            retain=new_ids % 5 != 4,
        )
        one = replace(one, task=task)
        unanswered = [asked for (name, _), asked in self.turns.items() if name == task]
        if unanswered:
            if unanswered[0].sampling.max_new_tokens:  # else it has ended, and waits for the next step
                with pytest.raises(BudgetError, match="still running"):
                    self.engine.add(one)
            return
        self.asked += 1
        self.turns[task, one.turn] = one
        self.engine.add(one)

    def too_large(self, number: int) -> None:
        with pytest.raises(RequestTooLarge):
            self.engine.add(replace(turn(number, [4] * MAX_CONTEXT_TOKENS, 1), task=TaskKey("eval", number, 1)))

    def abort(self, number: int) -> None:
        for task, at in list(self.turns):
            if task == key(number):
                self.take(self.engine.abort(task, at))

    def call(self, name: str, number: int) -> None:
        getattr(self.engine, name)(key(number))

    def pause(self, mode: PauseMode, times: int) -> None:
        for result in [result for _ in range(times) for result in self.engine.pause(mode)]:
            self.take(result)

    def resume(self) -> None:
        self.engine.resume()

    def load(self) -> None:
        self.version += 1
        self.engine.load_weights(self.handles[self.version % VERSIONS])

    def take(self, outcome: TurnResult | TurnFailure | None) -> None:
        assert outcome is not None
        one = self.turns.pop((outcome.task, outcome.turn))
        number = one.task.prompt_id * MEMBERS + one.task.member
        if isinstance(outcome, TurnFailure):
            assert self.poison and POISON in one.ids
            assert outcome.error == "numerical" and str(one.task) in outcome.what
            self.failures += 1
            self.histories.pop(number, None)
            return
        assert not (self.poison and POISON in one.ids and len(outcome.ids))
        check_against_oracle(self.family, one, outcome)
        assert outcome.cached_tokens <= len(one.ids) - 1
        self.cached += outcome.cached_tokens
        if outcome.finish_reason == "stop":
            assert outcome.ids[-1] in one.sampling.stop_ids
        assert not set(outcome.ids[:-1].tolist()) & set(one.sampling.stop_ids)
        self.histories[number] = [*one.ids.tolist(), *outcome.ids.tolist()]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for outcome in self.engine.step():
                self.take(outcome)
            self.check_books()

    def check_books(self) -> None:
        """I4 at this moment, against a count of the KV that is really there."""
        stats, book = self.engine.stats(), self.engine._residency
        held = sum(entry.kv.shape[3] for entry in book._held.values())
        in_rows = sum(live.own_kv.tokens if live.own_kv else live.filled for live in self.engine._rows.lives)
        assert (stats.resident_tokens, stats.held_tokens) == (held + in_rows, held)
        assert stats.resident_tokens <= book.committed_tokens <= stats.budget_tokens
        assert stats.offloaded_tokens <= SMALL["host_kv_budget_tokens"]
        assert stats.running <= SMALL["max_batch"]

    def answer_all(self) -> None:
        self.engine.resume()
        for outcome in drain(self.engine):
            self.take(outcome)
        assert not self.turns

    def finish(self) -> None:
        """Everybody is answered, and when all tasks are gone nothing is left of them."""
        self.answer_all()
        for number in range(TASKS):
            self.engine.release(key(number))
        stats = self.engine.stats()
        assert stats.resident_tokens == stats.offloaded_tokens == stats.running == stats.waiting == 0
        assert self.engine._residency.committed_tokens == 0


NUMBERS = st.integers(0, TASKS - 1)
ADDS = st.tuples(
    st.just("add"),
    NUMBERS,
    st.integers(1, 16),
    st.sampled_from([0, 1, 2, 6, 12, 20]),
    st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    st.sampled_from(["next", "next", "next", "next", "fork", "full", "stop"]),
)
STEPS = st.tuples(st.just("step"), st.integers(1, 10))
RARE = st.one_of(
    st.tuples(st.just("abort"), NUMBERS),
    st.tuples(st.just("call"), st.sampled_from(["release", "retain", "offload"]), NUMBERS),
    st.tuples(st.just("pause"), st.sampled_from(["keep", "abort"]), st.integers(1, 2)),
    st.tuples(st.just("resume")),
    st.tuples(st.just("load")),
    st.tuples(st.just("too_large"), NUMBERS),
)
OPERATIONS = st.lists(st.one_of(ADDS, ADDS, ADDS, STEPS, STEPS, RARE), min_size=15, max_size=60)
Operations = list[tuple]  # type: ignore[type-arg]


def play(driver: Driver, operations: Operations) -> None:
    for name, *arguments in operations:
        getattr(driver, name)(*arguments)
        driver.check_books()
    driver.finish()


@pytest.mark.parametrize(("family", "kv_policy"), [*((family, "lru") for family in FAMILIES), ("qwen3", "ctb")])
@settings(deadline=None, max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS)
def test_any_interleaving_equals_an_unbatched_forward(family: str, kv_policy: str, operations: Operations) -> None:
    play(Driver(family, kv_policy=kv_policy), operations)


@settings(deadline=None, max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS)
def test_nan_fails_exactly_the_turns_that_read_it(operations: Operations) -> None:
    play(Driver("llama", poison=True), operations)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("kv_policy", KV_POLICIES)
@settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS)
def test_any_of_many_interleavings_equals_an_unbatched_forward(
    kv_policy: str, poison: bool, operations: Operations
) -> None:
    play(Driver("llama", poison=poison, kv_policy=kv_policy), operations)


LONG_RUN_MIX = {
    "add": 0.52, "step": 0.3, "abort": 0.03, "load": 0.02, "retain": 0.02, "release": 0.03, "offload": 0.05,
    "pause": 0.03,
}  # fmt: skip


def long_run(seed: int, operations: int = 150) -> Operations:
    """Mostly turns and steps, so that tasks get old and keep KV; rarely what disturbs them."""
    rng = np.random.default_rng(seed)
    drawn: Operations = []
    for kind in rng.choice(list(LONG_RUN_MIX), operations, p=list(LONG_RUN_MIX.values())):
        number = int(rng.integers(TASKS))
        if kind == "add":
            new_ids, new_tokens = int(rng.integers(1, 9)), int(rng.choice([0, 1, 2, 6, 12]))
            temperature = float(rng.choice([0.0, 0.7, 1.0, 1.5]))
            drawn.append((kind, number, new_ids, new_tokens, temperature, "fork" if rng.random() < 0.05 else "next"))
        elif kind == "step":
            drawn.append((kind, int(rng.integers(1, 8))))
        elif kind == "pause":
            drawn += [("pause", "keep", 2), ("step", 2), ("resume",)]
        elif kind in ("retain", "release", "offload"):
            drawn.append(("call", kind, number))
        else:
            drawn.append((kind,) if kind == "load" else (kind, number))
    return drawn


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("family", "kv_policy"), [*((family, "lru") for family in FAMILIES), ("llama", "ctb")])
def test_long_runs_equal_an_unbatched_forward(family: str, kv_policy: str, seed: int) -> None:
    driver = Driver(family, kv_policy=kv_policy)
    play(driver, long_run(seed))
    assert driver.cached > 0 and driver.engine.stats().evicted_tokens > 0


def test_the_runs_reach_what_they_are_for() -> None:
    """Preemption, reuse, offload and NaN happen in such runs, not only where a test aims at them."""
    offloaded = 0

    class Watched(Driver):
        def call(self, name: str, number: int) -> None:
            nonlocal offloaded
            super().call(name, number)
            offloaded = max(offloaded, self.engine.stats().offloaded_tokens)

    driver = Watched("llama", poison=True)
    play(driver, long_run(0, 400))
    assert driver.engine.stats().preemptions > 0
    assert driver.failures > 0 and driver.cached > 0 and offloaded > 0


class StaleKvEngine(TorchEngine):
    """Mutant for I6: goes on with the KV of the old weights."""

    def load_weights(self, handle: WeightHandle) -> None:
        self._model.load(handle.path)
        self._version = handle.version


def test_the_oracle_catches_kv_of_old_weights() -> None:
    driver = Driver("qwen3", StaleKvEngine)
    driver.add(0, 12, 6, 1.0, "next")
    driver.step()
    driver.load()
    with pytest.raises(AssertionError):
        driver.answer_all()


class CarelessKv(HeldKv):
    def usable_tokens(self, ids: np.ndarray, version: int) -> int:
        return min(self.tokens, len(ids))


class CarelessResidency(Residency):
    def settle(self, task: TaskKey, entry: HeldKv | None, priority: float = 0.0) -> None:
        super().settle(task, entry and CarelessKv(entry.ids, entry.version, entry.kv), priority)


class CarelessEngine(TorchEngine):
    """Mutant for I8: takes a task's KV for its new context without comparing the ids."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._residency = CarelessResidency(settings.kv_budget_tokens)
        self._admission = Admission(self._residency, settings.growth_quantile)


def test_the_oracle_catches_kv_of_other_ids() -> None:
    driver = Driver("qwen3", CarelessEngine)
    driver.add(0, 12, 6, 1.0, "next")
    driver.answer_all()
    driver.histories[0] = [(token + 1) % VOCAB_SIZE for token in driver.histories[0]]
    driver.add(0, 3, 6, 1.0, "next")
    with pytest.raises(AssertionError):
        driver.answer_all()


class CarelessSources(Sources):
    def best(self, live: LiveTurn) -> Reuse:
        for row, other in self._rows[live.group]:
            return Reuse(min(other.filled, live.length - 1), None, row)
        return super().best(live)


class CarelessSharingEngine(TorchEngine):
    """Mutant for I8: takes a sibling's row without comparing the ids."""

    def _sources(self, rows: list[LiveTurn]) -> Sources:
        sources = CarelessSources(self._residency, self._host, self._version)
        for row, live in enumerate(rows):
            sources.add_row(row, live, prefills=False)
        return sources


def test_the_oracle_catches_a_prompt_that_is_not_shared() -> None:
    driver = Driver("qwen3", CarelessSharingEngine)
    driver.add(0, 3, 6, 1.0, "next")
    driver.step()
    driver.prompts[0] = [(token + 1) % VOCAB_SIZE for token in driver.prompts[0]]
    driver.add(1, 3, 6, 1.0, "next")
    with pytest.raises(AssertionError):
        driver.answer_all()


class UnboundedAdmission(Admission):
    def make_room(self, running: list[LiveTurn]) -> list[LiveTurn]:
        return []


class UnboundedEngine(TorchEngine):
    """Mutant for I4: turns grow past what they reserved."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._admission = UnboundedAdmission(self._residency, settings.growth_quantile)


def test_the_driver_catches_growth_that_nobody_reserved() -> None:
    driver = Driver("qwen3", UnboundedEngine)
    driver.add(0, 1, 20, 1.0, "next")
    with pytest.raises((AssertionError, InvariantViolation)):
        driver.step(20)


def test_the_oracle_is_causal() -> None:
    """The oracle's own sanity: what follows later does not change an earlier row."""
    short, long = oracle_logprobs("qwen3", 0, [4, 5, 6], 1.0), oracle_logprobs("qwen3", 0, [4, 5, 6, 9], 1.0)
    np.testing.assert_allclose(short, long[:3], atol=1e-6)
