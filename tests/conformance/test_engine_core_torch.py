"""The embedded engine keeps what every `EngineCore` promises, for each model family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.by_task_suite import BY_TASK_CHECKS
from support.engine_core_suite import CHECKS, Make, Subject
from support.tiny_models import FAMILIES, engine_settings, weights

from tiderl.engines.torch_engine import build


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_torch_engine(check: Callable[[Make], None], family: str) -> None:
    check(lambda budget_tokens: subject(family, budget_tokens, host_kv_budget_tokens=100))


@pytest.mark.parametrize("check", [*CHECKS, *BY_TASK_CHECKS], ids=lambda check: check.__name__.removeprefix("check_"))
def test_torch_engine_by_task(check: Callable[[Make], None]) -> None:
    check(lambda budget_tokens: subject("qwen3", budget_tokens, kv_policy="ctb", host_kv_budget_tokens=100))


def subject(family: str, budget_tokens: int, **changes: object) -> Subject:
    small = {"kv_budget_tokens": budget_tokens, "max_batch": 4, "prefill_tokens_per_step": 16}
    engine = build(engine_settings(family, **small, **changes))
    return Subject(engine, lambda version: weights(family, version), budget_tokens)
