"""What an environment leaves behind when its episodes are over: memory, threads, processes.

Two halves of equal work are compared: what is taken once (a cache, a thread pool, an imported module) shows in the
first, what is taken by every episode in both. Looks at worker processes from outside. Must not know findings.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psutil

EPISODES = 40
"""A half. Fewer where they are slow."""
HALF_S = 4.0
SETTLE_S = 2.0
"""What is going to end by itself has ended by then."""
BYTES_PER_EPISODE_MOST = 32 * 1024
"""A run plays some 100,000 episodes: more than this each would be gigabytes. Allocators round up far less."""
LEFT_PER_EPISODE_MOST = 0.2
"""Threads or processes: a few that stay for good are no leak."""


@dataclass(frozen=True)
class Held:
    """What processes hold at one moment."""

    resident_bytes: int
    threads: int
    children: int


@dataclass(frozen=True)
class Leaks:
    """What each episode left behind, on average: the smaller of two halves."""

    episodes: int
    bytes_each: float
    threads_each: float
    children_each: float

    @property
    def found(self) -> tuple[str, ...]:
        """What is more than it may be, in words."""
        leaks = []
        if self.bytes_each > BYTES_PER_EPISODE_MOST:
            leaks.append(f"{self.bytes_each / 1024:.0f} KiB of memory")
        if self.threads_each > LEFT_PER_EPISODE_MOST:
            leaks.append(f"{self.threads_each:.1f} threads")
        if self.children_each > LEFT_PER_EPISODE_MOST:
            leaks.append(f"{self.children_each:.1f} processes")
        return tuple(leaks)


async def measure(play: Callable[[int], Awaitable[object]], pids: Callable[[], Sequence[int]]) -> Leaks | None:
    """`play(n)` plays the n-th episode to its end. None where a process was replaced meanwhile: nothing to compare."""
    before = pids()
    held = [await _settled(before, None)]
    episodes = 0
    for _ in range(2):
        began_s = time.monotonic()
        half = 0
        while half < EPISODES and (half == 0 or time.monotonic() - began_s < HALF_S):
            await play(episodes + half)
            half += 1
        episodes += half
        if pids() != before:
            return None
        held.append(await _settled(before, held[-1]))
    halves = max(1.0, episodes / 2)
    grown = list(itertools.pairwise(held))
    return Leaks(
        episodes,
        min(new.resident_bytes - old.resident_bytes for old, new in grown) / halves,
        min(new.threads - old.threads for old, new in grown) / halves,
        min(new.children - old.children for old, new in grown) / halves,
    )


async def _settled(pids: Sequence[int], before: Held | None) -> Held:
    """What is held once closed episodes have had time to go."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        held = _held(pids)
        gone = before is not None and held.threads <= before.threads and held.children <= before.children
        if gone or time.monotonic() > until_s or (before is None and held == _held(pids)):
            return held
        await asyncio.sleep(0.05)


def _held(pids: Sequence[int]) -> Held:
    memory = threads = children = 0
    for pid in pids:
        process = psutil.Process(pid)
        memory += int(process.memory_info().rss)
        threads += process.num_threads()
        children += len(process.children(recursive=True))
    return Held(memory, threads, children)
