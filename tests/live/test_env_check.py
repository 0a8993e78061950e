"""`env check` finds what is wrong with an environment; `env play` lets a person play one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import counting_env

from tiderl.data.errors import ConfigurationError
from tiderl.envs.check import check
from tiderl.envs.findings import Report
from tiderl.envs.play import play

pytestmark = pytest.mark.live

HEAD = """
import itertools, os, random
from tiderl import Environment, Prompt, Step
from support.counting_env import Counting

"""


def verdicts(report: Report) -> dict[str, str]:
    return {finding.promise: finding.verdict for finding in report.findings}


def checked(tmp_path: Path, body: str) -> Report:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + body)
    return check(f"{path}:Mine", {}, deadline_s=5.0)


def test_the_built_in_environment_has_no_problem() -> None:
    report = check("builtin", {})
    assert report.ok, report.lines()
    assert set(verdicts(report).values()) == {"ok"}
    assert 4 <= report.figures["expert_turns_p50"] <= 6
    assert report.figures["observation_words_p100"] <= 20
    assert report.figures["step_s_p50"] > 0


def test_async_environments_are_checked_too() -> None:
    assert check(f"{counting_env.__file__}:Patient", {}).ok


@pytest.mark.parametrize(
    ("body", "promise", "verdict"),
    [
        # another start in every process
        ("class Mine(Counting):\n def reset(self, prompt):\n  super().reset(prompt)\n"
         "  return str(os.getpid())\n",
         "same prompt, same start", "problem"),
        ("class Mine(Counting):\n def expert(self, prompt):\n  return ['go']\n", "expert", "problem"),
        ("class Mine(Counting):\n @classmethod\n def vocabulary(cls, **o):\n  return ['go']\n",
         "vocabulary", "problem"),
        ("class Mine(Counting):\n @classmethod\n def prompts(cls, split, **o):\n  return [Prompt(split, 2)]\n",
         "task sets", "problem"),
        ("class Mine(Counting):\n N = itertools.count()\n @classmethod\n def prompts(cls, split, **o):\n"
         "  return [Prompt(f'{split}{next(cls.N)}', 2 + next(cls.N), {'s': split})]\n", "same task set", "problem"),
        ("class Mine(Counting):\n def step(self, action):\n  {'go': 1}[action.text]\n  return super().step(action)\n",
         "unknown action", "problem"),
        ("class Mine(Counting):\n @classmethod\n def prompts(cls, split, **o):\n  return []\n", "protocol", "problem"),
        ("class Mine(Counting):\n @classmethod\n def prompts(cls, split, **o):\n"
         "  return (Prompt(str(n)) for n in itertools.count())\n", "protocol", "problem"),
        ("class Mine(Counting):\n def tools(self):\n  return []\n", "reserved methods", "note"),
        ("class Mine(Counting):\n def pause(self):\n  pass\n def resume(self):\n  pass\n", "pause", "ok"),
        ("class Mine(Counting):\n def pause(self):\n  pass\n", "one of pause and resume", "note"),
        ("class Mine(Counting):\n def pause(self):\n  pass\n def resume(self):\n  raise OSError('gone')\n",
         "pause", "problem"),
        ("class Mine(Counting):\n async def pause(self):\n  pass\n", "isolation", "problem"),
        ("class Mine(Counting):\n async def score(self, trajectory):\n  return 1.0\n", "isolation", "problem"),
        ("class Mine(Counting):\n async def step(self, action):\n  return super().step(action)\n"
         " async def pause(self):\n  pass\n", "isolation", "note"),
        # time goes on while it is paused
        ("class Mine(Counting):\n def pause(self):\n  self.left -= 1\n def resume(self):\n  pass\n",
         "pause", "problem"),
        ("class Mine(Counting):\n def pause(self):\n  pass\n def resume(self):\n  pass\n"
         " @classmethod\n def vocabulary(cls, **o):\n  return []\n"
         " def step(self, action):\n  step = super().step(action)\n"
         "  return Step(str(random.random()), step.reward, step.terminated)\n", "pause", "note"),
        ("class Mine(Environment):\n @classmethod\n def prompts(cls, split, **o):\n"
         "  return [Prompt(split, 2, {'s': split})]\n"
         " def reset(self, prompt):\n  return 'go'\n"
         " def step(self, action):\n  return Step(str(random.random()), terminated=True)\n",
         "same actions, same answers", "note"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(tmp_path: Path, body: str, promise: str, verdict: str) -> None:
    report = checked(tmp_path, body)
    assert verdicts(report)[promise] == verdict, report.lines()
    assert report.ok == (verdict != "problem")


def test_what_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        check("json:JSONDecoder", {})


def test_what_has_a_method_s_name_and_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pause of Mine is 5, not a method"):
        checked(tmp_path, "class Mine(Counting):\n pause = 5\n")


def test_a_person_plays_until_they_quit() -> None:
    said = iter(["?", "go", "go", "next", "go", "go", "go", "go", "quit"])
    heard: list[str] = []
    total = play(f"{counting_env.__file__}:Counting", {}, lambda _: next(said), heard.append)
    assert total == 2.0 + 4.0  # prompts 0 and 2; prompt 1 was skipped
    assert "go go" in heard
    assert "over: reward 2, solved" in heard


def test_a_fault_ends_the_episode_and_the_end_of_input_the_game() -> None:
    said = iter(["raise"])
    heard: list[str] = []

    def read(_: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    assert play(f"{counting_env.__file__}:Naughty", {}, read, heard.append) == 0.0
    assert any("the shelf is empty" in line for line in heard)
