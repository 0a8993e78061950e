"""The trainer's bench compares layouts that compute the same, on batches that are what they are said to be."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import trainer as bench


def test_the_short_form_finds_that_all_layouts_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--short", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gradients_agree"] is True
    assert "recorded" not in result  # it measures nothing


def without_restarts(members: Any, **options: Any) -> Any:
    broken = bench.shared_rows(members, **options)
    return [dataclasses.replace(row, positions=np.arange(len(row.ids))) for row in broken]


def test_a_layout_that_computes_something_else_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = dataclasses.replace(bench.ALTERNATIVES["rows"], layout=partial(without_restarts, max_row_tokens=4096))
    monkeypatch.setitem(bench.ALTERNATIVES, "rows", broken)
    assert bench.main(["--short", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["gradients_agree"] is False


def test_the_baseline_pads_to_the_longest_and_keeps_the_budget_with_its_padding() -> None:
    assert bench.as_they_come([30, 50, 30, 10, 60, 30], 100) == [[0, 1], [2, 3], [4], [5]]
    batches, _ = bench.recorded()
    for batch in batches:
        for packed in bench.ALTERNATIVES["padded"].packed(batch):
            (chunk,) = packed.calls  # one call per micro-batch
            assert chunk.ids.size <= bench.BUDGET_TOKENS


def test_unshared_batches_have_the_same_lengths_and_no_common_beginnings() -> None:
    batches, vocab_size = bench.recorded()
    for batch in batches:
        others = bench.unshared(batch, vocab_size)
        assert [s.tokens for s in others] == [s.tokens for s in batch]
        for old, new in zip(batch, others, strict=True):
            np.testing.assert_array_equal(old.loss_mask, new.loss_mask)
        assert len({tuple(s.ids[:2]) for s in others}) == len(others)
    assert all(len(batch) == 64 for batch in batches)
