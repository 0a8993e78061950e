"""Gymnasium environments that speak: observations are text, actions are words or text (package `gymnasium`).

One environment of the registry, `gym`; which Gymnasium environment it is, is an option. The prompt's seed is the
seed of `reset`, so the same prompt gives the same start (I9) as far as the environment keeps its own promise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiderl.data.errors import ConfigurationError, MissingExtraError
from tiderl.data.records import Action, Prompt, Split, Step
from tiderl.envs.base import Environment

MAX_TURNS = 16
TRAIN_PROMPTS = 10_000
EVAL_PROMPTS = 1_000
TRAIN_SEEDS_FROM = 1_000_000  # evaluation seeds begin at 0, so no seed is in both
INVALID = "invalid"
SUCCESS_KEYS = ("success", "is_success")
"""Where Gymnasium environments say whether the task was solved; without one a positive reward is success."""


class GymText(Environment):
    """Options:

    - `id`: the environment's id, `package.module:Name-v0` to import the module that registers it first;
    - `kwargs`: of `gymnasium.make`;
    - `actions`: the words for 0, 1, 2 … of a discrete action space, in this order; none for a text space;
    - `max_turns`: the task is cut short after so many;
    - `vocabulary`: the words of the observations, for the `words` tokenizer only;
    - `train_prompts`, `eval_prompts`: how many seeds each split has.
    """

    def __init__(
        self,
        id: str = "",
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        max_turns: int = MAX_TURNS,
        vocabulary: Sequence[str] = (),
        train_prompts: int = TRAIN_PROMPTS,
        eval_prompts: int = EVAL_PROMPTS,
    ) -> None:
        for name, value in (("max_turns", max_turns), ("train_prompts", train_prompts), ("eval_prompts", eval_prompts)):
            if not isinstance(value, int) or not 1 <= value <= TRAIN_SEEDS_FROM:
                raise _refused(name, f"{value!r} is not a number from 1 to {TRAIN_SEEDS_FROM}")
        self._world = _make(id, kwargs or {})
        try:
            self._numbers = _numbers_of_words(self._world.action_space, actions)
        except ConfigurationError:
            self._world.close()
            raise
        self._max_turns = max_turns
        self._turns = 0

    @classmethod
    def prompts(cls, split: Split, **options: Any) -> Sequence[Prompt]:
        cls(**options).close()  # options that cannot work are refused here, before anything starts
        if split == "train":
            count = options.get("train_prompts", TRAIN_PROMPTS)
            return [Prompt(f"train-{number}", TRAIN_SEEDS_FROM + number) for number in range(count)]
        return [Prompt(f"eval-{number}", number) for number in range(options.get("eval_prompts", EVAL_PROMPTS))]

    @classmethod
    def vocabulary(cls, vocabulary: Sequence[str] = (), actions: Sequence[str] = (), **options: Any) -> Sequence[str]:
        """Those of the options; empty without `vocabulary`, because only some of the words would be no vocabulary."""
        words = [word for text in (*actions, INVALID) for word in text.split()]
        return tuple(dict.fromkeys((*vocabulary, *words))) if vocabulary else ()

    def reset(self, prompt: Prompt) -> str:
        self._turns = 0
        observation, _ = self._world.reset(seed=prompt.seed)
        return _text(observation)

    def step(self, action: Action) -> Step:
        """A word that is no action ends the task without reward, and so does the last turn."""
        self._turns += 1
        if self._numbers is not None and action.text not in self._numbers:
            return Step(INVALID, terminated=True, info={"success": False, "invalid_action": True})
        said = action.text if self._numbers is None else self._numbers[action.text]
        observation, reward, terminated, truncated, info = self._world.step(said)
        success = next(({"success": bool(info[key])} for key in SUCCESS_KEYS if key in info), {})
        cut = bool(truncated) or (self._turns >= self._max_turns and not terminated)
        return Step(_text(observation), float(reward), terminated=bool(terminated), truncated=cut, info=success)

    def close(self) -> None:
        self._world.close()


def _make(name: str, kwargs: Mapping[str, Any]) -> Any:
    """The Gymnasium environment. Raises `MissingExtraError`, and `ConfigurationError` for what cannot be made."""
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("gymnasium", "babyai", where="env.name gym") from error
    if not name:
        raise _refused("id", "which Gymnasium environment?", "for example {id: my_package.worlds:Maze-v0}")
    try:
        return gymnasium.make(name, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        text = " ".join(str(error).split())
        hint = "write module:Name-v0 to import the module that registers it"
        raise _refused("id", f"{name!r} cannot be made: {text}", hint) from error


def _numbers_of_words(space: Any, actions: Sequence[str]) -> dict[str, int] | None:
    """Word to action of a discrete space; None for a text space, which takes what is said as it is."""
    import gymnasium

    if isinstance(space, gymnasium.spaces.Text):
        if actions:
            raise _refused("actions", "the action space is text: leave the words out")
        return None
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise _refused("id", f"its action space is {space}, neither discrete nor text")
    words = [word.lower() for word in actions]
    if len(words) != space.n or len(set(words)) != len(words):
        raise _refused("actions", f"the action space has {space.n} actions, given {len(set(words))} different words")
    return {word: int(space.start) + number for number, word in enumerate(words)}


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        kind = type(observation).__name__
        raise TypeError(f"the observation is of type {kind}, not text: wrap the environment so that it speaks")
    return observation


def _refused(option: str, what: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(what, where=f"env.options.{option}", hint=hint)
