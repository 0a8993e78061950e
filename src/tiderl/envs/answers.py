"""The border of the user's code: its answers made into records or refused, its exceptions made into typed
faults.

A non-finite reward never gets past here (I9). Must not know processes, threads or slots.
"""

from __future__ import annotations

import itertools
import math
import numbers
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tiderl.data.errors import (
    ConfigurationError,
    EnvironmentFault,
    EnvironmentMemory,
    EnvironmentNonsense,
    EnvironmentRaised,
    TideError,
)
from tiderl.data.records import ImageHandle, Observation, Prompt, Step, TokenCount

OBSERVATION_CHARACTERS_MAX = 100_000
"""About 25,000 tokens: no environment means more than that by one answer."""
INFO_BYTES_MAX = 100_000
WORDS_MAX = 100_000
MESSAGE_CHARACTERS_MAX = 500

TASK_SET_ERRORS = (EnvironmentFault, ConfigurationError)
"""What `prompts`, `vocabulary` and `expert` may raise as it is: they run before anything starts."""


def as_observation(answer: Any, where: str) -> Observation:
    """`str` or `Observation` to `Observation`. Raises `EnvironmentNonsense` for anything else and for endless
    text."""
    if isinstance(answer, str):
        answer = Observation.text(answer)
    if not isinstance(answer, Observation):
        raise EnvironmentNonsense(f"the observation is {_shown(answer)}, not str or Observation", where=where)
    characters = 0
    for part in answer.parts:
        if isinstance(part, ImageHandle):
            raise EnvironmentNonsense("image observations are not yet supported", where=where)
        if not isinstance(part, str | TokenCount):
            raise EnvironmentNonsense(f"a part of the observation is {_shown(part)}", where=where)
        characters += len(part) if isinstance(part, str) else 0
    if characters > OBSERVATION_CHARACTERS_MAX:
        raise EnvironmentNonsense(
            f"the observation has {characters} characters, more than {OBSERVATION_CHARACTERS_MAX}",
            where=where,
        )
    return Observation(tuple(answer.parts))


def as_step(answer: Any, where: str) -> Step:
    """A `Step` whose observation is an `Observation`, whose reward is a finite float, whose info is plain
    values."""
    if not isinstance(answer, Step):
        raise EnvironmentNonsense(
            f"the answer is {_shown(answer)}, not a Step",
            where=where,
            hint="return Step(observation, reward, …)",
        )
    reward = as_reward(answer.reward, where)
    for name in ("terminated", "truncated"):
        if not isinstance(getattr(answer, name), bool | np.bool_):
            raise EnvironmentNonsense(f"{name} is {_shown(getattr(answer, name))}, not a bool", where=where)
    observation = as_observation(answer.observation, where)
    return Step(observation, reward, bool(answer.terminated), bool(answer.truncated), _plain(answer.info, where))


def as_reward(value: Any, where: str, fault: type[TideError] = EnvironmentNonsense) -> float:
    """A finite float. Raises `fault` for anything else."""
    if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
        raise fault(f"the reward is {_shown(value)}, not a finite number", where=where)
    return float(value)


def as_prompts(answer: Any, where: str) -> list[Prompt]:
    """A non-empty list of prompts whose ids are different."""
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise EnvironmentNonsense(f"the task set is {_shown(answer)}, not a list of Prompt", where=where)
    prompts = []
    for prompt in answer:
        if not isinstance(prompt, Prompt) or not isinstance(prompt.id, str):
            raise EnvironmentNonsense(f"the task set holds {_shown(prompt)}, not a Prompt(id: str, …)", where=where)
        prompts.append(Prompt(prompt.id, int(prompt.seed), _plain(prompt.payload, where)))
    if not prompts:
        raise EnvironmentNonsense("the task set is empty", where=where)
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise EnvironmentNonsense("two prompts of the task set have the same id", where=where)
    return prompts


def as_words(answer: Any, where: str) -> list[str]:
    """A list of str, for vocabularies and expert actions."""
    if isinstance(answer, str) or not hasattr(answer, "__iter__"):
        raise EnvironmentNonsense(f"the answer is {_shown(answer)}, not a list of str", where=where)
    words = list(itertools.islice(answer, WORDS_MAX + 1))
    if len(words) > WORDS_MAX:
        raise EnvironmentNonsense(f"the list has more than {WORDS_MAX} words", where=where)
    for word in words:
        if not isinstance(word, str):
            raise EnvironmentNonsense(f"the list holds {_shown(word)}, not only str", where=where)
    return words


def raised(
    error: BaseException,
    where: str,
    printed: Sequence[str] = (),
    kind: type[TideError] = EnvironmentRaised,
    known: tuple[type[TideError], ...] = (EnvironmentFault,),
) -> TideError:
    """The fault for an exception of the user's code: its type, its message, the line that raised, the last
    print.

    An error of a `known` class is nobody's accident and stays what it is.
    """
    if isinstance(error, known):
        return error
    if isinstance(error, MemoryError) and kind is EnvironmentRaised:
        return EnvironmentMemory("it took more memory than it may", where=where, hint="memory_limit_bytes of its class")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    message = str(error)[:MESSAGE_CHARACTERS_MAX]
    hint = f"it printed last: {printed[-1][:MESSAGE_CHARACTERS_MAX]}" if printed else ""
    return kind(f"{type(error).__name__}: {message}{place}", where=where, hint=hint)


def _plain(info: Any, where: str) -> dict[str, Any]:
    """`info` or a payload as plain values that can cross a channel; what has no plain form is kept as its
    `repr`."""
    if not isinstance(info, Mapping):
        raise EnvironmentNonsense(f"info is {_shown(info)}, not a mapping", where=where)
    if not info:
        return {}
    try:
        encoded = msgspec.msgpack.encode({str(key): value for key, value in info.items()}, enc_hook=_simplified)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EnvironmentNonsense(f"info has no plain form: {error}", where=where) from error
    if len(encoded) > INFO_BYTES_MAX:
        raise EnvironmentNonsense(f"info has {len(encoded)} bytes, more than {INFO_BYTES_MAX}", where=where)
    plain: dict[str, Any] = msgspec.msgpack.decode(encoded)
    return plain


def _simplified(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return repr(value)[:MESSAGE_CHARACTERS_MAX]


def _shown(value: Any) -> str:
    return f"{repr(value)[:60]} ({type(value).__name__})" if value is not None else "None"
