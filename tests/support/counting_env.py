"""Small environments for tests of the isolations: one that behaves, one that misbehaves on request."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from tiderl.data.records import Action, Observation, Prompt, Split, Step, Trajectory
from tiderl.envs.base import Environment


class Counting(Environment):
    """Over after as many steps as the prompt's seed says; the last one's reward is that number."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.left = 0
        self.total = 0

    @classmethod
    def prompts(cls, split: Split, **options: Any) -> Sequence[Prompt]:
        return [Prompt(f"{split}-{number}", 2 + number % 3, {"split": split}) for number in range(6)]

    @classmethod
    def vocabulary(cls, **options: Any) -> Sequence[str]:
        return ["go", "stop", "count", *map(str, range(10))]

    def reset(self, prompt: Prompt) -> str:
        self.left = self.total = prompt.seed
        return f"count {self.left}"

    def step(self, action: Action) -> Step:
        self.left -= 1
        over = self.left == 0
        reward = self.scale * self.total if over else 0.0
        return Step(f"count {self.left}", reward, terminated=over, info={"said": action.text})

    def expert(self, prompt: Prompt) -> list[str]:
        return ["go"] * prompt.seed

    def score(self, trajectory: Trajectory) -> float:
        return trajectory.reward / 2


class Patient(Counting):
    """The same, with `async def`."""

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().step(action)


class Pausable(Counting):
    """Adds a line to the file `log` for each call; `pause` and `resume` then do what their options say."""

    def __init__(self, log: str, pause: str = "count", resume: str = "count") -> None:
        super().__init__()
        self.log, self.on_pause, self.on_resume = log, pause, resume

    def note(self, call: str) -> None:
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{call}\n")

    def reset(self, prompt: Prompt) -> str:
        self.note("reset")
        return super().reset(prompt)

    def step(self, action: Action) -> Step:
        self.note("step")
        return super().step(action)

    def pause(self) -> Any:
        self.note("pause")
        return misbehave(self.on_pause)

    def resume(self) -> Any:
        self.note("resume")
        return misbehave(self.on_resume)

    def close(self) -> None:
        self.note("close")


class PausableAwaiting(Pausable):
    """The same, with `async def`."""

    async def pause(self) -> None:
        self.note("pause")
        await behave(self.on_pause)

    async def resume(self) -> None:
        self.note("resume")
        await behave(self.on_resume)


class PausableOnly(Counting):
    """Declares `pause` without `resume`."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.log = log

    def pause(self) -> None:
        with open(self.log, "a", encoding="utf-8") as log:
            log.write("pause\n")


async def behave(what: str) -> None:
    """`misbehave` on an event loop."""
    if what == "hang":
        await asyncio.Event().wait()
    misbehave(what)


class Naughty(Counting):
    """Does in `step` what the action's text asks for; in `reset` what the prompt's payload asks for."""

    def reset(self, prompt: Prompt) -> Any:
        super().reset(prompt)
        self.left = 1000
        return misbehave(prompt.payload.get("do", "count"))

    def step(self, action: Action) -> Any:
        answer = misbehave(action.text)
        return super().step(action) if answer == "count" else answer

    def score(self, trajectory: Trajectory) -> Any:
        return misbehave(trajectory.text[0])


def misbehave(what: str) -> Any:
    """Do what is asked for; `count` is to behave."""
    match what:
        case "raise":
            print("about to fail")
            raise ValueError("the shelf is empty")
        case "exit":
            sys.exit(3)
        case "hang":
            time.sleep(60)
        case "spin":
            while True:
                pass
        case "hold":  # one call into C that keeps the interpreter for itself
            sum(range(10**12))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            os._exit(7)
        case "segfault":
            import ctypes

            ctypes.string_at(0)
        case "print":
            print("hello from within")
            os.write(1, b"hello from below\n")
            return "count"
        case "flood":
            for _ in range(2000):
                print("x" * 10_000)
            return "count"
        case "none":
            return None
        case "nan":
            return Step("count", float("nan"))
        case "infinite":
            return Step("count", float("inf"))
        case "text-reward":
            return Step("count", "1")  # type: ignore[arg-type]
        case "number":
            return 7
        case "tuple":
            return ("count", 1.0, True, False, {})
        case "endless":
            return Step("word " * 50_000)
        case "no-observation":
            return Step(None)  # type: ignore[arg-type]
        case "maybe-over":
            return Step("count", terminated="yes")  # type: ignore[arg-type]
        case "odd-info":
            return Step("count", info={"thing": object(), "n": [1, 2]})
        case "observation":
            return Observation(("count", "twice"))
        case "short-hang":
            time.sleep(0.6)
            return "count"
    return "count"
