"""A short real run under `rollout.kv_policy=ctb`, in one process: trained, resumed, replayed, evaluated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.kills import TINY

from tiderl.cli.main import execute
from tiderl.store.recorder import read_events

pytestmark = pytest.mark.live

RUN = Path("runs/c")
SHORT = [
    *("run=c", "cluster.kind=inline", "rollout.kv_policy=ctb", "rollout.kv_budget_tokens=400"),
    *("train.updates=2", "checkpoint.every_updates=1", "eval.every_updates=2"),
    "env.wait={kind: lognormal, median_s: 0.01, sigma: 0.5}",
]
Capture = pytest.CaptureFixture[str]


def run_json(capsys: Capture, *arguments: str) -> dict:
    assert execute([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_under_ctb_trains_goes_on_is_replayed_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY, encoding="utf-8")
    overrides = [part for override in SHORT for part in ("-o", override)]
    first = run_json(capsys, "train", "tiny.yaml", *overrides)
    assert (first["updates"], first["kv_policy"], first["kv_priority"]) == (2, "ctb", "tiers")

    whole = run_json(capsys, "train", "--resume", str(RUN), "-o", "train.updates=4")
    events = list(read_events(RUN / "events"))
    counted = Counter(type(event).__name__ for event in events)
    assert whole["updates"] == 4 and counted["RunStarted"] == 2
    assert whole["tasks_paused"] == counted["TaskPaused"] == counted["TaskResumed"]
    turns = [event for event in events if type(event).__name__ == "TurnFinished" and event.split == "train"]
    cached, context = sum(turn.cached_tokens for turn in turns), sum(turn.context_tokens for turn in turns)
    assert whole["kv_hit_fraction"] == cached / context > 0
    assert whole["kv_reprefilled_tokens"] >= first["kv_reprefilled_tokens"]

    replayed = run_json(capsys, "sim", "--trace", str(RUN))
    assert (replayed["kv_policy"], replayed["updates"], replayed["trained"]) == ("ctb", 4, whole["trained"])
    assert replayed["trained_loss_tokens"] == whole["trained_loss_tokens"]

    judged = run_json(capsys, "eval", str(RUN), "-o", "eval.prompts=12", "-o", "rollout.growth_z=2", "--samples", "2")
    assert (judged["prompts"], judged["episodes"], judged["failed"], judged["no_effect"]) == (12, 24, 0, [])
