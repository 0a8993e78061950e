"""The pool of a replica against slow books, over random events: I4, pairs, order, work conservation, ageing."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pool_play import COMINGS_AND_GOINGS, CONTEXT, RULES, Setting, play

from tiderl.data.records import TaskKey
from tiderl.schedule.common import Opening
from tiderl.schedule.pool import TaskPool
from tiderl.schedule.priority import Key
from tiderl.schedule.residents import Resident

SETTINGS = st.builds(
    Setting,
    budget=st.sampled_from([CONTEXT, 128, 192]),
    block=st.sampled_from([1, 4]),
    shares=st.booleans(),
    patience_s=st.sampled_from([0.3, 3.0]),
    compute_token_s=st.sampled_from([0.0, 1e-3, 1.0]),
    reload_token_s=st.sampled_from([None, 1e-3]),
)

EVENTS = st.lists(st.tuples(st.sampled_from(RULES), st.integers(0, 999), st.integers(1, 40)), min_size=60, max_size=140)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(setting=SETTINGS, events=EVENTS)
def test_a_pool_agrees_with_slow_books_over_any_events(setting: Setting, events: list[tuple[str, int, int]]) -> None:
    play(setting, events)


# --- broken pools


class TwiceTheRoom(TaskPool):
    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        self._charges.budget_tokens *= 2


class NeverCredits(TaskPool):
    def leave(self, key: TaskKey, *, finished: bool) -> None:
        charged_tokens = self._tasks[key].charged_tokens
        super().leave(key, finished=finished)
        self._charges._all.tokens += charged_tokens
        self._charges._stays.tokens += charged_tokens


class LearnsNothing(TaskPool):
    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        self._charges.common.tokens = lambda kind: 0  # type: ignore[method-assign]


class BelievesAll(TaskPool):
    """Learns also from groups that began where nothing was to be found."""

    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        common = self._charges.common
        starts = common.starts

        def started(resident: Resident) -> None:
            if common._openings.setdefault(resident.group, Opening()) is not None:
                starts(resident)

        common.starts = started  # type: ignore[method-assign]


class AsksOneOnly(TaskPool):
    """Of a group only who was let go first."""

    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        common = self._charges.common
        starts = common.starts

        def started(resident: Resident) -> None:
            if resident.group not in common._openings:
                starts(resident)

        common.starts = started  # type: ignore[method-assign]


class TakesTheMost(TaskPool):
    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        common = self._charges.common
        common.tokens = lambda kind: max(common._found[kind], default=0)  # type: ignore[method-assign]


class WithoutPatience(TaskPool):
    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        self._ready.patience_s = 1e9


class LooksAtTheFirstOnly(TaskPool):
    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        self._ready.behind = lambda head, fits: iter(())  # type: ignore[method-assign]


class LeastFirst(TaskPool):
    def _rank(self, resident: Resident, now_s: float) -> Key:
        return tuple(-part for part in super()._rank(resident, now_s))


class ForgetsAge(TaskPool):
    """Who comes from elsewhere is the youngest."""

    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        ready = self._ready

        def add(resident: Resident, now_s: float) -> None:
            ready._by_age[resident.key] = resident
            ready._ranked.add(resident, now_s)

        ready.add = add  # type: ignore[method-assign]


class LetsNobodyLeave(TaskPool):
    """The engine stands idle rather."""

    def _make_room(self, resident: Resident, now_s: float, departures: list, *, everything: bool) -> bool:
        return self._charges.fits(resident)


MUTANTS = [
    (TwiceTheRoom, "I4"),
    (NeverCredits, "tokens are charged"),
    (WithoutPatience, "beyond the patience"),
    (LooksAtTheFirstOnly, "waits, and fits"),
    (LeastFirst, "priority is not respected"),
    (ForgetsAge, "beyond the patience"),
    (LetsNobodyLeave, "the engine is idle"),
]


@pytest.mark.parametrize(("mutant", "words"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_pool_that_breaks_a_rule_is_found(mutant: type[TaskPool], words: str) -> None:
    dice, found = random.Random(0), set[str]()
    for _ in range(100):
        setting = Setting(dice.choice([CONTEXT, 128, 192]), 1, dice.random() < 0.5, 0.3, 1e-3, None)
        events = [(dice.choice(RULES), dice.randint(0, 999), dice.randint(1, 40)) for _ in range(120)]
        try:
            play(setting, events, mutant)
        except AssertionError as error:
            found.add(str(error))
        if any(words in what for what in found):
            return
    pytest.fail(f"not found; but {found}")


def test_random_events_get_to_every_situation() -> None:
    dice, saw = random.Random(1), Counter[str]()
    for _ in range(40):
        setting = Setting(128, 4, True, 0.3, 1e-3, None)
        saw += play(setting, [(dice.choice(RULES), dice.randint(0, 999), dice.randint(1, 40)) for _ in range(120)])
    assert min(saw[what] for what in ("went", "waits", "left", "left while ready", "aged", "outgrown", "moved")) > 20


def _many_groups(seed: int, make: type[TaskPool] = TaskPool) -> Counter[str]:
    dice = random.Random(seed)
    setting = Setting(400, dice.choice([1, 4]), True, 0.3, 1e-3, None)
    events = [(dice.choice(COMINGS_AND_GOINGS), dice.randint(0, 999), dice.randint(1, 40)) for _ in range(300)]
    return play(setting, events, make)


def test_what_groups_have_in_common_is_charged_as_slow_books_say() -> None:
    saw = sum((_many_groups(seed) for seed in range(60)), Counter[str]())
    assert min(saw[what] for what in ("common", "left", "aged", "moved")) > 50, saw


@pytest.mark.parametrize("mutant", [LearnsNothing, BelievesAll, AsksOneOnly, TakesTheMost])
def test_a_pool_that_learns_otherwise_is_found(mutant: type[TaskPool]) -> None:
    for seed in range(60):
        try:
            _many_groups(seed, mutant)
        except AssertionError:
            return
    pytest.fail("not found")
