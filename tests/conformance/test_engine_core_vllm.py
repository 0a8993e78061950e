"""vLLM keeps what every `EngineCore` promises, under both KV policies and with each scheduler.

On a CPU vLLM always schedules synchronously, so `async` tries that class's bookkeeping here, not its overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.engine_core_suite import CHECKS, Make, Subject
from support.vllm_models import BLOCK_TOKENS, engine_settings, weights

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.live]

from tiderl.engines.vllm_engine import VllmEngine, build  # noqa: E402 only where vLLM is installed


@pytest.fixture
def engines() -> Iterator[list[VllmEngine]]:
    made: list[VllmEngine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("kv_policy", "scheduler"), [("ctb", "sync"), ("ctb", "async"), ("ctb", "none"), ("lru", "auto")]
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_vllm_engine(check: Callable[[Make], None], kv_policy: str, scheduler: str, engines: list[VllmEngine]) -> None:
    def make(budget_tokens: int) -> Subject:
        settings = engine_settings(
            kv_budget_tokens=budget_tokens,
            kv_policy=kv_policy,
            task_scheduler=scheduler,
            max_batch=4,
            prefill_tokens_per_step=256,
        )
        engines.append(build(settings))
        return Subject(engines[-1], lambda version: weights("tied", version), budget_tokens)

    make.block_tokens = BLOCK_TOKENS  # type: ignore[attr-defined]
    check(make)
