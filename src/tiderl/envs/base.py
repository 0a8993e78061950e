"""What an environment is: the class that people write, and what of it is required, optional, declared.

One object is one task: `Class(**options)`, `reset` once, `step` until it is over, `close`. The same prompt
gives every member of its group the same start (I9). Must not know how or where environments are run.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import msgspec

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Action, Observation, Prompt, Split, Step

REQUIRED = ("prompts", "reset", "step")
RESERVED = ("tools", "snapshot", "restore")
OPTIONAL = ("vocabulary", "expert", "score", "pause", "resume", "close", *RESERVED)
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "prompts": ("split",),
    "reset": ("prompt",),
    "step": ("action",),
    "vocabulary": (),
    "expert": ("prompt",),
    "score": ("trajectory",),
    "pause": (),
    "resume": (),
    "close": (),
}
"""What each method is called with; those of the class with the options too."""
OF_THE_CLASS = ("prompts", "vocabulary")


VALUE_SHOWN = 40  # characters of what stands where a method should


class Environment:
    """Base of environments. Write `prompts`, `reset` and `step`; the rest is optional, and defined means
    declared:

    - `vocabulary(**options) -> words` (class method): every word of observations and actions; the `words`
      tokenizer needs it.
    - `expert(prompt) -> list[str]`: the actions that solve the prompt. Called on a fresh object of its own,
      without `reset`.
    - `score(trajectory) -> float`: a verifier after the last turn; without it the reward is the sum of step
      rewards.
    - `close()`: give back what the object holds.
    - `memory_limit_bytes` (class attribute): what one environment may hold under isolation `process`, and a whole
      worker under `pool`, its children included.
    - `pause()`: the next step will be long in coming, so whatever counts the seconds between two steps should stand
      still. Called between two steps, or between `reset` and the first one.
    - `resume()`: the next step comes now. Called once after each `pause`, unless the task ends meanwhile: then `close`
      follows.
    - reserved names, not called yet: `tools`, `snapshot`, `restore`.

    Options of `env.options` arrive as keyword arguments in `__init__` and in both class methods. Any class
    with these methods is an environment; inheriting from this one only saves writing `__init__` and `close`.
    Plain `def`; `async def` is for `env.isolation: async`. Whatever is raised ends the trajectory as an
    environment fault.
    """

    memory_limit_bytes: int | None = None

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
        """Answer what the policy said. In training, what could not be parsed is answered for you and never comes
        here; in
        `tiderl env play` it does, with a reason in `action.malformed`."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the object holds. Called once."""


class Description(msgspec.Struct, frozen=True):
    """What a class declares; crosses from the worker, so that the driver imports nothing of the user's."""

    name: str
    declared: tuple[str, ...]  # of OPTIONAL
    coroutines: tuple[str, ...]  # methods written as `async def`
    memory_limit_bytes: int | None = None

    @property
    def has_expert(self) -> bool:
        return "expert" in self.declared

    @property
    def has_vocabulary(self) -> bool:
        return "vocabulary" in self.declared

    @property
    def has_score(self) -> bool:
        return "score" in self.declared

    @property
    def has_pause(self) -> bool:
        return "pause" in self.declared

    @property
    def has_resume(self) -> bool:
        return "resume" in self.declared


def check_options(environment: type, options: Mapping[str, Any]) -> None:
    """Refuse options that the constructor does not take. Raises `ConfigurationError`."""
    try:
        parameters = inspect.signature(environment).parameters.values()
    except ValueError:  # a class without a readable signature takes what it takes
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY]
    for key in options:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes: {', '.join(names) or 'none'}"
            raise ConfigurationError(f"{environment.__name__} has no option {key!r}", where="env.options", hint=hint)


def check_methods(environment: type, options: Mapping[str, Any]) -> None:
    """Refuse what has a method's name and is none, or takes other arguments than it is called with. None in its place
    means that it is not there. Raises `ConfigurationError`."""
    for name in (*REQUIRED, *OPTIONAL):
        found = getattr(environment, name, None)
        written = f"write `{'@classmethod ' * (name in OF_THE_CLASS)}def {name}({_parameters(name)})`"
        if found is not None and not callable(found):
            what = "a property" if isinstance(found, property) else repr(found)[:VALUE_SHOWN]
            raise ConfigurationError(
                f"{name} of {environment.__name__} is {what}, not a method",
                where="env.name",
                hint=f"the name belongs to the protocol: {written}, or choose another name",
            )
        if found is not None and name in ARGUMENTS and (wrong := _misfit(environment, name, options)):
            what = f"{name} of {environment.__name__} cannot be called as {name}({', '.join(ARGUMENTS[name])}): {wrong}"
            raise ConfigurationError(what, where="env.name", hint=written)


def _parameters(name: str) -> str:
    if name not in ARGUMENTS:
        return "self, …"
    of_class = name in OF_THE_CLASS
    return ", ".join(["cls" if of_class else "self", *ARGUMENTS[name], *(["**options"] if of_class else [])])


def _misfit(environment: type, name: str, options: Mapping[str, Any]) -> str:
    """Why the method does not take what it is called with; empty where it does, or does not say what it takes."""
    written = inspect.getattr_static(environment, name)
    if not isinstance(written, FunctionType | classmethod | staticmethod):
        return ""
    try:
        signature = inspect.signature(getattr(environment, name))
    except (ValueError, TypeError):
        return ""
    of_object = isinstance(written, FunctionType) and name not in OF_THE_CLASS
    arguments = (*(["self"] if of_object else []), *ARGUMENTS[name])
    try:
        signature.bind(*arguments, **(options if name in OF_THE_CLASS else {}))
    except TypeError as error:
        return str(error)
    return ""


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
    return Description(environment.__name__, declared, coroutines, memory_limit(environment))


def memory_limit(environment: type) -> int | None:
    """The declared `memory_limit_bytes`. Raises `ConfigurationError` for what is no number of bytes."""
    limit = getattr(environment, "memory_limit_bytes", None)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ConfigurationError(
            f"memory_limit_bytes of {environment.__name__} is {limit!r}, not a number of bytes", where="env.name"
        )
    return limit


def _writes(candidate: type, name: str) -> bool:
    method = getattr(candidate, name, None)
    plain = getattr(method, "__func__", method)  # a class method is bound anew at every look
    base = getattr(Environment, name, None)
    return callable(method) and plain is not getattr(base, "__func__", base)
