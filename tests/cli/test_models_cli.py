"""`tiderl eval` and `tiderl export` as a user meets them before anything is loaded: help, mistakes, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiderl.cli.main import execute

BUILTIN = str(Path(__file__).parents[2] / "examples" / "builtin.yaml")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDERL_DEBUG", raising=False)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("eval", ["CONFIG|RUN", "--model", "--samples", "--show", "--json", "held-out"]),
        ("export", ["RUN", "--update", "--to", "Hugging Face"]),
    ],
)
def test_help_tells_what_the_command_does(command: str, expected: list[str], capsys: Capture) -> None:
    assert execute([command, "--help"]) == 0
    text = capsys.readouterr().out
    for part in expected:
        assert part in text


MISTAKES = [
    (("eval",), "Missing argument"),
    (("eval", "nowhere"), "nowhere: no such run"),
    (("eval", "nowhere.yaml"), "nowhere.yaml: no such configuration file"),
    (("eval", BUILTIN), "learnt nothing yet", "--model DIR"),
    (("eval", BUILTIN, "--samples", "0"), "--samples"),
    (("eval", BUILTIN, "--model", "./nowhere"), "no such folder: ./nowhere"),
    (("eval", BUILTIN, "--model", "."), "no config.json"),
    (("eval", BUILTIN, "-o", "eval.promts=3"), "did you mean eval.prompts?"),
    (("export", "nowhere", "--to", "x"), "nowhere: no such run"),
    (("export", "nowhere"), "--to"),
    (("train", BUILTIN, "-o", "model.tokenizer=chat"), "no chat template"),
    (("train", BUILTIN, "-o", "log.trackers=[wandb]"), "'wandb' is not yet supported; use tensorboard"),
    (("train", BUILTIN, "-o", "log.trackers=[tensorbord]"), "must be 'tensorboard'"),
]


@pytest.mark.parametrize(("arguments", "expected"), [(m[0], m[1:]) for m in MISTAKES])
def test_a_mistake_is_two_lines_on_stderr_and_exit_code_2(
    arguments: tuple[str, ...], expected: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    assert execute(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) <= 2
    for part in expected:
        assert part in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_model_yet_says_how_to_get_one(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("env: {name: builtin}\n", encoding="utf-8")
    (tmp_path / "run" / "config.lock.json").write_text("{}", encoding="utf-8")  # as a run that trains
    assert execute(["eval", "run"]) == 2
    assert "no model yet" in (said := capsys.readouterr().err) and "tiderl export run --to DIR" in said
    assert execute(["export", "run", "--to", "x"]) == 1
    assert "there is no journal" in capsys.readouterr().err
