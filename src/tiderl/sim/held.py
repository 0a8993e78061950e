"""Which held task makes room first: the lowest priority, of equals the least recently used.

A heap with marks of every use; those that are not a task's last count no more. Knows no blocks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import ItemsView
from typing import Generic, TypeVar

from tiderl.data.records import TaskKey

What = TypeVar("What")

STALE_MARKS = 64  # beyond as many as there are tasks, before the heap is cleaned


class HeldTasks(Generic[What]):
    """What each held task has, by task, in the order in which it is to be given up."""

    def __init__(self) -> None:
        self._what: dict[TaskKey, What] = {}
        self._last: dict[TaskKey, tuple[float, int]] = {}  # priority and moment of the last use
        self._marks: list[tuple[float, int, TaskKey]] = []
        self._numbers = itertools.count()

    def put(self, task: TaskKey, what: What, priority: float) -> None:
        """Hold it, as most recently used."""
        self._what[task] = what
        self._mark(task, priority)

    def touch(self, task: TaskKey, priority: float | None = None) -> None:
        """Mark a task as most recently used, of this priority from now on; nothing happens where it is not held."""
        if task in self._what:
            self._mark(task, self._last[task][0] if priority is None else priority)

    def get(self, task: TaskKey) -> What | None:
        return self._what.get(task)

    def pop(self, task: TaskKey) -> What | None:
        what = self._what.pop(task, None)
        if what is not None:
            del self._last[task]
        return what

    def first_to_go(self) -> TaskKey | None:
        """None when nobody is held."""
        while self._marks:
            *mark, task = self._marks[0]
            if self._last.get(task) == tuple(mark):
                return task
            heapq.heappop(self._marks)
        return None

    def items(self) -> ItemsView[TaskKey, What]:
        return self._what.items()

    def clear(self) -> None:
        self._what.clear()
        self._last.clear()
        self._marks.clear()

    def _mark(self, task: TaskKey, priority: float) -> None:
        self._last[task] = mark = (priority, next(self._numbers))
        heapq.heappush(self._marks, (*mark, task))
        if len(self._marks) > 2 * len(self._last) + STALE_MARKS:
            self._marks = [(*mark, task) for task, mark in self._last.items()]
            heapq.heapify(self._marks)
