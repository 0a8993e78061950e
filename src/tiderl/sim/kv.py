"""The KV blocks of one simulated replica: who uses them, what stays cached, what is evicted first.

Keeps I4: used plus cached blocks never exceed the pool, and what a turn takes is given back exactly once. A cached
block is named by its place (the prompt or the task that it belongs to, and its index there), which stands for the hash
of its ids: they are a function of the place. Knows no versions and no batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import TaskKey
from tiderl.sim.held import HeldTasks

Shared = tuple[tuple[Hashable, int], ...]


@dataclass(slots=True, eq=False)
class Prefix:
    """Whole blocks that several tasks start with. While a turn uses it, all of it is taken from the pool."""

    name: Hashable
    first: int  # index of its first block in a context
    blocks: int
    users: int = 0  # running turns
    holders: int = 0  # held tasks that start with it: it is not evicted before them
    cached: int = 0  # blocks computed; evictable while nobody uses it
    ready_s: float = 0.0  # when what is on its way from host memory has arrived
    tasks: dict[TaskKey, None] = field(default_factory=dict)  # not over yet: it is forgotten with the last

    @property
    def end(self) -> int:
        return self.first + self.blocks


Prefixes = tuple[Prefix, ...]


@dataclass(slots=True)
class _Run:
    """Cached blocks of one waiting task, from index `first` on, behind its `prefixes`."""

    prefixes: Prefixes
    cached: int
    hinted: bool  # the task's last turn asked to keep them

    @property
    def first(self) -> int:
        return first_of_its_own(self.prefixes)


def first_of_its_own(prefixes: Prefixes) -> int:
    """The index of the first block that a task with these prefixes has for itself."""
    return prefixes[-1].end if prefixes else 0


class BlockPool:
    """Blocks of `block_tokens` positions. Free and cached blocks form one queue by the moment they were given back, the
    last block of a turn first: what is needed is taken from its front, so a context is lost from its end.

    `by_task` (the `ctb` policy): what a turn asked to keep is not in the queue but held, and its prefixes with it. When
    the queue is empty whole tasks are dropped, the lowest priority first, then the least recently used.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        min_shared_tokens: int = 1,
        *,
        by_task: bool = False,
        spill: Callable[[TaskKey, int], object] = lambda task, tokens: None,
    ) -> None:
        """What tasks have in common is computed by each where it is less than `min_shared_tokens`. `spill`: told of a
        task that goes whole to make room, and from how many tokens of its context it could have gone on."""
        self.blocks, self.block_tokens, self.min_shared_tokens = blocks, block_tokens, min_shared_tokens
        self.by_task, self._spill = by_task, spill
        self.used = 0  # by running turns, each prefix once
        self.cached = 0
        self.shared = 0  # blocks of prefixes, counted once for each running turn after the first
        self.evicted = 0  # blocks of tasks that asked to keep them, since start
        self._queue: dict[Hashable, _Run | Prefix] = {}  # least recently used first
        self._held: HeldTasks[_Run] = HeldTasks()
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
                self._queue.pop(prefix.name, None)
                self.cached -= prefix.cached
                if prefix.cached < prefix.blocks:
                    mine.append(prefix)
            else:  # somebody admitted earlier has computed it, or does so before this turn's own part is due
                self.shared += prefix.blocks
            prefix.users += 1
            whole = whole and not mine
        first = first_of_its_own(prefixes)
        run = self._pop(task)
        own = 0
        if run is not None and whole and run.first == first:
            own = min(run.cached, self.whole_blocks_of(tokens - 1) - first)
        self.grow(need)
        return mine, own

    def grow(self, blocks: int) -> None:
        """Running turns take `blocks` more; what is cached makes room."""
        self.used += blocks
        excess = self.used + self.cached - self.blocks
        while excess > 0:
            excess -= self._evict(excess)

    def _evict(self, blocks: int) -> int:
        """Make room for up to `blocks`, or for more where a task goes whole; returns for how many: 0 when a task goes
        that held nothing but prefixes."""
        if not self._queue:
            return self._evict_task()
        name, entry = next(iter(self._queue.items()))
        whole = self.by_task and isinstance(entry, _Run)
        if whole and isinstance(name, TaskKey):
            self._spill(name, self.cached_tokens_of(name))
        taken = entry.cached if whole else min(blocks, entry.cached)
        entry.cached -= taken
        self.cached -= taken
        if entry.cached == 0:
            del self._queue[name]
        if isinstance(entry, _Run) and entry.hinted:
            self.evicted += taken
        return taken

    def _evict_task(self) -> int:
        task = self._held.first_to_go()
        if task is not None:
            self._spill(task, self.cached_tokens_of(task))
        run = None if task is None else self._pop(task)
        if run is None:
            raise InvariantViolation(f"{self.used} of {self.blocks} blocks used", where="simulated KV, I4")
        self.evicted += run.cached
        return run.cached

    def give_back(
        self,
        task: TaskKey,
        prefixes: Prefixes,
        kv_tokens: int,
        blocks: int,
        *,
        keep: bool,
        priority: float | None = None,
    ) -> None:
        """A turn ends with `kv_tokens` positions in all of its `blocks`, those of its prefixes not counted. Its whole
        blocks stay cached when `keep`; a prefix does when nobody uses it any more, by its own `cached`. `priority`: of
        a turn that asked to keep them, None where nobody asked."""
        self.used -= blocks
        whole = max(0, self.whole_blocks_of(kv_tokens) - first_of_its_own(prefixes))
        if keep:
            self._keep(task, _Run(prefixes, whole, hinted=priority is not None), priority)
        for prefix in reversed(prefixes):
            prefix.users -= 1
            if prefix.users:
                self.shared -= prefix.blocks
            else:
                self.used -= prefix.blocks
                self._put(prefix)

    def _keep(self, task: TaskKey, run: _Run, priority: float | None) -> None:
        self.cached += run.cached
        if self.by_task and priority is not None:
            if run.cached or run.prefixes:
                self._held.put(task, run, priority)
                for prefix in run.prefixes:
                    prefix.holders += 1
        elif run.cached:
            self._queue[task] = run

    def touch(self, task: TaskKey, priority: float | None = None) -> None:
        """Mark a held task as most recently used; `priority`: of its next turn, once that is known."""
        self._held.touch(task, priority)

    def cached_tokens_of(self, task: TaskKey) -> int:
        """Positions from its context's start on that a waiting task could go on from."""
        run = self._held.get(task) or self._queue.get(task)
        if not isinstance(run, _Run) or any(prefix.cached < prefix.blocks for prefix in run.prefixes):
            return 0
        return (run.first + run.cached) * self.block_tokens

    def cut(self, task: TaskKey, tokens: int) -> None:
        """A waiting task's context goes on as it was only up to here: forget what is cached behind."""
        run = self._held.get(task) or self._queue.get(task)
        if isinstance(run, _Run):
            kept = min(run.cached, max(0, self.whole_blocks_of(tokens) - run.first))
            self.cached -= run.cached - kept
            run.cached = kept
            if not kept and not run.prefixes:
                self._pop(task)

    def drop(self, task: TaskKey) -> None:
        """Forget what a waiting task alone has cached; it is not over."""
        self._pop(task)

    def _pop(self, task: TaskKey) -> _Run | None:
        """Take a waiting task's blocks out; prefixes that only it has held are evictable from now on."""
        run = self._held.pop(task)
        if run is None:
            queued = self._queue.pop(task, None)
            run = queued if isinstance(queued, _Run) else None
        else:
            for prefix in reversed(run.prefixes):
                prefix.holders -= 1
                if not prefix.users and not prefix.holders and prefix.cached:
                    self._queue[prefix.name] = prefix
        if run is not None:
            self.cached -= run.cached
        return run

    def forget(self, task: TaskKey, shared: Shared) -> None:
        """The task is over: nothing of it, and nothing that only it would have used, stays cached."""
        self._pop(task)
        for name, _ in shared:
            prefix = self._prefixes.get(name)
            if prefix is not None:
                prefix.tasks.pop(task, None)
                self._forget_if_over(prefix)

    def forget_cached(self) -> None:
        """Other weights: what is cached is worth nothing; prefixes in use are computed again."""
        self._queue.clear()
        self._held.clear()
        self.cached = 0
        for prefix in self._prefixes.values():
            prefix.cached = prefix.holders = 0
            prefix.ready_s = 0.0

    def largest(self, count: int) -> tuple[str, ...]:
        """What holds most cached blocks, largest first, with its tokens."""
        everything = itertools.chain(self._queue.items(), self._held.items())
        top = heapq.nsmallest(count, everything, key=lambda entry: (-entry[1].cached, str(entry[0])))
        return tuple(f"{name} ({entry.cached * self.block_tokens})" for name, entry in top)

    def _put(self, prefix: Prefix) -> None:
        if prefix.cached and prefix.tasks:
            self.cached += prefix.cached
            if not prefix.holders:
                self._queue[prefix.name] = prefix
        else:
            prefix.cached = 0
            self._forget_if_over(prefix)

    def _forget_if_over(self, prefix: Prefix) -> None:
        if prefix.tasks or prefix.users or self._prefixes.get(prefix.name) is not prefix:
            return
        self._queue.pop(prefix.name, None)
        self.cached -= prefix.cached
        prefix.cached = 0
        self._prefixes.pop(prefix.name, None)
