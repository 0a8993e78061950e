"""KV of a slow, obvious engine: every block by name, evicted one by one. The pool of `engine_oracle.py`.

A name is ("system", i), ("group", number, i) or ("task", number, i): whose it is and where in the context.
"""

from __future__ import annotations

Name = tuple  # type: ignore[type-arg]


class Blocks:
    """`groups[task]`: the task's group, -1 for none. `by_task`: the `ctb` policy."""

    def __init__(self, count: int, by_task: bool, groups: list[int]) -> None:
        self.count, self.by_task, self.groups = count, by_task, groups
        self.users: dict[Name, int] = {}
        self.queue: list[Name] = []  # whole ones that nobody uses, least recently used first
        self.filled: dict[Name, int] = {}  # positions computed
        self.held: dict[int, tuple[float, int]] = {}  # task -> (priority of its last turn, moment of use)
        self.moments = 0
        self.evicted = 0  # blocks of held tasks

    @property
    def resident(self) -> int:
        return sum(self.filled.values())

    @property
    def resident_unused(self) -> int:
        return sum(self.filled[name] for name in self.queue)

    def take(self, name: Name) -> None:
        self.users[name] = self.users.get(name, 0) + 1
        self.filled.setdefault(name, 0)
        while len(self.users) + len(self.queue) > self.count and self.queue:
            self._evict()

    def _evict(self) -> None:
        free = next((name for name in self.queue if not self._is_held(name)), None)
        if free is None:
            task = min(self.held, key=lambda task: self.held[task])
            names = self._names_of(task)
            self.evicted += len(names)
            self.unhold(task)
        else:
            names = self._names_of(free[1]) if self.by_task and free[0] == "task" else [free]
        for name in names:
            self.forget(name)

    def _names_of(self, task: int) -> list[Name]:
        return [name for name in self.queue if name[:2] == ("task", task)]

    def _is_held(self, name: Name) -> bool:
        """By its task, or by any task that starts with it."""
        if name[0] == "task":
            return name[1] in self.held
        groups = [self.groups[task] for task in self.held]
        return name[1] in groups if name[0] == "group" else any(group >= 0 for group in groups)

    def use(self, task: int, priority: float) -> None:
        """The next turn of a task has come."""
        if task in self.held:
            self.hold(task, priority)

    def hold(self, task: int, priority: float) -> None:
        if self.by_task:
            self.moments += 1
            self.held[task] = (priority, self.moments)

    def unhold(self, task: int) -> None:
        """What only this task has held, and nobody uses, counts as used just now."""
        before = [name for name in self.queue if name[0] != "task" and self._is_held(name)]
        self.held.pop(task, None)
        released = [name for name in before if not self._is_held(name)]
        for name in sorted(released, key=lambda name: (name[0] == "system", -name[-1])):
            self.queue.remove(name)
            self.queue.append(name)

    def forget(self, name: Name) -> None:
        self.queue.remove(name)
        del self.filled[name]
