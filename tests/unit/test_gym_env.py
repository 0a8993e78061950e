"""The Gymnasium adapter, over an environment written here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Action
from tiderl.envs.check import check
from tiderl.envs.gym import GymText

pytest.importorskip("gymnasium")

WORLD = '''
import gymnasium

class Door(gymnasium.Env):
    """Say the colour of the door."""
    observation_space = gymnasium.spaces.Text(100)
    def __init__(self, colors=("red", "blue"), says="success", speaks=True, free=False):
        self.colors, self.says, self.speaks = colors, says, speaks
        self.action_space = gymnasium.spaces.Text(20) if free else gymnasium.spaces.Discrete(len(colors), start=1)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.color = int(self.np_random.integers(len(self.colors)))
        return (f"a {self.colors[self.color]} door" if self.speaks else self.color), {}
    def step(self, action):
        word = action if isinstance(action, str) else self.colors[action - 1]
        right = word == self.colors[self.color]
        info = {self.says: right} if self.says else {}
        return ("open" if right else "shut"), 2.0 * right, right, False, info

gymnasium.register("Door-v0", entry_point=Door)
'''
OPTIONS: dict[str, Any] = {
    "id": "door_world:Door-v0",
    "actions": ["red", "blue"],
    "vocabulary": ["a", "door", "open", "shut"],
    "train_prompts": 30,
    "eval_prompts": 20,
}


@pytest.fixture(autouse=True)
def door_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "door_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(tmp_path)


def start(**options: Any) -> tuple[GymText, str]:
    world = GymText(**{**OPTIONS, **options})
    prompt = GymText.prompts("train", **OPTIONS)[0]
    return world, world.reset(prompt)


def test_words_become_actions_and_answers_steps() -> None:
    world, first = start()
    color = first.split()[1]
    other = "blue" if color == "red" else "red"
    wrong, right = world.step(Action(other)), world.step(Action(color))
    assert (wrong.observation, wrong.reward, wrong.terminated, dict(wrong.info)) == (
        "shut",
        0.0,
        False,
        {"success": False},
    )
    assert (right.observation, right.reward, right.terminated, dict(right.info)) == (
        "open",
        2.0,
        True,
        {"success": True},
    )


def test_a_word_that_is_no_action_ends_the_task_and_so_does_the_last_turn() -> None:
    world, _ = start()
    invalid = world.step(Action("green"))
    assert invalid.terminated and invalid.reward == 0.0 and invalid.info["success"] is False
    world, first = start(max_turns=2)
    other = "blue" if "red" in first else "red"
    assert not world.step(Action(other)).truncated
    assert world.step(Action(other)).truncated


def test_a_text_space_gets_what_is_said() -> None:
    world, first = start(actions=[], kwargs={"free": True})
    assert world.step(Action(first.split()[1])).terminated


@pytest.mark.parametrize(("says", "info"), [("is_success", {"success": True}), ("", {})])
def test_success_is_what_the_world_says(says: str, info: dict[str, bool]) -> None:
    world, first = start(kwargs={"says": says})
    assert dict(world.step(Action(first.split()[1])).info) == info


def test_seeds_are_prompts_and_the_splits_share_none() -> None:
    train, held_out = GymText.prompts("train", **OPTIONS), GymText.prompts("eval", **OPTIONS)
    assert (len(train), len(held_out)) == (30, 20)
    assert not {prompt.seed for prompt in train} & {prompt.seed for prompt in held_out}
    assert set(GymText.vocabulary(**OPTIONS)) == {"a", "door", "open", "shut", "red", "blue", "invalid"}
    assert GymText.vocabulary(**{**OPTIONS, "vocabulary": []}) == ()


@pytest.mark.parametrize(
    ("options", "where", "says"),
    [
        ({"id": ""}, "id", "which Gymnasium environment"),
        ({"id": "Nowhere-v0"}, "id", "cannot be made"),
        ({"id": "no_such_world:Door-v0"}, "id", "cannot be made"),
        ({"kwargs": {"colour": 1}}, "id", "cannot be made"),
        ({"actions": ["red"]}, "actions", "has 2 actions, given 1"),
        ({"actions": ["red", "Red"]}, "actions", "given 1 different"),
        ({"kwargs": {"free": True}}, "actions", "the action space is text"),
        ({"max_turns": 0}, "max_turns", "0 is not a number"),
        ({"eval_prompts": "many"}, "eval_prompts", "'many' is not a number"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        GymText.prompts("train", **{**OPTIONS, **options})
    assert caught.value.where == f"env.options.{where}"


def test_an_environment_that_shows_pictures_is_a_fault_that_says_so() -> None:
    world = GymText(**OPTIONS, kwargs={"speaks": False})
    with pytest.raises(TypeError, match="of type int, not text"):
        world.reset(GymText.prompts("train", **OPTIONS)[0])


def test_it_passes_env_check_in_worker_processes() -> None:
    report = check("gym", OPTIONS, deadline_s=20.0)
    assert report.ok, report.lines()
    assert "ok" in {finding.verdict for finding in report.findings if finding.promise == "vocabulary"}


def test_without_the_package_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from tiderl.envs.gym import GymText\n"
        "try: GymText(id='X-v0')\n"
        "except Exception as error: print(type(error).__name__, error.hint)"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert done.stdout.strip() == "MissingExtraError install it with: pip install 'tiderl[babyai]'", done.stderr
