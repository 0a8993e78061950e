"""The order of those who wait: by rank, and by age beyond the patience.

A task's rank is what its priority was when it was looked at last: looking at all of them for each decision would cost
too much. Who is about to be chosen is looked at again, and everybody as often as there are decisions for each of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from operator import neg

from tiderl.data.records import TaskKey
from tiderl.schedule.priority import Key
from tiderl.schedule.residents import Resident

CANDIDATES = 8
"""Of those that wait, as many are tried when who comes first does not fit; as many may go elsewhere at a time."""

Rank = Callable[[Resident, float], Key]
"""The priority of a task at a moment; larger goes first."""

Entry = tuple[Key, int, Resident]


class Ranked:
    """Tasks from the first to the last; equals in the order in which they came. `lowest`: the lowest priority first."""

    def __init__(self, rank: Rank, *, lowest: bool = False) -> None:
        self._rank, self._lowest = rank, lowest
        self._entries: list[Entry] = []  # in order
        self._places: dict[TaskKey, Entry] = {}
        self._arrivals = 0
        self._looks = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, resident: Resident) -> bool:
        return resident.key in self._places

    def add(self, resident: Resident, now_s: float) -> None:
        """It comes last among equals, also when it is here already."""
        if resident.key in self._places:
            self.discard(resident)
        self._arrivals += 1
        self._insert(self._key(resident, now_s), self._arrivals, resident)

    def discard(self, resident: Resident) -> None:
        entry = self._places.pop(resident.key, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry[:2])]

    def first(self, now_s: float, *, but: Resident | None = None) -> Resident | None:
        """Who comes first now, `but` left out; None: nobody."""
        self._looks += 1
        if self._looks > len(self._entries):
            self._look_at_all(now_s)
        position = 0
        while position < len(self._entries):
            key, arrival, resident = self._entries[position]
            if resident is but:
                position += 1
                continue
            now = self._key(resident, now_s)
            if now <= key:
                return resident
            del self._entries[position]
            self._insert(now, arrival, resident)
        return None

    def passing(self, but: Resident, passes: Callable[[Resident], bool], misses: int) -> Iterator[Resident]:
        """Who passes, `but` left out, in the order in which they were looked at last, until so many do not. Each of
        them leaves before the next is asked for."""
        position = 0
        while misses and position < len(self._entries):
            resident = self._entries[position][2]
            if resident is but:
                position += 1
            elif passes(resident):
                yield resident
            else:
                position += 1
                misses -= 1

    def _look_at_all(self, now_s: float) -> None:
        self._looks = 0
        self._entries = sorted((self._key(entry[2], now_s), *entry[1:]) for entry in self._entries)
        self._places = {entry[2].key: entry for entry in self._entries}

    def _insert(self, key: Key, arrival: int, resident: Resident) -> None:
        entry = self._places[resident.key] = (key, arrival, resident)
        insort(self._entries, entry)

    def _key(self, resident: Resident, now_s: float) -> Key:
        key = self._rank(resident, now_s)
        return key if self._lowest else tuple(map(neg, key))


class Ready:
    """Tasks that wait for room on one replica."""

    def __init__(self, rank: Rank, patience_s: float) -> None:
        self.patience_s = patience_s
        self._ranked = Ranked(rank)
        self._by_age: OrderedDict[TaskKey, Resident] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, resident: Resident, now_s: float) -> None:
        """It waits since its `ready_s`, which may lie back: it has waited elsewhere."""
        newest = next(reversed(self._by_age.values()), None)
        self._by_age[resident.key] = resident
        if newest is not None and newest.ready_s > resident.ready_s:
            self._by_age = OrderedDict(sorted(self._by_age.items(), key=lambda item: item[1].ready_s))
        self._ranked.add(resident, now_s)

    def discard(self, resident: Resident) -> None:
        if self._by_age.pop(resident.key, None) is not None:
            self._ranked.discard(resident)

    def oldest(self) -> list[Resident]:
        """The few that have waited longest."""
        return list(islice(self._by_age.values(), CANDIDATES))

    def head(self, now_s: float) -> tuple[Resident, bool]:
        """Whose turn it is, and whether because it has waited beyond the patience. Somebody waits."""
        oldest = next(iter(self._by_age.values()))
        if now_s >= self.aged_s:
            return oldest, True
        first = self._ranked.first(now_s)
        assert first is not None
        return first, False

    def behind(self, head: Resident, fits: Callable[[Resident], bool]) -> Iterator[Resident]:
        """Those behind `head` that fit, by rank, each of which leaves at once, until there are too many that do not."""
        return self._ranked.passing(head, fits, CANDIDATES)

    @property
    def aged_s(self) -> float:
        """When the patience of who has waited longest ends. Somebody waits."""
        return next(iter(self._by_age.values())).ready_s + self.patience_s
