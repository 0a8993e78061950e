"""Runs over a mixture of environments: live, resumed, on virtual time."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import counting_env

from tiderl.cli.main import execute

pytestmark = pytest.mark.live

CONFIG = f"""
env:
  - {{name: "{counting_env.__file__}:Counting", weight: 3}}
  - {{name: "{counting_env.__file__}:Counting", options: {{scale: 0.5}}, weight: 1, deadline_s: 5}}
model: {{layers: 1, hidden: 16, heads: 2, kv_heads: 1}}
warmup: {{demos: 4, updates: 1}}
rollout: {{max_turns: 6, max_context_tokens: 64, max_new_tokens_per_turn: 2}}
algorithm: {{group_size: 2}}
train: {{updates: 4, global_batch_groups: 4, micro_batch_tokens: 64}}
cluster: {{kind: inline, ranks: 1}}
eval: {{every_updates: 2, prompts: 8}}
"""
ONE, TWO = "counting_env.py:Counting#1", "counting_env.py:Counting#2"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mix.yaml").write_text(CONFIG)


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = execute([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def issued(run: str) -> list[str]:
    with sqlite3.connect(f"runs/{run}/journal.sqlite") as journal:
        return [row[0] for row in journal.execute("select task_id from prompts order by prompt_id")]


def environments_of(task_ids: list[str]) -> Counter[str]:
    return Counter(task_id.rpartition("/")[0] for task_id in task_ids)


def test_a_run_trains_on_the_mixture_and_keeps_its_figures_apart(capsys: pytest.CaptureFixture[str]) -> None:
    run = result(capsys, "train", "mix.yaml", "-o", "run=mixed")
    assert environments_of(issued("mixed")[:16]) == {ONE: 12, TWO: 4}
    assert set(run["environments"]) == {ONE, TWO}
    assert sum(figures["trained"] for figures in run["environments"].values()) == run["trained"] == 32
    rows = [json.loads(line) for line in Path("runs/mixed/metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "update"]
    assert all(sum(part["groups"] for part in row["environments"].values()) == 4 for row in updates)
    evaluations = [row for row in rows if row["kind"] == "eval"]
    assert all([part["prompts"] for part in row["environments"].values()] == [6, 2] for row in evaluations)


def test_a_resumed_mixture_goes_on_in_the_order_of_an_uninterrupted_one(capsys: pytest.CaptureFixture[str]) -> None:
    result(capsys, "train", "mix.yaml", "-o", "run=whole")
    result(capsys, "train", "mix.yaml", "-o", "run=parts", "-o", "train.updates=2")
    result(capsys, "train", "--resume", "runs/parts", "-o", "train.updates=4")
    assert issued("parts") == issued("whole")


def test_virtual_time_mixes_alike(capsys: pytest.CaptureFixture[str]) -> None:
    first = result(
        capsys, "sim", "mix.yaml", "-o", "rollout.max_context_tokens=512", "-o", "train.micro_batch_tokens=512"
    )
    again = result(
        capsys, "sim", "mix.yaml", "-o", "rollout.max_context_tokens=512", "-o", "train.micro_batch_tokens=512"
    )
    assert first["log_sha256"] == again["log_sha256"]
    assert {name: figures["trained"] for name, figures in first["environments"].items()} == {ONE: 24, TWO: 8}
    assert all(figures["eval_success_last"] is None for figures in first["environments"].values())
