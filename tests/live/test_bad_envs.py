"""Environments that are wrong or behave badly: what each gets from `env check` and from `train`, in a line or two."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tiderl.cli.main import execute

pytestmark = pytest.mark.live

GOOD = """
import ctypes, itertools, os, subprocess, sys, threading, time
from tiderl import Environment, Prompt, Step

class Base(Environment):
    @classmethod
    def prompts(cls, split, **options):
        return [Prompt(f"{split}-{number}", number, {"split": split}) for number in range(4)]
    @classmethod
    def vocabulary(cls, **options):
        return ["go", "stop", "done"]
    def reset(self, prompt):
        return "go"
    def step(self, action):
        return Step("done", 1.0, terminated=True)
    def expert(self, prompt):
        return ["go"]

"""
PROMPTS = " @classmethod\n def prompts(cls, split, **options):\n"

CONFIG = """
env: {{name: {path}:Mine, isolation: process, deadline_s: {deadline_s}}}
model: {{layers: 1, hidden: 16, heads: 2, kv_heads: 1}}
warmup: {{demos: 0, updates: 0}}
rollout: {{max_turns: 2, max_context_tokens: 32, max_new_tokens_per_turn: 2}}
algorithm: {{group_size: 2}}
train: {{updates: 2, global_batch_groups: 2, micro_batch_tokens: 64}}
cluster: {{kind: inline, ranks: 1}}
eval: {{every_updates: 0}}
"""


@dataclass(frozen=True)
class Case:
    """`loads`: it can be imported and is an environment, so that `env check` goes on to what it does."""

    name: str
    text: str
    says: str
    loads: bool = True
    deadline_s: float = 20.0


def mine(body: str) -> str:
    return f"{GOOD}class Mine(Base):\n{body}"


CASES = (
    Case("syntax error", "def f(:\n", "syntax error", loads=False),
    Case("no such class", GOOD, "it has no class 'Mine'", loads=False),
    Case("missing method", "class Mine:\n def reset(self, prompt): ...\n", "it has no prompts, step", loads=False),
    Case("import fails", "import no_such_package\n", "importing it raised ModuleNotFoundError", loads=False),
    Case("import exits", "import sys\nsys.exit(3)\n", "importing it raised SystemExit", loads=False),
    Case("import leaves", "import os\nos._exit(3)\n", "died while loading", loads=False),
    Case("import segfaults", "import ctypes\nctypes.string_at(0)\n", "died while loading", loads=False),
    Case("odd memory limit", mine(" memory_limit_bytes = '1 GB'\n"), "not a number of bytes", loads=False),
    Case(
        "endless generator",
        mine(PROMPTS + "  for n in itertools.count(): yield Prompt(str(n))\n"),
        "(generator), not a list of Prompt",
    ),
    Case("endless prompts", mine(PROMPTS + "  while True: time.sleep(1)\n"), "no answer to prompts", deadline_s=0.3),
    Case(
        "endless list",
        mine(f" memory_limit_bytes = 150 * 2**20\n{PROMPTS}  return [Prompt(str(n)) for n in itertools.count()]\n"),
        "took more memory than it may",
    ),
    Case("prompts of text", mine(PROMPTS + "  return ['go']\n"), "the task set holds 'go' (str)"),
    Case("two alike", mine(PROMPTS + "  return [Prompt('a'), Prompt('a')]\n"), "have the same id"),
    Case("prompts raise", mine(PROMPTS + "  return [] + None\n"), "TypeError"),
    Case("vocabulary of numbers", mine(" @classmethod\n def vocabulary(cls): return [1]\n"), "the list holds 1 (int)"),
    Case("reset raises", mine(" def reset(self, prompt): raise KeyError('shelf')\n"), "KeyError: 'shelf'"),
    Case("reset says nothing", mine(" def reset(self, prompt): pass\n"), "the observation is None"),
    Case("reset segfaults", mine(" def reset(self, prompt): ctypes.string_at(0)\n"), "killed by SIGSEGV"),
    Case("reset hangs", mine(" def reset(self, prompt): time.sleep(60)\n"), "no answer to reset", deadline_s=0.3),
)
table = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@table
def test_env_check_tells_in_a_line_what_is_wrong(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(case.text)
    code = execute(["env", "check", f"{path}:Mine", "--deadline-s", str(case.deadline_s)])
    out, err = capfd.readouterr()
    assert case.says in (out if case.loads else err)
    if case.loads:
        assert code == 1 and err == ""
        assert len([line for line in out.splitlines() if line.startswith("PROBLEM")]) == 1
    else:
        assert code == 2 and out == ""
        assert len(err.strip().splitlines()) <= 2


@table
def test_train_refuses_it_before_anything_starts(
    case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(case.text)
    (tmp_path / "mine.yaml").write_text(CONFIG.format(path=path, deadline_s=case.deadline_s))
    assert execute(["train", "mine.yaml"]) == 2
    out, err = capfd.readouterr()
    told = err[err.index("tiderl: ") :].strip().splitlines()
    assert case.says in told[0] and len(told) <= 2 and out == ""
    assert list((tmp_path / "runs").iterdir()) == []


MISBEHAVES = (
    GOOD
    + """
KINDS = ("good", "raises", "exits", "leaves", "segfaults", "none", "hangs", "eats",
         "prints", "floods", "forks", "threads", "good too")

class Mine(Base):
    memory_limit_bytes = 150 * 2**20
    @classmethod
    def prompts(cls, split, **options):
        return [Prompt(kind, number, {"split": split}) for number, kind in enumerate(KINDS)]
    def reset(self, prompt):
        match prompt.id:
            case "raises": raise ValueError("the shelf is empty")
            case "exits": sys.exit(3)
            case "leaves": os._exit(3)
            case "segfaults": ctypes.string_at(0)
            case "none": return None
            case "hangs": time.sleep(60)
            case "eats":
                held = []
                while True: held.append(bytearray(2**20))
            case "prints": print("hello"); os.write(1, b"hello from below")
            case "floods": print("x" * 20_000_000); os.write(1, b"x" * 20_000_000)
            case "forks": subprocess.Popen(["sleep", "600"]); os.fork()
            case "threads": [threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(20)]
        return "go"
"""
)
REASONS = {
    "raises": "environment_raised",
    "exits": "environment_raised",
    "leaves": "environment_raised",
    "segfaults": "environment_raised",
    "none": "environment_nonsense",
    "hangs": "environment_timeout",
    "eats": "environment_memory",
}


def test_a_run_goes_on_over_what_misbehaves_and_journals_it_by_type(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(MISBEHAVES)
    (tmp_path / "mine.yaml").write_text(CONFIG.format(path=path, deadline_s=1.5))
    # Six prompts of thirteen can be trained on, so eight groups need a second pass: each of the others had its turn.
    code = execute(["train", "mine.yaml", "-o", "train.updates=4", "-o", "run=bad"])
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "hello" not in out + err and "xxx" not in out + err
    with sqlite3.connect(tmp_path / "runs/bad/journal.sqlite") as journal:
        rows = journal.execute(
            "select task_id, status, reason from trajectories join prompts using (prompt_id)"
        ).fetchall()
    found: dict[str, set[str]] = {}
    for kind, status, reason in rows:
        found.setdefault(kind, set()).add(reason if status == "dropped" else status)
    for kind, reason in REASONS.items():
        assert reason in found[kind], (kind, found[kind])
        assert not found[kind] & {"trained", "ready"}, kind
        assert found[kind] <= {reason, "group_dropped", "running"}, (kind, found[kind])
    for kind in ("good", "prints", "floods", "forks", "threads", "good too"):
        assert "trained" in found[kind], (kind, found[kind])
    logs = list((tmp_path / "runs/bad/logs").glob("env-*.log"))
    assert logs and all(log.stat().st_size < 1_200_000 for log in logs)
    mine = psutil.Process(os.getpid()).children(recursive=True)
    assert [child.name() for child in mine if child.name() == "sleep"] == []
