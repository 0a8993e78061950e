"""The embedded engine equals an unbatched Hugging Face forward, whatever is interleaved; its mutants do not."""

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
    task,
    turn,
    weights,
)

from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings
from tiderl.data.turns import Turn, TurnFailure, TurnResult
from tiderl.engines.residency import HeldKv, Residency
from tiderl.engines.torch_engine import TorchEngine, build

TASKS = 5
VERSIONS = 3
SMALL = {"kv_budget_tokens": 70, "max_batch": 3, "prefill_tokens_per_step": 12}


class Driver:
    """Plays a drawn interleaving against an engine and checks every result against the oracle."""

    def __init__(self, family: str, make: Callable[..., TorchEngine] = build) -> None:
        self.family = family
        self.engine = make(engine_settings(family, **SMALL))
        self.rng = np.random.default_rng(0)
        self.histories: dict[int, list[int]] = {}
        self.turns: dict[tuple[TaskKey, int], Turn] = {}  # asked and not yet answered
        self.asked = 0
        self.version = 0
        self.engine.load_weights(weights(family, 0))

    def add(self, number: int, new_ids: int, max_new_tokens: int, temperature: float, fork: bool) -> None:
        if any(key == task(number) for key, _ in self.turns):
            return
        history = self.histories.get(number, [])
        if fork or len(history) + new_ids + max_new_tokens > MAX_CONTEXT_TOKENS:
            history = history[: len(history) // 2]
        context = [*history, *self.rng.integers(0, VOCAB_SIZE, new_ids).tolist()]
        one = turn(
            number,
            context,
            max_new_tokens,
            at=self.asked,
            temperature=temperature,
            stop_ids=(1, 2, 3),
            priority=float(new_ids % 3),
            retain=new_ids % 5 != 0,
        )
        self.asked += 1
        self.turns[one.task, one.turn] = one
        self.engine.add(one)

    def abort(self, number: int) -> None:
        for key, at in list(self.turns):
            if key == task(number):
                self.take(self.engine.abort(key, at))

    def load(self) -> None:
        self.version += 1
        handle = weights(self.family, self.version % VERSIONS)
        self.engine.load_weights(handle)

    def take(self, result: TurnResult | TurnFailure | None) -> None:
        assert isinstance(result, TurnResult)
        one = self.turns.pop((result.task, result.turn))
        check_against_oracle(self.family, one, result)
        assert result.cached_tokens < len(one.ids)
        if result.finish_reason == "stop":
            assert result.ids[-1] in one.sampling.stop_ids
        assert not set(result.ids[:-1].tolist()) & set(one.sampling.stop_ids)
        self.histories[one.task.prompt_id] = [*one.ids.tolist(), *result.ids.tolist()]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for outcome in self.engine.step():
                self.take(outcome)
            stats = self.engine.stats()
            assert stats.resident_tokens <= stats.budget_tokens
            assert stats.running <= SMALL["max_batch"]

    def finish(self) -> None:
        self.engine.resume()
        for outcome in drain(self.engine):
            self.take(outcome)
        assert not self.turns


NUMBERS = st.integers(0, TASKS - 1)
ADDS = st.tuples(
    st.just("add"),
    NUMBERS,
    st.integers(1, 16),
    st.sampled_from([0, 1, 2, 3, 6]),
    st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    st.sampled_from([False, False, False, True]),
)
STEPS = st.tuples(st.just("step"), st.integers(1, 10))
RARE = st.one_of(
    st.tuples(st.just("abort"), NUMBERS),
    st.tuples(st.sampled_from(["release", "retain"]), NUMBERS),
    st.tuples(st.sampled_from(["keep", "resume"])),
    st.tuples(st.just("load")),
)
OPERATIONS = st.lists(st.one_of(ADDS, STEPS, ADDS, STEPS, ADDS, RARE), min_size=15, max_size=60)


def play(driver: Driver, operations: list[tuple]) -> None:  # type: ignore[type-arg]
    for name, *arguments in operations:
        if name in ("release", "retain"):
            getattr(driver.engine, name)(task(*arguments))
        elif name == "keep":
            driver.engine.pause("keep")
        elif name == "resume":
            driver.engine.resume()
        else:
            getattr(driver, name)(*arguments)
    driver.finish()


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS)
def test_any_interleaving_equals_an_unbatched_forward(family: str, operations: list[tuple]) -> None:  # type: ignore[type-arg]
    play(Driver(family), operations)


def long_run(seed: int, operations: int = 150) -> list[tuple]:  # type: ignore[type-arg]
    """Mostly turns and steps, so that tasks get old and keep KV; rarely what disturbs them."""
    rng = np.random.default_rng(seed)
    drawn: list[tuple] = []  # type: ignore[type-arg]
    for kind in rng.choice(["add", "step", "abort", "load", "retain", "release", "keep"], operations, p=LONG_RUN_MIX):
        number = int(rng.integers(TASKS))
        if kind == "add":
            new_ids, new_tokens = int(rng.integers(1, 9)), int(rng.choice([0, 1, 2, 3, 6]))
            drawn.append(
                (
                    kind,
                    number,
                    new_ids,
                    new_tokens,
                    float(rng.choice([0.0, 0.7, 1.0, 1.5])),
                    rng.random() < 0.05,
                )
            )
        elif kind == "step":
            drawn.append((kind, int(rng.integers(1, 8))))
        elif kind == "keep":
            drawn += [("keep",), ("step", 2), ("resume",)]
        else:
            drawn.append((kind,) if kind == "load" else (kind, number))
    return drawn


LONG_RUN_MIX = [0.56, 0.3, 0.03, 0.02, 0.03, 0.03, 0.03]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_long_runs_equal_an_unbatched_forward(family: str, seed: int) -> None:
    driver = Driver(family)
    play(driver, long_run(seed))
    assert driver.engine.stats().cached_tokens > 0


class StaleKvEngine(TorchEngine):
    """Mutant for I6: goes on with the KV of the old weights."""

    def load_weights(self, handle: WeightHandle) -> None:
        self._model.load(handle.path)
        self._version = handle.version


def test_the_oracle_catches_kv_of_old_weights() -> None:
    driver = Driver("qwen3", StaleKvEngine)
    driver.add(0, 12, 6, 1.0, False)
    driver.step()
    driver.load()
    with pytest.raises(AssertionError):
        driver.finish()


class CarelessKv(HeldKv):
    def usable_tokens(self, ids: np.ndarray, version: int) -> int:
        return min(self.tokens, len(ids))


class CarelessResidency(Residency):
    def settle(self, task: TaskKey, entry: HeldKv | None) -> None:
        super().settle(task, entry and CarelessKv(entry.ids, entry.version, entry.kv))


class CarelessEngine(TorchEngine):
    """Mutant for I8: takes a task's KV for its new context without comparing the ids."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._residency = CarelessResidency(settings.kv_budget_tokens)


def test_the_oracle_catches_kv_of_other_ids() -> None:
    driver = Driver("qwen3", CarelessEngine)
    driver.add(0, 12, 6, 1.0, False)
    driver.finish()
    driver.histories[0] = [(token + 1) % VOCAB_SIZE for token in driver.histories[0]]
    driver.add(0, 3, 6, 1.0, False)
    with pytest.raises(AssertionError):
        driver.finish()


def test_the_oracle_is_causal() -> None:
    """The oracle's own sanity: what follows later does not change an earlier row."""
    short, long = oracle_logprobs("qwen3", 0, [4, 5, 6], 1.0), oracle_logprobs("qwen3", 0, [4, 5, 6, 9], 1.0)
    np.testing.assert_allclose(short, long[:3], atol=1e-6)
