"""An environment of ten prompts, some of which fail on purpose, each in one way: the name says how."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiderl.data.records import Action, Prompt, Split, Step
from tiderl.envs.base import Environment

GOOD = ("good-1", "good-2", "good-3", "prints", "floods", "raises-once", "kills-once")
ALWAYS_FAILING = {
    "raises": "environment_raised",
    "none": "environment_nonsense",
    "nan": "environment_nonsense",
    "hangs": "environment_timeout",
}
"""What always fails, and the reason that the journal must give."""
FAILS_AT_STEP = 2
LENGTH = 4
HANG_S = 3600.0


class Failing(Environment):
    """Over after four steps; the reward is the share of `go`. `marks`: a folder that remembers what was done once;
    `only`: the prompts to use, all of them where it is empty."""

    def __init__(self, marks: str, only: Sequence[str] = ()) -> None:
        self.marks = Path(marks)
        self.name, self.steps, self.gone = "", 0, 0

    @classmethod
    def prompts(cls, split: Split, marks: str = "", only: Sequence[str] = (), **options: Any) -> Sequence[Prompt]:
        if split == "eval":
            return [Prompt("good-1", 1)]
        return [Prompt(name, number) for number, name in enumerate(only or (*GOOD, *ALWAYS_FAILING))]

    @classmethod
    def vocabulary(cls, **options: Any) -> Sequence[str]:
        return ["go", "stop", "step", *map(str, range(LENGTH + 1))]

    def reset(self, prompt: Prompt) -> str:
        self.name = prompt.id
        return "step 0"

    def step(self, action: Action) -> Any:
        self.steps += 1
        self.gone += action.text == "go"
        if self.steps == FAILS_AT_STEP and (answer := self._misbehave()) != "count":
            return answer
        return Step(f"step {self.steps}", float(action.text == "go") / LENGTH, terminated=self.steps == LENGTH)

    def expert(self, prompt: Prompt) -> list[str]:
        return ["go"] * LENGTH if prompt.id.startswith("good") else ["stop"]

    def _misbehave(self) -> Any:
        match self.name:
            case "raises":
                raise ValueError("on purpose")
            case "raises-once" if self._first():
                raise ValueError("on purpose, once")
            case "kills-once" if self._first():
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(HANG_S)
            case "none":
                return None
            case "nan":
                return Step("step 2", float("nan"))
            case "prints":
                print("hello")
            case "floods":
                for _ in range(200):
                    print("x" * 10_000)
        return "count"

    def _first(self) -> bool:
        try:
            (self.marks / self.name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
