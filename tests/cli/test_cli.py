"""The command line as a user meets it: what it prints where, exit codes, and one or two lines for a mistake."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from tiderl.cli.main import execute
from tiderl.observe.definitions import DEFINITIONS

ROOT = Path(__file__).parents[2]
BUILTIN = str(ROOT / "examples" / "builtin.yaml")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDERL_DEBUG", raising=False)


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "tiderl.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((), ["train", "sim", "show", "doctor", "env"]),
        (("train",), ["examples/babyai.yaml", "--dry-run", "--json", "--overwrite", "Ctrl-C"]),
        (("sim",), ["virtual clock", "--save", "SHA-256", "--swarm", "--seed"]),
        (("show",), ["--last", "RUN"]),
        (("doctor",), ["--json"]),
        (("env",), ["list", "check", "play"]),
        (("env", "check"), ["NAME", "-o"]),
        (("env", "play"), ["NAME"]),
    ],
)
def test_help_tells_what_a_command_does(command: tuple[str, ...], expected: list[str], capsys: Capture) -> None:
    assert execute([*command, "--help"]) == 0
    text = capsys.readouterr().out
    for part in expected:
        assert part in text


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from tiderl.cli.main import execute; execute(['--help']); execute(['--version']);"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'scipy', 'plotly', 'minigrid', 'asyncio'};"
        "sys.exit(sorted(heavy & sys.modules.keys()) and 1 or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tiderl \d+\.\d+", done.stdout)


MISTAKES = [
    ((), "Usage: tiderl"),
    (("frobnicate",), "No such command 'frobnicate'", "tiderl --help"),
    (("train",), "give a configuration file, or --resume RUN", "tiderl train --help"),
    (("train", BUILTIN, "--resume", "x"), "not both"),
    (("train", "--foo", BUILTIN), "No such option", "tiderl train --help"),
    (("train", "nowhere.yaml"), "nowhere.yaml: no such configuration file"),
    (("train", BUILTIN, "-o", "train.lrr=1"), "unknown key train.lrr", "did you mean train.lr?"),
    (("train", BUILTIN, "-o", "train.lr=fast"), "train.lr must be a number"),
    (("train", BUILTIN, "-o", "train.steps_per_batch=3"), "do not divide"),
    (("train", BUILTIN, "-o", "rollout.kv_budget_tokens=9"), "cannot hold one task"),
    (("train", BUILTIN, "-o", "model.path=./nowhere"), "no such folder"),
    (("train", BUILTIN, "-o", "env.name=bulitin"), "no environment is called 'bulitin'", "did you mean 'builtin'?"),
    (("train", BUILTIN, "-o", "env.name=./mine.py:Mine"), "there is no file mine.py"),
    (("sim", BUILTIN, "-o", "sim.hardwear=x"), "unknown key sim.hardwear", "did you mean sim.hardware?"),
    (("show", "nowhere"), "nowhere: no such run"),
    (("show", "x", "--last", "0"), "--last"),
    (("env", "check", "bulitin"), "no environment is called"),
    (("env", "check", "builtin", "-o", "size"), "KEY=VALUE"),
]


@pytest.mark.parametrize(("arguments", "expected"), [(m[0], m[1:]) for m in MISTAKES])
def test_a_mistake_is_two_lines_on_stderr_and_exit_code_2(
    arguments: tuple[str, ...], expected: tuple[str, ...], capsys: Capture
) -> None:
    dry = ["--dry-run"] if arguments[:1] in (("train",), ("sim",)) and len(arguments) > 2 else []
    assert execute([*arguments, *dry]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    assert len(said.err.splitlines()) <= 2 or said.err.startswith("Usage:")
    for part in expected:
        assert part in said.err


def test_the_traceback_is_one_variable_away() -> None:
    assert "Traceback" not in child("train", "nowhere.yaml", "--dry-run").stderr
    done = child("train", "nowhere.yaml", "--dry-run", TIDERL_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr and "nowhere.yaml: no such configuration file" in done.stderr


def test_a_dry_run_prints_a_file_and_starts_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert execute(["train", BUILTIN, "-o", "train.updates=7", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["train"]["updates"] == 7
    assert re.search(r"updates: 7 +# -o\n", text) and re.search(r"loss: decoupled_ppo +# strategy\n", text)
    assert list(tmp_path.iterdir()) == []
    again = tmp_path / "again.yaml"
    again.write_text(text, encoding="utf-8")
    assert execute(["train", str(again), "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"] == yaml.safe_load(text)
    assert shown["origins"]["train.updates"] == "file" and shown["no_effect"] == []


def test_a_dry_run_says_what_has_no_effect(capsys: Capture) -> None:
    execute(["train", BUILTIN, "-o", "sim.workload_seed=2", "--dry-run"])
    assert "# sim.workload_seed has no effect: it is read by `tiderl sim` only" in capsys.readouterr().out
    execute(["sim", BUILTIN, "-o", "train.lr=1e-4", "--dry-run", "--json"])
    assert json.loads(capsys.readouterr().out)["no_effect"] == [
        "train.lr has no effect: virtual time does not model it"
    ]


def test_a_simulation_prints_one_json_object_the_same_twice(capsys: Capture) -> None:
    answers = []
    for _ in range(2):
        assert execute(["sim", BUILTIN, "-o", "train.updates=3", "-o", "eval.prompts=10", "--json"]) == 0
        said = capsys.readouterr()
        assert len(said.out.splitlines()) == 1 and "done after 3 updates" in said.err
        answers.append(json.loads(said.out))
    assert answers[0]["log_sha256"] == answers[1]["log_sha256"]
    assert set(answers[0]) >= {*DEFINITIONS, "run_dir", "wall_s", "driver_load_fraction", "events", "no_effect"}


def test_a_simulation_without_json_prints_its_summary_on_stdout(capsys: Capture) -> None:
    assert execute(["sim", BUILTIN, "-o", "train.updates=2", "-o", "train.lr=1e-4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("done after 2 updates") and "note: train.lr has no effect" in text


def interrupt_after(seconds: float, number: int = signal.SIGINT) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def test_a_simulation_that_is_stopped_says_how_far_it_came(tmp_path: Path, capsys: Capture) -> None:
    assert execute(["sim", BUILTIN, "-o", "train.updates=1"]) == 0  # imports what a simulation needs
    cases = (
        (signal.SIGINT, [], "nothing is kept"),
        (signal.SIGTERM, ["--save", "x"], "its events so far are in runs/x/events"),
    )
    for number, save, kept in cases:
        capsys.readouterr()
        interrupt_after(1.5, number)
        assert execute(["sim", BUILTIN, "-o", "train.updates=1000000", "--json", *save]) == 130
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.fullmatch(rf"tiderl: stopped after [\d,]+ of 1,000,000 updates simulated; {kept}\n", shown.err)


def test_ctrl_c_in_a_command_that_keeps_no_count_is_still_told(capsys: Capture) -> None:
    interrupt_after(0.5)
    slow = "import time\nfrom tiderl.envs.builtin import Fetch as Mine\ntime.sleep(20)\n"
    Path("slow.py").write_text(slow)
    assert execute(["env", "check", "./slow.py:Mine"]) == 130
    assert capsys.readouterr().err == "tiderl: stopped\n"


def test_a_saved_simulation_is_not_trained_on_and_not_written_over(capsys: Capture) -> None:
    assert execute(["sim", BUILTIN, "-o", "train.updates=1", "--save", "kept"]) == 0
    before = {path: path.read_bytes() for path in Path("runs/kept").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert execute(["train", "--resume", "kept"]) == 2
    assert "this is a saved simulation, of which nothing can be gone on with\n  train its" in capsys.readouterr().err
    assert execute(["show", "kept"]) == execute(["eval", "kept"]) == execute(["export", "kept", "--to", "x"]) == 2
    shown = capsys.readouterr().err
    assert "saved simulation, whose turns have no texts" in shown
    assert shown.count("saved simulation, which has no model") == 2
    assert execute(["sim", BUILTIN, "-o", "train.updates=1", "--save", "kept"]) == 2
    assert "this run exists\n  choose another name for --save" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in Path("runs/kept").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([BUILTIN, "--dry-run", "--save", "x"], "--save does not go with --dry-run"),
        (["--trace", "runs/none", "--seed", "2"], "--seed goes with --swarm"),
    ],
)
def test_options_of_a_simulation_that_would_do_nothing_are_refused(
    arguments: list[str], said: str, capsys: Capture
) -> None:
    assert execute(["sim", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_environments_are_listed_without_importing_them(capsys: Capture) -> None:
    assert execute(["env", "list"]) == 0
    assert {"babyai", "builtin"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert execute(["env", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["environments"]}
    assert rows["builtin"]["installed"] and rows["builtin"]["extra"] is None
    assert rows["babyai"]["extra"] == "babyai"


def test_the_doctor_answers_in_json_too(capsys: Capture) -> None:
    assert execute(["doctor", "--quick", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    assert {"name", "status", "detail", "hint"} == answer["checks"][0].keys()
    assert execute(["doctor", "--quick"]) == 0
    assert re.search(r"ok +python +3\.", capsys.readouterr().out)


def test_a_closed_pipe_is_no_error_report() -> None:
    command = f"{sys.executable} -m tiderl.cli.main train {BUILTIN} --dry-run | true"
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_env_check_says_what_holds_and_exits_by_it(tmp_path: Path, capsys: Capture) -> None:
    assert execute(["env", "check", "builtin", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["figures"]["expert_turns_p50"] > 1
    (tmp_path / "bad.py").write_text(NO_DISJOINT_TASK_SETS, encoding="utf-8")
    assert execute(["env", "check", "./bad.py:Bad"]) == 1
    assert "PROBLEM  task sets" in capsys.readouterr().out


def test_env_play_takes_actions_from_stdin() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tiderl.cli.main", "env", "play", "builtin"],
        input="forward\nquit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("reward in all: 0")


NO_DISJOINT_TASK_SETS = """
from tiderl import Environment, Prompt, Step

class Bad(Environment):
    @classmethod
    def prompts(cls, split, **options):
        return [Prompt(str(seed), seed) for seed in range(4)]

    def reset(self, prompt):
        return "say go"

    def step(self, action):
        return Step("well done", reward=1.0, terminated=True)
"""
