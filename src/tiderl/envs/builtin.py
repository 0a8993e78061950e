"""The built-in environment: find and take the named object in a small grid seen from within. No dependencies.

The same prompt gives the same grid (I9). A few demonstrations teach a small model to find the object about every other
time, the rest is learnt from reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Action, Prompt, Split, Step
from tiderl.data.rng import stream
from tiderl.envs.base import Environment

ACTIONS = ("left", "right", "forward", "take")
COLORS = ("red", "green", "blue", "white")
THINGS = ("cup", "key", "book")
SCENE_WORDS = ("fetch", "see", "nothing", "here", "ahead", "taken", "wrong", "invalid")

SIZE_CELLS = 5
OBJECTS = 1
"""With two, the one that is not asked for is an error to take: a small model needs many more updates."""
MAX_TURNS = 16
TRAIN_PROMPTS = 10_000
EVAL_PROMPTS = 1_000
TRAIN_SEEDS_FROM = 1_000_000  # evaluation seeds are 0 … 999, so no seed is in both

Cell = tuple[int, int]
HEADINGS: tuple[Cell, ...] = (
    (0, -1),
    (1, 0),
    (0, 1),
    (-1, 0),
)  # north, east, south, west; y grows to the south


class Fetch(Environment):
    """Options: `size`, cells a side; `objects`, of different looks; `max_turns`.

    Seen is what lies ahead or beside, not behind; nothing blocks but the walls; `take` takes the object in the
    next cell ahead, and taking one that is not asked for ends the task without reward.
    """

    def __init__(self, size: int = SIZE_CELLS, objects: int = OBJECTS, max_turns: int = MAX_TURNS) -> None:
        most = min(size * size - 1, len(COLORS) * len(THINGS))
        for name, value, least, largest in (("size", size, 2, 99), ("objects", objects, 1, most)):
            if not least <= value <= largest:
                text = f"{name} is {value}, not {least} to {largest}"
                raise ConfigurationError(text, where=f"env.options.{name}")
        self._size, self._object_count, self._max_turns = size, objects, max_turns
        self._objects: dict[Cell, tuple[str, str]] = {}
        self._wanted = ("", "")
        self._at: Cell = (0, 0)
        self._heading = 0
        self._turns = 0

    @classmethod
    def prompts(cls, split: Split, **options: Any) -> Sequence[Prompt]:
        cls(**options)  # options that cannot work are refused here, before anything starts
        if split == "train":
            return [Prompt(f"train-{number}", TRAIN_SEEDS_FROM + number) for number in range(TRAIN_PROMPTS)]
        return [Prompt(f"eval-{number}", number) for number in range(EVAL_PROMPTS)]

    @classmethod
    def vocabulary(cls, size: int = SIZE_CELLS, **options: Any) -> Sequence[str]:
        return (*ACTIONS, *COLORS, *THINGS, *SCENE_WORDS, *(str(number) for number in range(1, size + 1)))

    def reset(self, prompt: Prompt) -> str:
        random = stream(prompt.seed, "fetch", self._size, self._object_count)
        cells = random.permutation(self._size**2)[: self._object_count + 1].tolist()
        looks = random.permutation(len(COLORS) * len(THINGS))[: self._object_count].tolist()
        places = [(cell % self._size, cell // self._size) for cell in cells]
        self._at = places.pop()
        named = [(COLORS[look % len(COLORS)], THINGS[look // len(COLORS)]) for look in looks]
        self._objects = dict(zip(places, named, strict=True))
        self._wanted = named[0]
        self._heading = int(random.integers(len(HEADINGS)))
        self._turns = 0
        return f"fetch {self._wanted[0]} {self._wanted[1]} {self._scene()}"

    def step(self, action: Action) -> Step:
        """An action that is none of the four words ends the task without reward, and so does the last
        turn."""
        self._turns += 1
        word = "" if action.malformed else action.text
        if word == "take":
            taken = self._objects.get(self._next_cell())
            if taken is not None:
                success = taken == self._wanted
                ending = "taken" if success else "wrong"
                return Step(ending, float(success), terminated=True, info={"success": success})
        elif word == "forward":
            target = self._next_cell()
            if self._inside(target):
                self._at = target
        elif word in ("left", "right"):
            self._heading = (self._heading + (1 if word == "right" else -1)) % len(HEADINGS)
        else:
            return Step("invalid", terminated=True, info={"success": False, "invalid_action": True})
        if self._turns >= self._max_turns:
            return Step(self._scene(), truncated=True, info={"success": False})
        return Step(self._scene())

    def expert(self, prompt: Prompt) -> list[str]:
        """What somebody does who sees no more than is said: turn left until it is in sight, walk to its row,
        turn to it, walk up to it, take it."""
        self.reset(prompt)
        goal = next(cell for cell, look in self._objects.items() if look == self._wanted)
        actions: list[str] = []
        while not actions or actions[-1] != "take":
            ahead, aside = self._relative(goal)
            if (ahead, aside) == (1, 0):
                actions.append("take")
            elif ahead > 0:
                actions.append("forward")
            else:
                actions.append("right" if ahead == 0 and aside > 0 else "left")
            self.step(Action(actions[-1]))
        return actions

    def _scene(self) -> str:
        """Each object that is not behind, the nearest first."""
        seen = []
        for cell, look in self._objects.items():
            ahead, aside = self._relative(cell)
            if ahead >= 0:
                seen.append((ahead + abs(aside), aside, [*look, *_place(ahead, aside)]))
        words = [word for *_, described in sorted(seen) for word in described]
        return " ".join(["see", *(words or ["nothing"])])

    def _relative(self, cell: Cell) -> Cell:
        """How far `cell` is ahead and how far aside, to the right positive."""
        way = (cell[0] - self._at[0], cell[1] - self._at[1])
        return _dot(way, HEADINGS[self._heading]), _dot(way, HEADINGS[(self._heading + 1) % len(HEADINGS)])

    def _next_cell(self) -> Cell:
        return _sum(self._at, HEADINGS[self._heading])

    def _inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self._size and 0 <= cell[1] < self._size


def _place(ahead: int, aside: int) -> list[str]:
    words = [str(ahead), "ahead"] if ahead else []
    if aside:
        words += [str(abs(aside)), "left" if aside < 0 else "right"]
    return words or ["here"]


def _sum(a: Cell, b: Cell) -> Cell:
    return a[0] + b[0], a[1] + b[1]


def _dot(a: Cell, b: Cell) -> int:
    return a[0] * b[0] + a[1] * b[1]
