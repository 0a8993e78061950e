"""What an environment is: the class that people write, and what of it is required, optional, declared.

One object is one task: `Class(**options)`, `reset` once, `step` until it is over, `close`. The same prompt gives every
member of its group the same start (I9). Must not know how or where environments are run.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from tiderl.data.records import Action, Observation, Prompt, Split, Step

REQUIRED = ("prompts", "reset", "step")
OPTIONAL = ("vocabulary", "expert", "tools", "score", "close", "pause", "resume", "snapshot", "restore")


class Environment:
    """Base of environments. Write `prompts`, `reset` and `step`; the rest is optional, and defined means declared:

    - `vocabulary(**options) -> words` (class method): every word of observations and actions; the `words` tokenizer needs it.
    - `expert(prompt) -> list[str]`: the actions that solve the prompt. Called on a fresh object of its own, without `reset`.
    - `tools() -> list[dict]`: tool schemas, asked once, after `reset`.
    - `score(trajectory) -> float`: a verifier after the last turn; without it the reward is the sum of step rewards.
    - `close()`: give back what the object holds. `pause()`/`resume()`, `snapshot() -> bytes`/`restore(bytes)`.

    Options of `env.options` arrive as keyword arguments in `__init__` and in both class methods. Any class with these
    methods is an environment; inheriting from this one only saves writing `__init__` and `close`. Plain `def`; `async def`
    is for `env.isolation: async`. Whatever is raised ends the trajectory as an environment fault.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    @classmethod
    def prompts(cls, split: Split, **options: Any) -> Sequence[Prompt]:
        """The task set: always the same list for the same options; `train` and `eval` share no start."""
        raise NotImplementedError

    def reset(self, prompt: Prompt) -> Observation | str:
        """Begin. The same prompt begins the same way, in every process."""
        raise NotImplementedError

    def step(self, action: Action) -> Step:
        """Answer what the policy said. `action.malformed` is not empty where it could not be parsed."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the object holds. Called once."""


class Description(msgspec.Struct, frozen=True):
    """What a class declares; crosses from the worker, so that the driver imports nothing of the user's."""

    name: str
    declared: tuple[str, ...]  # of OPTIONAL
    coroutines: tuple[str, ...]  # methods written as `async def`

    @property
    def has_expert(self) -> bool:
        return "expert" in self.declared

    @property
    def has_vocabulary(self) -> bool:
        return "vocabulary" in self.declared

    @property
    def has_score(self) -> bool:
        return "score" in self.declared


def missing_methods(candidate: type) -> tuple[str, ...]:
    """The required methods that `candidate` does not write itself: empty for an environment."""
    return tuple(name for name in REQUIRED if not _writes(candidate, name))


def describe(environment: type) -> Description:
    """What an environment class declares."""
    declared = tuple(name for name in OPTIONAL if _writes(environment, name))
    coroutines = tuple(
        name
        for name in (*REQUIRED, *declared)
        if inspect.iscoroutinefunction(inspect.unwrap(getattr(environment, name)))
    )
    return Description(environment.__name__, declared, coroutines)


def _writes(candidate: type, name: str) -> bool:
    method = getattr(candidate, name, None)
    plain = getattr(method, "__func__", method)  # a class method is bound anew at every look
    base = getattr(Environment, name, None)
    return callable(method) and plain is not getattr(base, "__func__", base)
