"""BabyAI as text: a mission in a room, told in 10 to 20 words a turn, one word an action (package
`minigrid`).

The same prompt gives the same level (I9). The reward is 1 for success and 0 else, without a discount for
time: divided by the deviation of a group that always succeeds, a small discount would weigh as much as
success itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from tiderl.data.errors import ConfigurationError, MissingExtraError
from tiderl.data.records import Action, Prompt, Split, Step
from tiderl.envs.base import Environment

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")  # minigrid's own order
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
THINGS = ("wall", "door", "key", "ball", "box", "object")
DOOR_STATES = ("open", "closed", "locked")
MISSION_WORDS = (
    "go",
    "to",
    "pick",
    "up",
    "put",
    "next",
    "open",
    "a",
    "the",
    "in",
    "front",
    "of",
    "behind",
    "on",
    "your",
    "you",
)
LINKS = ("then", "after", "and")
SCENE_WORDS = ("see", "nothing", "ahead", "carrying", "invalid", "success", "failure")
NUMBERS = tuple(str(number) for number in range(1, 8))  # the view is 7 cells deep
LEVEL_PREFIX = "BabyAI-"

TRAIN_PROMPTS = 10_000
EVAL_PROMPTS = 1_000
TRAIN_SEEDS_FROM = 1_000_000  # evaluation seeds are 0 … 999, so no seed is in both

MAX_TURNS = 16
OBJECTS_SHOWN = 2
"""An object takes six words; two keep an observation below 20. Those that share words with the mission come
first."""


class BabyAI(Environment):
    """Options: `level`, any BabyAI level of minigrid; `max_turns`; `objects`, how many an observation
    names."""

    def __init__(
        self, level: str = "BabyAI-GoToObj-v0", max_turns: int = MAX_TURNS, objects: int = OBJECTS_SHOWN
    ) -> None:
        self._level = _make_level(level)
        self._max_turns = max_turns
        self._objects_shown = objects
        self._turns = 0

    @classmethod
    def prompts(cls, split: Split, **options: Any) -> Sequence[Prompt]:
        cls(**options).close()  # a level that there is not is refused here, before anything starts
        if split == "train":
            return [Prompt(f"train-{number}", TRAIN_SEEDS_FROM + number) for number in range(TRAIN_PROMPTS)]
        return [Prompt(f"eval-{number}", number) for number in range(EVAL_PROMPTS)]

    @classmethod
    def vocabulary(cls, **options: Any) -> Sequence[str]:
        words = (*ACTIONS, *COLORS, *THINGS, *DOOR_STATES, *MISSION_WORDS, *LINKS, *SCENE_WORDS, *NUMBERS)
        return tuple(dict.fromkeys(words))

    def reset(self, prompt: Prompt) -> str:
        self._level.reset(seed=prompt.seed)
        self._turns = 0
        return f"{self._mission()} {self._scene()}"

    def step(self, action: Action) -> Step:
        """An action that is none of the seven words ends the task without reward, and so does the last
        turn."""
        self._turns += 1
        if action.malformed or action.text not in ACTIONS:
            return Step("invalid", terminated=True, info={"success": False, "invalid_action": True})
        _, reward, terminated, truncated, _ = self._level.step(ACTIONS.index(action.text))
        if terminated:
            success = bool(reward > 0)
            return Step(
                "success" if success else "failure",
                float(success),
                terminated=True,
                info={"success": success},
            )
        if truncated or self._turns >= self._max_turns:
            return Step(self._scene(), truncated=True, info={"success": False})
        return Step(self._scene())

    def expert(self, prompt: Prompt) -> list[str]:
        """The actions of minigrid's own bot, which sees no more than the policy does."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        self._level.reset(seed=prompt.seed)
        bot = BabyAIBot(self._level)
        actions: list[str] = []
        over = False
        while not over:
            action = bot.replan()
            actions.append(ACTIONS[action])
            _, _, terminated, truncated, _ = self._level.step(action)
            over = terminated or truncated
        return actions

    def close(self) -> None:
        self._level.close()

    def _mission(self) -> str:
        mission: str = self._level.mission
        return mission.replace(",", "")

    def _scene(self) -> str:
        """What is straight ahead and how far, what is carried, and the objects in view, relative to the
        agent."""
        grid, visible = self._level.gen_obs_grid()
        column, row = grid.width // 2, grid.height - 1  # where the agent stands in its own view, looking up
        words = ["see", *_straight_ahead(grid, column, row)]
        if self._level.carrying is not None:
            words += ["carrying", self._level.carrying.color, self._level.carrying.type]
        mission = self._mission().split()
        objects = []
        for x in range(grid.width):
            for y in range(grid.height):
                thing = grid.get(x, y)
                if thing is None or not visible[x, y] or thing.type == "wall" or (x, y) == (column, row):
                    continue
                ahead, aside = row - y, x - column
                alike = (thing.color in mission) + (thing.type in mission)
                objects.append((-alike, ahead + abs(aside), aside, [*_named(thing), *_place(ahead, aside)]))
        for *_, described in sorted(objects)[: self._objects_shown]:
            words += described
        return " ".join(words)


def _straight_ahead(grid: Any, column: int, row: int) -> list[str]:
    for distance in range(1, row + 1):
        thing = grid.get(column, row - distance)
        if thing is not None:
            return [thing.type, str(distance)]
    return ["nothing"]


def _named(thing: Any) -> list[str]:
    if thing.type != "door":
        return [thing.color, thing.type]
    state = "locked" if thing.is_locked else "open" if thing.is_open else "closed"
    return [thing.color, thing.type, state]


def _place(ahead: int, aside: int) -> list[str]:
    words = [str(ahead), "ahead"] if ahead else []
    if aside:
        words += [str(abs(aside)), "left" if aside < 0 else "right"]
    return words


def _make_level(level: str) -> Any:
    """The level's own object. Raises `MissingExtraError`, and `ConfigurationError` for a name that is no
    BabyAI level."""
    try:
        import gymnasium
        import minigrid.core.mission
        import minigrid.envs.babyai.core.roomgrid_level as generator
    except ImportError as error:
        raise MissingExtraError("minigrid", "babyai", where="env.name babyai") from error
    # Level generation prints each rejected draw. A module's own `print` hides the built-in one, in every thread.
    for module in (generator, minigrid.core.mission):
        vars(module)["print"] = _say_nothing
    levels = [name for name in gymnasium.registry if name.startswith(LEVEL_PREFIX)]
    if level not in levels:
        close = difflib.get_close_matches(level, levels, n=1)
        raise ConfigurationError(
            f"there is no BabyAI level {level!r}",
            where="env.options.level",
            hint=f"did you mean {close[0]!r}?" if close else f"for example {', '.join(levels[:4])}",
        )
    made = gymnasium.make(level, disable_env_checker=True).unwrapped
    # `reset` and `step` of a level draw its picture for their answer, which costs as much as all else they do; here the
    # agent's view is told in words, from `gen_obs_grid` itself.
    made.gen_obs = _no_picture
    return made


def _no_picture() -> dict[str, Any]:
    """In place of a level's `gen_obs`."""
    return {}


def _say_nothing(*_: Any, **__: Any) -> None:
    """In place of `print`."""
