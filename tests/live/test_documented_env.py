"""The environment that docs/environments.md begins with is checked and trained as the page says; so are `init`'s."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.docs import ROOT, fenced

from tiderl.cli.init import TEMPLATES
from tiderl.cli.main import execute
from tiderl.config.machine import prepare

pytestmark = pytest.mark.live

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
COMMANDS = [line.split() for line in fenced(PAGE, "text")[0].splitlines()]
TWO_UPDATES = ["-o", "train.updates=2", "-o", "warmup.updates=3", "-o", "eval.prompts=4", "--json"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = execute(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def check_and_train(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "env", "check", "./mine.py:Mine", "--json")
    report = json.loads(out)
    assert code == 0 and report["ok"]
    assert {finding["verdict"] for finding in report["findings"]} == {"ok"}, report["findings"]
    code, out, err = run(capsys, "train", "mine.yaml", *TWO_UPDATES)
    assert code == 0, err
    result = json.loads(out)
    assert (result["outcome"], result["updates"], result["faults"], result["no_effect"]) == ("done", 2, {}, [])
    assert result["trained"] > 0


def test_the_page_begins_with_an_environment_that_is_fit_for_training_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = fenced(PAGE, "python")[0]
    assert len(source.splitlines()) <= 40
    Path("mine.py").write_text(source)
    Path("mine.yaml").write_text(fenced(PAGE, "yaml")[0])
    assert COMMANDS == [["tiderl", "env", "check", "./mine.py:Mine"], ["tiderl", "train", "mine.yaml"]]
    check_and_train(capsys)


def test_init_env_writes_an_environment_that_is_fit_for_training_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "init", "env")
    assert code == 0 and "next: tiderl env check ./mine.py:Mine" in out
    check_and_train(capsys)


@pytest.mark.parametrize("what", sorted(TEMPLATES))
def test_init_never_overwrites_and_then_writes_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    last = list(TEMPLATES[what])[-1]
    Path(last).write_text("precious")
    code, out, err = run(capsys, "init", what)
    assert code == 2 and out == "" and f"{last} is there already" in err
    assert [path.name for path in tmp_path.iterdir()] == [last]
    assert Path(last).read_text() == "precious"


def test_init_babyai_writes_the_example_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "init")
    assert code == 0 and "wrote babyai.yaml" in out
    example = (ROOT / "examples" / "babyai.yaml").read_text()
    assert Path("babyai.yaml").read_text() == example.replace("examples/", "")
    prepare("babyai.yaml", command="train")
