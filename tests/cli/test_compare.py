"""`tiderl compare`: strategies side by side, mistakes in two lines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiderl.cli.main import execute

BUILTIN = str(Path(__file__).parents[2] / "examples" / "builtin.yaml")
SMALL = ["-o", "train.updates=3", "-o", "train.global_batch_groups=2", "-o", "eval.every_updates=0"]


def test_the_json_holds_the_workload_and_each_strategys_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["compare", BUILTIN, "--strategies", "sync,areal", *SMALL, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    common = shown["workload"].pop("common_bound_tokens_per_s")
    assert shown["workload"] == {
        "config": "builtin.yaml", "clock": "virtual", "seed": 0, "ranks": 2, "updates": 3, "groups": 2, "group_size": 8,
    }  # fmt: skip
    assert list(shown["strategies"]) == ["sync", "areal"]
    sync, areal = shown["strategies"].values()
    assert (sync["strategy"], areal["strategy"]) == ("sync", "areal")
    assert (sync["staleness_max"], areal["staleness_max"]) == (0, 1)
    assert sync["goodput_ratio"] == 1.0
    assert common == max(sync["bound_tokens_per_s"], areal["bound_tokens_per_s"])
    assert sync["rho_common"] == sync["goodput_tokens_per_s"] / common <= 1
    assert areal["goodput_ratio"] == areal["goodput_tokens_per_s"] / sync["goodput_tokens_per_s"]
    assert sum(areal["account"].values()) == areal["account_total_rank_s"]


def test_the_table_has_a_column_a_strategy_and_says_what_was_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["compare", BUILTIN, *SMALL, "-o", "schedule.max_staleness=3"]) == 0
    shown = capsys.readouterr().out
    assert "sync" in shown and "areal" in shown and "goodput" in shown
    assert "sync: schedule.max_staleness has no effect" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategies", "sync,nonsense"], "unknown strategy 'nonsense'"),
        (["--strategies", "sync,sync"], "sync is named twice"),
        (["--strategies", ","], "no strategy to compare"),
        (["--strategies", "tide"], "not yet supported"),
        (["-o", "schedule.strategy=areal"], "schedule.strategy is what is compared"),
        (["-o", "train.updates=0"], "train.updates"),
    ],
)
def test_mistakes_are_said_in_two_lines_before_anything_runs(arguments, expected, capsys) -> None:
    assert execute(["compare", BUILTIN, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert expected in shown.err
    assert len(shown.err.strip().splitlines()) <= 2


@pytest.mark.live
def test_live_each_strategy_trains_in_turn(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [*SMALL, "-o", "train.updates=1", "-o", "warmup.updates=1", "-o", "cluster.kind=inline", "-o", "run=both"]
    assert execute(["compare", BUILTIN, "--strategies", "sync,areal", "--live", *tiny, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["strategies"]
    assert [Path(result["run_dir"]).name for result in shown.values()] == ["both-sync", "both-areal"]
    assert all(result["updates"] == 1 for result in shown.values())


@pytest.mark.live
@pytest.mark.timeout(120)
def test_ctrl_c_in_a_live_comparison_ends_it_and_starts_no_other_strategy(tmp_path) -> None:
    long = [*SMALL, "-o", "train.updates=2000", "-o", "warmup.updates=1", "-o", "cluster.kind=inline", "-o", "run=both"]
    running = subprocess.Popen(
        [sys.executable, "-m", "tiderl.cli.main", "compare", BUILTIN, "--strategies", "sync,areal", "--live", *long],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "runs" / "both-sync" / "metrics.jsonl"
    deadline_s = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline_s and running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    shown, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert shown == ""
    assert "stopped in sync, strategy 1 of 2; nothing is compared" in said
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["both-sync"]
