"""`tiderl compare`: strategies side by side, mistakes in two lines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tiderl.api.compare import compare
from tiderl.cli.main import execute
from tiderl.data.errors import RunStopped

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


SCARCE = ["-o", "rollout.max_context_tokens=128", "-o", "rollout.kv_budget_tokens=300", "-o", "env.slots=32"]
CTB_ONLY = ["-o", "rollout.growth_z=2", "-o", "rollout.priority=weighted", "-o", "rollout.priority_weights.group=9"]


def test_a_name_may_carry_the_kv_policy_so_that_both_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["areal", "areal+ctb", "sync+lru"]
    command = ["compare", BUILTIN, "--strategies", ",".join(names), *SMALL, *SCARCE, *CTB_ONLY]
    assert execute([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["strategies"]
    assert list(found) == names
    assert [found[name]["strategy"] for name in names] == ["areal", "areal", "sync"]
    assert [found[name]["kv_policy"] for name in names] == ["lru", "ctb", "lru"]
    assert [found[name]["tasks_paused"] is None for name in names] == [True, False, True]
    said = {name: [line for line in found[name]["no_effect"] if line.startswith("rollout.")] for name in names}
    assert said["areal+ctb"] == []
    assert found["areal+ctb"]["kv_priority_weights"]["group"] == 9.0
    dropped = ["rollout.growth_z", "rollout.priority", "rollout.priority_weights.group"]
    for name in ("areal", "sync+lru"):
        assert said[name] == [f"{key} has no effect: rollout.kv_policy is lru" for key in dropped]
    assert execute(command) == 0
    shown = capsys.readouterr().out
    assert "areal+ctb" in shown and "re-prefilled tokens" in shown
    assert "sync+lru: rollout.growth_z has no effect: rollout.kv_policy is lru" in " ".join(shown.split())


def test_a_simulation_is_the_same_whatever_it_is_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["compare", BUILTIN, "--strategies", "sync,areal+ctb", *SMALL, *SCARCE, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["strategies"]["areal+ctb"]
    assert execute(["sim", BUILTIN, *SMALL, *SCARCE, "-o", "rollout.kv_policy=ctb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["log_sha256"] == compared["log_sha256"]


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
        (["--strategies", "areal,areal+mru"], "unknown KV policy 'mru' in 'areal+mru'"),
        (["--strategies", "areal+"], "unknown KV policy ''"),
        (["--strategies", "nonsense+ctb"], "unknown strategy 'nonsense'"),
        (
            ["--strategies", "sync,areal+lru,areal"],
            "areal+lru and areal are the same: rollout.kv_policy is lru in both",
        ),
        (["--strategies", "sync,areal+ctb", "-o", "rollout.kv_policy=lru"], "rollout.kv_policy is what is compared"),
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


def test_ctrl_c_in_a_comparison_says_how_far_it_came(capsys) -> None:
    def interrupt(text: str) -> None:
        if text == "sync (1 of 2)":
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    sizes = [text for text in SMALL if text != "-o"]
    with pytest.raises(RunStopped) as stopped:
        compare(BUILTIN, ["sync", "areal"], [*sizes, "train.updates=100000"], progress=interrupt)
    assert re.fullmatch(
        r"sync \(1 of 2\): stopped after [\d,]+ of 100,000 updates simulated; nothing is kept or compared",
        stopped.value.what,
    )


@pytest.mark.live
def test_live_each_strategy_trains_in_turn(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [*SMALL, "-o", "train.updates=1", "-o", "warmup.updates=1", "-o", "cluster.kind=inline", "-o", "run=both"]
    assert execute(["compare", BUILTIN, "--strategies", "sync,areal", "--live", *tiny, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["strategies"]
    assert [Path(result["run_dir"]).name for result in shown.values()] == ["both-sync", "both-areal"]
    assert all(result["updates"] == 1 for result in shown.values())


@pytest.mark.live
def test_live_both_kv_policies_train_in_turn(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [*SMALL, "-o", "train.updates=1", "-o", "warmup.updates=1", "-o", "cluster.kind=inline", "-o", "run=both"]
    assert execute(["compare", BUILTIN, "--strategies", "areal+lru,areal+ctb", "--live", *tiny, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["strategies"]
    assert [Path(result["run_dir"]).name for result in shown.values()] == ["both-areal+lru", "both-areal+ctb"]
    assert [result["kv_policy"] for result in shown.values()] == ["lru", "ctb"]


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
