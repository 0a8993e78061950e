"""The registry: names to classes, and what each wrong name gets."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from support.counting_env import Counting

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Action, Prompt, Step
from tiderl.envs.base import Environment, check_methods, check_options, describe, missing_methods
from tiderl.envs.builtin import Fetch
from tiderl.envs.registry import DEFAULT_PROFILE, REGISTRY, check_form, load, profile

MINE = """
from tiderl import Environment, Prompt, Step

class Mine(Environment):
    @classmethod
    def prompts(cls, split, **options):
        return [Prompt(split, 1)]
    def reset(self, prompt):
        return "go"
    def step(self, action):
        return Step("done", 1.0, terminated=True)

class HalfWritten(Environment):
    def reset(self, prompt):
        return "go"

anything = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_registered_names_files_and_modules_are_found(mine: Path) -> None:
    assert load("builtin") is Fetch
    assert load("tiderl.envs.builtin:Fetch") is Fetch
    found = load(f"{mine}:Mine")
    assert found().step(Action("x")) == Step("done", 1.0, terminated=True)
    assert load(f"{mine}:Mine") is found


def test_a_file_may_import_its_neighbours(mine: Path) -> None:
    (mine.parent / "neighbour_of_mine.py").write_text("WORD = 'hello'")
    mine.write_text("from neighbour_of_mine import WORD\n" + MINE.replace('"go"', "WORD"))
    assert load(f"{mine}:Mine")().reset(Prompt("p")) == "hello"


@pytest.mark.parametrize(
    ("name", "says", "hint"),
    [
        ("babyia", "no environment is called 'babyia'", "did you mean 'babyai'?"),
        ("zork", "no environment is called 'zork'", "known: babyai, builtin"),
        ("json", "no environment is called 'json'", "package.module:Class"),
        ("json:JSONDecoder", "'JSONDecoder' is not an environment: it has no prompts, reset, step", "writes"),
        ("json:dumps", "'dumps' is not a class", ""),
        ("json:JSONDecode", "it has no class 'JSONDecode'", "did you mean 'JSONDecoder'?"),
        ("no_such_package.things:Mine", "there is no module 'no_such_package.things'", "./mine.py:Mine"),
        ("json:", "no environment is called 'json:'", ""),
        (":Mine", "no environment is called ':Mine'", ""),
    ],
)
def test_a_name_that_is_no_environment_is_told_what_is_wrong(name: str, says: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(name)
    assert says in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.where.startswith("env.name")


@pytest.mark.parametrize(
    ("text", "class_name", "says", "hint"),
    [
        (MINE, "Mien", "it has no class 'Mien'", "did you mean 'Mine'?"),
        (MINE, "anything", "'anything' is not a class", ""),
        (MINE, "HalfWritten", "'HalfWritten' is not an environment: it has no prompts, step", "writes"),
        ("x = 1\ndef f(:\n", "Mine", "syntax error", "mine.py:2"),
        ("x = 1\n\nraise KeyError('k')\n", "Mine", "importing it raised KeyError: 'k'", "mine.py:3"),
        ("import no_such_package\n", "Mine", "importing it raised ModuleNotFoundError", "mine.py:1"),
        ("import sys\nsys.exit(0)\n", "Mine", "importing it raised SystemExit", "mine.py:2"),
    ],
)
def test_a_file_that_holds_no_environment_is_told_what_is_wrong(
    mine: Path, text: str, class_name: str, says: str, hint: str
) -> None:
    mine.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load(f"{mine}:{class_name}")
    assert says in caught.value.what
    assert hint in caught.value.hint


def test_a_missing_file_and_a_missing_class_name_are_found_without_importing(mine: Path) -> None:
    check_form(f"{mine}:Mine")
    check_form("builtin")
    check_form("not_even.there:Mine")  # known only to whoever imports it
    with pytest.raises(ConfigurationError, match="there is no file") as caught:
        check_form(f"{mine.parent}/mien.py:Mine")
    assert "did you mean" in caught.value.hint
    with pytest.raises(ConfigurationError) as caught:
        check_form(str(mine))
    assert caught.value.hint == f"name the class in it: {mine}:Mine"


def test_a_class_that_does_not_inherit_is_an_environment_by_its_methods() -> None:
    class Duck:
        @classmethod
        def prompts(cls, split: str) -> list[Prompt]:
            return []

        def reset(self, prompt: Prompt) -> str:
            return ""

        async def step(self, action: Action) -> Step:
            return Step("")

        def score(self, trajectory: object) -> float:
            return 0.0

    assert missing_methods(Duck) == ()
    assert (describe(Duck).declared, describe(Duck).coroutines) == (("score",), ("step",))
    assert missing_methods(Environment) == ("prompts", "reset", "step")
    assert describe(Counting).declared == ("vocabulary", "expert", "score")


def test_an_option_that_the_constructor_does_not_take_is_refused() -> None:
    check_options(Counting, {"scale": 2.0})
    with pytest.raises(ConfigurationError, match="Counting has no option 'scael'") as caught:
        check_options(Counting, {"scael": 2.0})
    assert caught.value.hint == "did you mean 'scale'?"


def test_the_registry_is_read_without_importing_an_environment() -> None:
    code = (
        "import sys; from tiderl.envs.registry import profile; profile('babyai');"
        "print(sorted({'minigrid', 'gymnasium', 'tiderl.envs.babyai'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
    assert profile("babyai") is REGISTRY["babyai"].profile
    assert profile("./mine.py:Mine") is DEFAULT_PROFILE


@pytest.mark.parametrize(
    ("name", "written", "says"),
    [
        ("pause", 5, "pause of Mine is 5, not a method"),
        ("resume", property(lambda self: 5), "resume of Mine is a property, not a method"),
        ("close", "later", "close of Mine is 'later', not a method"),
        ("snapshot", {}, "snapshot of Mine is {}, not a method"),
        ("vocabulary", ["go"], "vocabulary of Mine is ['go'], not a method"),
        ("pause", lambda self, seconds: None, "pause of Mine cannot be called as pause(): missing a required argument"),
        ("score", lambda self: 1.0, "score of Mine cannot be called as score(trajectory): too many"),
        ("expert", staticmethod(lambda: ["go"]), "expert of Mine cannot be called as expert(prompt): too many"),
        ("vocabulary", lambda self: [], "vocabulary of Mine cannot be called as vocabulary(): missing a required"),
        ("vocabulary", classmethod(lambda cls: []), "vocabulary of Mine cannot be called as vocabulary(): got an"),
    ],
)
def test_what_is_no_method_of_the_protocol_is_refused(name: str, written: object, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_methods(type("Mine", (Counting,), {name: written}), {"scale": 2.0})
    assert says in caught.value.what
    assert f"def {name}(" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("pause", lambda self: None),
        ("pause", lambda self, seconds=3: None),
        ("pause", staticmethod(lambda: None)),
        ("pause", functools.partialmethod(lambda self, seconds: None, 3)),
        ("score", lambda self, *arguments: 1.0),
        ("vocabulary", staticmethod(lambda **options: [])),
        ("restore", None),
        ("tools", lambda self, whatever: None),
    ],
)
def test_methods_that_can_be_called_as_documented_pass(name: str, written: object) -> None:
    check_methods(type("Mine", (Counting,), {name: written}), {"scale": 2.0})
