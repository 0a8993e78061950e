"""The rules of tasks, over what the runtime asks of engines and environments: I4, I6, I8, slots and orphans.

Sits above the faults, where the runtime is: an answer counts as the runtime got it. Knows no scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from tiderl.data.records import Action, Observation, Prompt, Split, Step, TaskKey, Trajectory, WeightHandle
from tiderl.data.turns import EngineStats, PauseMode, Turn, TurnResult
from tiderl.runtime.ports import Engine, EnvironmentHandle, Environments
from tiderl.sim.checks.report import Findings
from tiderl.sim.checks.running import Replica
from tiderl.sim.checks.seats import SeatBook

NOT_LOADED = -1


class TaskBook:
    """The tasks of one driver. `slots`: as many may live at a time."""

    def __init__(self, findings: Findings, slots: int) -> None:
        self.findings, self.slots = findings, slots
        self.alive: Counter[TaskKey] = Counter()
        self.context: dict[TaskKey, tuple[int, int, int]] = {}
        """Tokens after the newest turn, its number, and how often the context had forked by then."""
        self.eval_versions: dict[TaskKey, int] = {}
        """What an evaluation's task is pinned to."""
        self.overlapping: set[TaskKey] = set()
        """Keys of two evaluations at once, on different replicas: their turns cannot be told apart here."""

    def opens(self, key: TaskKey) -> None:
        self.alive[key] += 1
        if self.alive[key] == 1:  # an evaluation uses the keys of the one before again
            self.context.pop(key, None)
            self.eval_versions.pop(key, None)
        if self.alive[key] > 1:
            self.overlapping.add(key)
        self.findings.require(self.alive[key] == 1 or key.split == "eval", "I1", f"task {key} lives twice")
        count = self.alive.total()
        self.findings.require(count <= self.slots, "I4", f"{count} tasks live, there are {self.slots} slots")
        if count == self.slots:
            self.findings.saw("all slots taken")

    def closes(self, key: TaskKey) -> None:
        self.alive[key] -= 1
        if not self.alive[key]:
            del self.alive[key]
            self.overlapping.discard(key)

    def asks(self, turn: Turn) -> None:
        """A context only grows, by what was sampled and what is new, or says up to where it stayed as it was (I8)."""
        before, number, forks = self.context.get(turn.task, (0, 0, 0))
        if turn.task in self.overlapping:
            before, number, forks = len(turn.ids), 0, 0
        kept = min(turn.rewrites[forks:], default=before)
        grows = kept <= min(before, len(turn.ids)) and turn.turn >= number and len(turn.rewrites) >= forks
        self.findings.require(grows, "I8", f"the context of {turn.task} shrinks")
        if len(turn.rewrites) > forks:
            self.findings.saw("a context forks")
        self.findings.require(self.alive[turn.task] > 0, "I1", f"a turn of {turn.task}, which has no environment")

    def answers(self, turn: Turn, result: TurnResult, stats: EngineStats, oldest: int, newest: int) -> None:
        """`oldest`, `newest`: versions that the engine may have had since the turn was asked."""
        count, name = len(result.ids), f"turn {turn.turn} of {turn.task}"
        require = self.findings.require
        require((result.task, result.turn) == (turn.task, turn.turn), "I8", f"{name} got the answer of {result.task}")
        require(len(result.logprobs) == len(result.versions) == count, "I8", f"{name} lacks log-probs or versions")
        require(count <= turn.sampling.max_new_tokens, "I8", f"{name} got {count} tokens, more than it may")
        require(
            stats.resident_tokens <= stats.budget_tokens, "I4", f"{stats.resident_tokens} tokens of KV are resident"
        )
        if count:
            found = (int(result.versions.min()), int(result.versions.max()))
            known = oldest <= found[0] and found[1] <= newest
            require(known, "I6", f"{name} has versions {found}, not {oldest} to {newest}")
            if turn.task.split == "eval" and turn.task not in self.overlapping:
                pinned = self.eval_versions.setdefault(turn.task, found[0])
                require(found == (pinned, pinned), "I6", f"evaluation {name} mixes versions {pinned} and {found}")
        if result.finish_reason == "aborted":
            self.findings.saw("an interrupted turn goes on")
        self.context[turn.task] = (len(turn.ids) + count, turn.turn, len(turn.rewrites))

    def over(self) -> None:
        """The driver ended and closed its things: nothing may be left."""
        left = [str(key) for key in self.alive]
        self.findings.require(not left, "I1", f"environments left open: {', '.join(left[:5])}")


class WatchedEngine:
    """One replica above the faults."""

    def __init__(self, inner: Engine, book: TaskBook, seats: SeatBook) -> None:
        self._inner, self._book, self._seats = inner, book, seats
        self.replica, self.capabilities = inner.replica, inner.capabilities
        seats.replicas[self.replica] = Replica(self.capabilities, seats.common_tokens)
        self._known = NOT_LOADED
        """The version whose load was answered last."""
        self._asked = NOT_LOADED
        """The newest version whose load was asked for."""

    @property
    def stats(self) -> EngineStats:
        return self._inner.stats

    async def generate(self, turn: Turn) -> TurnResult:
        clock = asyncio.get_running_loop().time
        self._book.asks(turn)
        self._seats.asks(self.replica, turn, clock())
        oldest = self._known if self._inner.stats.version != NOT_LOADED else NOT_LOADED
        try:
            result = await self._inner.generate(turn)
        finally:
            self._seats.over(self.replica, turn.task, clock())
        self._book.answers(turn, result, self._inner.stats, oldest, self._asked)
        self._seats.answered(self.replica, result)
        return result

    async def abort(self, task: TaskKey, turn: int) -> None:
        await self._inner.abort(task, turn)

    def retain(self, task: TaskKey) -> None:
        self._inner.retain(task)

    def release(self, task: TaskKey) -> None:
        self._inner.release(task)

    def offload(self, task: TaskKey) -> None:
        self._inner.offload(task)

    async def pause(self, mode: PauseMode) -> None:
        await self._inner.pause(mode)

    async def resume(self) -> None:
        await self._inner.resume()

    async def load_weights(self, handle: WeightHandle) -> None:
        if self._inner.stats.version == NOT_LOADED:  # its process is new: a version that is pinned may be an older one
            self._known = self._asked = NOT_LOADED
        self._book.findings.require(
            handle.version >= self._asked, "I2", f"replica {self.replica} goes back to version {handle.version}"
        )
        self._asked = handle.version
        self._seats.loads(self.replica)
        await self._inner.load_weights(handle)
        self._known = handle.version


class WatchedEnvironments:
    """The environments above the faults."""

    def __init__(self, inner: Environments, book: TaskBook) -> None:
        self._inner, self._book = inner, book
        self.slots, self.has_expert = inner.slots, inner.has_expert

    async def start(self) -> None:
        await self._inner.start()

    async def prompts(self, split: Split) -> Sequence[Prompt]:
        return await self._inner.prompts(split)

    async def vocabulary(self) -> tuple[str, ...]:
        return await self._inner.vocabulary()

    async def expert(self, prompt: Prompt) -> Sequence[str]:
        return await self._inner.expert(prompt)

    async def open(self, key: TaskKey, prompt: Prompt) -> WatchedHandle:
        self._book.opens(key)
        try:
            return WatchedHandle(await self._inner.open(key, prompt), key, self._book)
        except BaseException:
            self._book.closes(key)
            raise

    async def close(self) -> None:
        await self._inner.close()


class WatchedHandle:
    """One task's environment: asked one thing at a time, and nothing between a pause and its resume."""

    def __init__(self, inner: EnvironmentHandle, key: TaskKey, book: TaskBook) -> None:
        self._inner, self._key, self._book = inner, key, book
        self._open = True
        self._running = ""
        """The call that has not come back."""
        self._paused = False

    @contextlib.contextmanager
    def _asked(self, call: str, *, paused: bool = False) -> Iterator[None]:
        """`paused`: what the environment must be at this call."""
        require, of = self._book.findings.require, f"{call} of {self._key}"
        require(not self._running, "I1", f"{of} while its {self._running} is running")
        require(self._paused is paused, "I1", f"{of}, which is {'paused' if self._paused else 'not paused'}")
        self._running = call
        try:
            yield
        finally:
            self._running = ""

    async def reset(self) -> Observation:
        with self._asked("reset"):
            return await self._inner.reset()

    async def step(self, action: Action) -> Step:
        with self._asked("step"):
            return await self._inner.step(action)

    async def score(self, trajectory: Trajectory) -> float | None:
        with self._asked("score"):
            return await self._inner.score(trajectory)

    async def pause(self) -> None:
        with self._asked("pause"):
            self._paused = True
            self._book.findings.saw("an environment pauses")
            await self._inner.pause()

    async def resume(self) -> None:
        with self._asked("resume", paused=True):
            await self._inner.resume()
            self._paused = False

    async def close(self) -> None:
        if self._paused:
            self._book.findings.saw("an environment closed while it is paused")
        try:
            await self._inner.close()
        finally:
            if self._open:
                self._open = False
                self._book.closes(self._key)
