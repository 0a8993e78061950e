"""What all groups of a kind begin with, such as tool schemas: learned from what an engine had of a group's prompt.

Nobody says how much of a prompt is common. But the first turn of a group on a replica can only find cached there what
other groups have left, so what it finds is what they have in common. Three things spoil that, each with its answer:

- Nothing was there to be found. Only groups count that began while another of their kind held KV of a turn that had
  ended.
- Members of a group begin together, and who of them was first in the engine is not known; the others find all of their
  prompt. What counts is the least that was found by those that began before the first of them ended, when all have
  ended.
- The prompt itself was there, of an earlier group with the same one, or that of a few with the same tools. So what
  counts is the least that the last few groups have found, and who begins otherwise shares it with others like it only
  (`charges.Common`).

Pure; decides nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from tiderl.data.records import TaskKey
from tiderl.schedule.residents import Resident

FEW = 4
"""Groups that have to agree: where one of them is an accident of the cache, less is taken to be common."""


@dataclass
class Opening:
    """The first turns of a group that began before the first of them ended."""

    running: set[TaskKey] = field(default_factory=set)
    found_tokens: list[int] = field(default_factory=list)
    """By those that have ended."""


class CommonPrompts:
    """Of one replica, by kind. Groups are known from their first turn until none of them is in flight."""

    def __init__(self) -> None:
        self._found: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=FEW))
        self._openings: dict[Hashable, Opening | None] = {}  # None: it tells nothing, or has told
        self._computed: defaultdict[str, dict[Hashable, int]] = defaultdict(dict)  # by kind and group: such tasks

    def tokens(self, kind: str) -> int:
        """Positions from the start on that groups of this kind have in common; 0: none, or not known yet."""
        found = self._found.get(kind, ())
        return min(found) if len(found) == FEW else 0

    def computed(self, resident: Resident, has: bool) -> None:
        """Whether it has KV of a turn that has ended."""
        if resident.computed == has:
            return
        resident.computed = has
        tasks = self._computed[resident.kind]
        tasks[resident.group] = tasks.get(resident.group, 0) + (1 if has else -1)
        if not tasks[resident.group]:
            del tasks[resident.group]

    def starts(self, resident: Resident) -> None:
        """Its first turn is let go."""
        group = resident.group
        if group not in self._openings:
            others = self._computed[resident.kind]
            self._openings[group] = Opening() if len(others) > (group in others) else None
        opening = self._openings[group]
        if opening is not None and not opening.found_tokens:
            opening.running.add(resident.key)

    def ends(self, resident: Resident, cached_tokens: int | None) -> None:
        """A turn ended, or nobody knows how it will; of its context so much was there already, None: not known."""
        opening = self._openings.get(resident.group)
        if opening is None or resident.key not in opening.running:
            return
        if cached_tokens is None:
            self._openings[resident.group] = None
            return
        opening.running.remove(resident.key)
        opening.found_tokens.append(cached_tokens)
        if not opening.running:
            self._found[resident.kind].append(min(opening.found_tokens))
            self._openings[resident.group] = None

    def forget(self, group: Hashable) -> None:
        """None of it is in flight here any more."""
        self._openings.pop(group, None)

    def void(self) -> None:
        """All KV is gone: what the groups that open now find tells nothing."""
        self._openings = dict.fromkeys(self._openings)
