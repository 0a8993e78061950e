"""The rules of training, over what really reached the model: I2, I5, I7 and I9.

Keeps the lineage of the trainer's state: which updates are in the weights, in which order, over losses, restores and
redos. An exported version must hold exactly the updates 1 to its number, each once, each of the journal's trajectories.
Sits below the faults: what was computed counts, also where the answer got lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tiderl.data.records import MicroBatch, UpdateStats, WeightHandle
from tiderl.data.records import Sequence as TrainSequence
from tiderl.runtime.ports import Actor, Engine, Update
from tiderl.sim.checks.journal import JournalBook
from tiderl.sim.checks.report import Findings

Lineage = tuple[tuple[int, tuple[int, ...]], ...]
"""(update, trajectory ids) of each optimizer step in the weights, in order."""


class TrainerBook:
    """What one trainer's state holds. `saved` outlives the driver: folder to lineage."""

    def __init__(self, journal: JournalBook, findings: Findings, saved: dict[str, Lineage]) -> None:
        self.journal, self.findings, self.saved = journal, findings, saved
        self.lineage: Lineage | None = None
        self.step: Counter[int] = Counter()
        """Loss-bearing tokens of the running update, by trajectory."""

    def begins(self, update: int) -> None:
        self.step = Counter()
        self.findings.require(self.lineage is not None, "I2", f"update {update} begins on an empty trainer")

    def trains(self, mb: MicroBatch) -> None:
        for sequence in mb.sequences:
            self.step[sequence.trajectory_id] += int(sequence.loss_mask.sum())
            self._check_group(sequence)

    def _check_group(self, sequence: TrainSequence) -> None:
        """Advantages come from the members of the sequence's own group, all of them (I9)."""
        expected = self.journal.rewards(sequence.prompt_id)
        given = sequence.group_rewards.tolist()
        name = f"trajectory {sequence.trajectory_id}"
        self.findings.require(given == expected, "I9", f"{name} is compared with {given}, its group has {expected}")
        mine = given[sequence.member] if sequence.member < len(given) else float("nan")
        self.findings.require(mine == sequence.reward, "I9", f"{name} is not at its place in its group")

    def finishes(self, update: int) -> None:
        self.lineage = (*(self.lineage or ()), (update, tuple(self._trained())))
        committed = update in self.journal.updates
        self.findings.saw("an update redone" if committed else "an update made")

    def _trained(self) -> Iterator[int]:
        """The trajectories of the update, each as often as all of its sampled tokens bore loss (I8)."""
        for number, tokens in self.step.items():
            row = self.journal.rows.get(number)
            payload = None if row is None else self.journal.payloads.get(str(row.sha256))
            whole = tokens if payload is None else payload.loss_tokens
            times, rest = divmod(tokens, whole)
            self.findings.require(
                not rest, "I8", f"trajectory {number} bore loss for {tokens} tokens, it has {whole} sampled ones"
            )
            yield from [number] * times

    def saves(self, directory: str) -> None:
        self._check(directory, len({update for update, _ in self.lineage or ()}))
        if self.lineage is not None:
            self.saved[directory] = self.lineage

    def restores(self, directory: str) -> None:
        self.lineage = self.saved.get(directory)
        self.findings.saw("the trainer restored")

    def exports(self, version: int) -> None:
        self._check(f"version {version}", version)

    def lost(self) -> None:
        self.lineage, self.step = None, Counter()

    def _check(self, name: str, updates: int) -> None:
        """The weights hold the updates 1 to `updates`, each once, each as the journal has it (I2)."""
        if self.lineage is None:
            self.findings.wrong("I2", f"{name} is taken from an empty trainer")
            return
        steps: dict[int, list[int]] = {}
        order = [update for update, _ in self.lineage]
        for update, ids in self.lineage:
            steps.setdefault(update, []).extend(ids)
        parts = self.journal.settings.steps_per_batch
        expected = [number for number in range(1, updates + 1) for _ in range(parts)]
        self.findings.require(order == expected, "I2", f"{name} holds the updates {order}, not {expected}")
        for update, computed in steps.items():
            journal = sorted(self.journal.updates.get(update, ()))
            what = f"{name}: update {update} was computed from {sorted(computed)}, not {journal}"
            self.findings.require(sorted(computed) == journal, "I2", what)


class WatchedActor:
    """The actor below the faults. `engines`: those that share its rank, which must not generate meanwhile (I5)."""

    def __init__(self, inner: Actor, book: TrainerBook, engines: Mapping[int, Engine]) -> None:
        self._inner, self._book, self._engines = inner, book, engines
        self.rank = inner.rank

    async def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None:
        self._check_role(mb)
        await self._inner.forward(mb, proximal=proximal)

    async def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None:
        self._check_role(mb)
        await self._inner.backward(mb, ref_logprobs)
        self._book.trains(mb)

    def _check_role(self, mb: MicroBatch) -> None:
        for replica, engine in self._engines.items():
            stats = engine.stats
            idle = stats.paused or (stats.version < 0 and not stats.running)
            self._book.findings.require(
                idle, "I5", f"replica {replica} may generate while its rank trains update {mb.update}"
            )


class WatchedUpdate:
    """The update below the faults."""

    def __init__(self, inner: Update, book: TrainerBook) -> None:
        self._inner, self._book = inner, book
        self._update = 0

    async def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]:
        metrics = await self._inner.warm_up(demos, updates, lr)
        self._book.lineage = ()
        return metrics

    async def begin(self, update: int, members: Sequence[int]) -> None:
        await self._inner.begin(update, members)
        self._update = update
        self._book.begins(update)

    async def finish(self) -> UpdateStats:
        stats = await self._inner.finish()
        self._book.finishes(self._update)
        return stats

    async def export(self, version: int) -> WeightHandle:
        handle = await self._inner.export(version)
        self._book.exports(version)
        return handle

    async def discard(self, handle: WeightHandle) -> None:
        await self._inner.discard(handle)

    async def save(self, directory: str) -> None:
        await self._inner.save(directory)
        self._book.saves(directory)

    async def restore(self, directory: str) -> None:
        await self._inner.restore(directory)
        self._book.restores(directory)

    async def save_model(self, directory: str) -> None:
        await self._inner.save_model(directory)
