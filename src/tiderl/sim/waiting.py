"""Who waits for whom, in one line: what a deadlock's message names. Reads the tasks of a loop, changes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import CodeType
from typing import Any

MAX_KINDS = 6  # kinds of waits named; the rest is counted


def tasks_by_birth(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """The living tasks of a virtual loop, the oldest first: asyncio itself only has a set of them."""
    return sorted(asyncio.all_tasks(loop), key=lambda task: getattr(task, "number", -1))


def describe_waits(loop: asyncio.AbstractEventLoop) -> str:
    """The unfinished tasks of `loop`, those that wait in the same place counted together.

    `task 'rollout' waits in run > SimEngine.generate:121 for a result; 3 tasks like 'task-7' wait in … for …`.
    """
    tasks = [task for task in tasks_by_birth(loop) if not task.done()]
    if not tasks:
        return "no task is alive"
    places: Counter[str] = Counter()
    first: dict[str, str] = {}
    for task in tasks:
        place = f"{_place(task)} for {_awaited(task)}"
        places[place] += 1
        first.setdefault(place, task.get_name())
    kinds = [
        f"task '{first[place]}' waits in {place}"
        if count == 1
        else f"{count} tasks like '{first[place]}' wait in {place}"
        for place, count in places.most_common(MAX_KINDS)
    ]
    rest = len(places) - len(kinds)
    return "; ".join(kinds) + (f"; and in {rest} other places" if rest > 0 else "")


def _place(task: asyncio.Task[Any]) -> str:
    """The chain of coroutines that the task is in, outermost first, with the line of the innermost."""
    names: list[str] = []
    line = 0
    current: Any = task.get_coro()
    while current is not None:
        code: CodeType | None = getattr(current, "cr_code", None)
        if code is None:
            break
        names.append(code.co_qualname.replace(".<locals>", ""))
        line = current.cr_frame.f_lineno if current.cr_frame is not None else code.co_firstlineno
        current = current.cr_await
    return " > ".join(names[-4:]) + f":{line}"


def _awaited(task: asyncio.Task[Any]) -> str:
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None:
        return "its turn"
    if isinstance(waiter, asyncio.Task):
        return f"task '{waiter.get_name()}'"
    children = getattr(waiter, "_children", None)  # of gather
    if children:
        waiting = [child for child in children if not child.done()]
        named = next((child.get_name() for child in waiting if isinstance(child, asyncio.Task)), "a result")
        return f"{len(waiting)} of gather, first '{named}'"
    return "a result"
