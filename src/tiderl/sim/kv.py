"""The KV blocks of one simulated replica: who uses them, what stays cached, what is evicted first.

Keeps I4: used plus cached blocks never exceed the pool, and what a turn takes is given back exactly once. A cached
block is named by its place (the prompt or the task that it belongs to, and its index there), which stands for the hash
of its ids: they are a function of the place. Knows no versions, no time and no batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import TaskKey

Shared = tuple[tuple[Hashable, int], ...]


@dataclass(slots=True, eq=False)
class Prefix:
    """Whole blocks that several tasks start with. While a turn uses it, all of it is taken from the pool."""

    name: Hashable
    first: int  # index of its first block in a context
    blocks: int
    users: int = 0  # running turns
    cached: int = 0  # blocks computed; in the queue while nobody uses it
    tasks: dict[TaskKey, None] = field(default_factory=dict)  # not over yet: it is forgotten with the last

    @property
    def end(self) -> int:
        return self.first + self.blocks


Prefixes = tuple[Prefix, ...]


@dataclass(slots=True)
class _Run:
    """Cached blocks of one waiting task, from index `first` on."""

    first: int
    cached: int


class BlockPool:
    """Blocks of `block_tokens` positions. Free and cached blocks form one queue by the moment they were given back, the
    last block of a turn first: what is needed is taken from its front, so a context is lost from its end."""

    def __init__(self, blocks: int, block_tokens: int, min_shared_tokens: int = 1) -> None:
        """What tasks have in common is computed by each where it is less than `min_shared_tokens`."""
        self.blocks, self.block_tokens, self.min_shared_tokens = blocks, block_tokens, min_shared_tokens
        self.used = 0  # by running turns, each prefix once
        self.cached = 0
        self.shared = 0  # blocks of prefixes, counted once for each running turn after the first
        self._queue: dict[Hashable, _Run | Prefix] = {}  # least recently used first
        self._prefixes: dict[Hashable, Prefix] = {}

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def whole_blocks_of(self, tokens: int) -> int:
        return tokens // self.block_tokens

    def prefixes(self, task: TaskKey, shared: Shared, context_tokens: int) -> Prefixes:
        """The prefixes of a task's context, outermost first. `shared`: (name, tokens from the context's start on).

        The last position of what is shared is always computed, and so never in a whole block of its own.
        """
        found = []
        first = 0
        for name, tokens in shared:
            end = self.whole_blocks_of(tokens - 1)
            if end * self.block_tokens >= context_tokens:
                break
            if end > first and tokens > self.min_shared_tokens:
                prefix = self._prefixes.get(name)
                if prefix is None:
                    prefix = self._prefixes[name] = Prefix(name, first, end - first)
                prefix.tasks[task] = None
                found.append(prefix)
                first = end
        return tuple(found)

    def need(self, prefixes: Prefixes, tokens: int) -> int:
        """Blocks that a turn with `tokens` positions would take from the pool now."""
        blocks = self.blocks_of(tokens)
        for prefix in prefixes:
            if prefix.users:
                blocks -= prefix.blocks
        return blocks

    def take(self, task: TaskKey, prefixes: Prefixes, tokens: int) -> tuple[list[Prefix], int]:
        """Take a turn's blocks. Returns the prefixes that it computes, each with what is `cached` of it, and how many
        of the task's own blocks are there still."""
        need = self.need(prefixes, tokens)
        if self.used + need > self.blocks:
            raise InvariantViolation(f"{need} more blocks for {task} break I4", where="simulated KV")
        whole = True
        mine: list[Prefix] = []
        for prefix in prefixes:
            if not prefix.users:
                if self._queue.pop(prefix.name, None) is not None:
                    self.cached -= prefix.cached
                if prefix.cached < prefix.blocks:
                    mine.append(prefix)
            else:  # somebody admitted earlier has computed it, or does so before this turn's own part is due
                self.shared += prefix.blocks
            prefix.users += 1
            whole = whole and not mine
        first = prefixes[-1].end if prefixes else 0
        run = self._queue.pop(task, None)
        own = 0
        if run is not None:
            self.cached -= run.cached
            if whole and isinstance(run, _Run) and run.first == first:
                own = min(run.cached, self.whole_blocks_of(tokens - 1) - first)
        self.grow(need)
        return mine, own

    def grow(self, blocks: int) -> None:
        """Running turns take `blocks` more; what is cached makes room."""
        self.used += blocks
        excess = self.used + self.cached - self.blocks
        while excess > 0:
            if not self._queue:
                raise InvariantViolation(f"{self.used} of {self.blocks} blocks used", where="simulated KV, I4")
            name, entry = next(iter(self._queue.items()))
            taken = min(excess, entry.cached)
            entry.cached -= taken
            self.cached -= taken
            excess -= taken
            if entry.cached == 0:
                del self._queue[name]

    def give_back(self, task: TaskKey, prefixes: Prefixes, kv_tokens: int, blocks: int, *, keep: bool) -> None:
        """A turn ends with `kv_tokens` positions in all of its `blocks`, those of its prefixes not counted. Its whole
        blocks stay cached when `keep`; a prefix does when nobody uses it any more, by its own `cached`."""
        self.used -= blocks
        first = prefixes[-1].end if prefixes else 0
        whole = self.whole_blocks_of(kv_tokens) - first
        if keep and whole > 0:
            self._queue[task] = _Run(first, whole)
            self.cached += whole
        for prefix in reversed(prefixes):
            prefix.users -= 1
            if prefix.users:
                self.shared -= prefix.blocks
            else:
                self.used -= prefix.blocks
                self._put(prefix)

    def touch(self, task: TaskKey, shared: Shared) -> None:
        """Mark a waiting task as most recently used; what it starts with stays longer than it does."""
        for name in (task, *(name for name, _ in reversed(shared))):
            entry = self._queue.pop(name, None)
            if entry is not None:
                self._queue[name] = entry

    def forget(self, task: TaskKey, shared: Shared) -> None:
        """The task is over: nothing of it, and nothing that only it would have used, stays cached."""
        run = self._queue.pop(task, None)
        if run is not None:
            self.cached -= run.cached
        for name, _ in shared:
            prefix = self._prefixes.get(name)
            if prefix is not None:
                prefix.tasks.pop(task, None)
                self._forget_if_over(prefix)

    def forget_cached(self) -> None:
        """Other weights: what is cached is worth nothing; prefixes in use are computed again."""
        self._queue.clear()
        self.cached = 0
        for prefix in self._prefixes.values():
            prefix.cached = 0

    def largest(self, count: int) -> tuple[str, ...]:
        """What holds most cached blocks, largest first, with its tokens."""
        top = heapq.nsmallest(count, self._queue.items(), key=lambda entry: (-entry[1].cached, str(entry[0])))
        return tuple(f"{name} ({entry.cached * self.block_tokens})" for name, entry in top)

    def _put(self, prefix: Prefix) -> None:
        if prefix.cached and prefix.tasks:
            self._queue[prefix.name] = prefix
            self.cached += prefix.cached
        else:
            prefix.cached = 0
            self._forget_if_over(prefix)

    def _forget_if_over(self, prefix: Prefix) -> None:
        if prefix.tasks or prefix.users:
            return
        if self._queue.pop(prefix.name, None) is not None:
            self.cached -= prefix.cached
        self._prefixes.pop(prefix.name, None)
