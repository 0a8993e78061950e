"""The embedded engine keeps what every `EngineCore` promises, for each model family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.engine_core_suite import CHECKS, Make, Subject
from support.tiny_models import FAMILIES, engine_settings, weights

from tiderl.engines.torch_engine import build


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_torch_engine(check: Callable[[Make], None], family: str) -> None:
    def make(budget_tokens: int) -> Subject:
        engine = build(engine_settings(family, kv_budget_tokens=budget_tokens, max_batch=4, prefill_tokens_per_step=16))
        return Subject(engine, lambda version: weights(family, version), budget_tokens)

    check(make)
