"""`tiderl sim --trace` and `--calibrate` as a user meets them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tiderl.cli.main import execute

ROOT = Path(__file__).parents[2]
BUILTIN = str(ROOT / "examples" / "builtin.yaml")
SMALL = ["-o", "train.updates=3", "-o", "train.global_batch_groups=2", "-o", "eval.every_updates=0"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_recorded_run_is_replayed_and_compared(capsys: Capture) -> None:
    assert execute(["sim", BUILTIN, *SMALL, "--save", "r1"]) == 0
    capsys.readouterr()
    assert execute(["sim", "--trace", "runs/r1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["error_fraction"] < 0.01
    assert result["measured_step_s"] == pytest.approx(result["predicted_step_s"], rel=0.01)
    assert result["calibration"]["constants"]["iteration_s"] > 0


def test_people_are_told_the_prediction_and_the_residuals(capsys: Capture) -> None:
    assert execute(["sim", BUILTIN, *SMALL, "--save", "r1"]) == 0
    assert execute(["sim", "--trace", "r1"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"predicted +step time .* s, measured .*% off", text)
    assert "the run cannot tell: pass_s" in text
    assert re.search(r"residuals +engine iterations: .*% rms", text)
    assert execute(["sim", BUILTIN, *SMALL, "--calibrate", "r1"]) == 0
    text = capsys.readouterr().out
    assert "calibrated" in text and "residuals" in text and "measured" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sim"], "give a configuration file, or --trace"),
        (["sim", "--trace", "runs/none"], "no such run or file"),
        (["sim", BUILTIN, "--trace", "nofile.csv"], "nofile.csv: no such run or file"),
        (["sim", BUILTIN, "--calibrate", "none"], "no such run"),
        (["sim", "--trace", "r1", "--dry-run"], "do not go with --trace"),
        (["sim", "--trace", "r1", "--swarm", "3"], "do not go with --trace"),
        (["sim", BUILTIN, "--swarm", "3", "--calibrate", "r1"], "do not go with --calibrate"),
    ],
)
def test_a_mistake_is_two_lines_at_most_and_code_2(arguments: list[str], said: str, capsys: Capture) -> None:
    assert execute(arguments) == 2
    found = capsys.readouterr()
    assert said in found.err and found.out == "" and len(found.err.strip().splitlines()) <= 2


def test_a_run_too_short_to_calibrate_from_is_refused(capsys: Capture) -> None:
    few = ["-o", "train.updates=1", "-o", "train.global_batch_groups=1", "-o", "algorithm.group_size=2"]
    assert execute(["sim", BUILTIN, *few, "-o", "eval.every_updates=0", "--save", "short"]) == 0
    capsys.readouterr()
    assert execute(["sim", "--trace", "short"]) == 2
    assert "too few to calibrate from" in capsys.readouterr().err


def test_a_trace_with_a_missing_column_is_refused_with_its_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "turns.csv"
    file.write_text("traj,turn,output_tokens\n0,0,3\n", encoding="utf-8")
    assert execute(["sim", "--trace", str(file)]) == 2
    assert f"{file}:1" in capsys.readouterr().err
