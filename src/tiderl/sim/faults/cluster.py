"""A cluster whose ranks die and come back: a wrapper of the Cluster port, and of all ports of a run.

Keeps one process one process: a rank that is down does not die again before its return. What the simulated cluster
gives beside the port is `lose` and `restore`; nothing else of it is known here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tiderl.data.records import TaskKey
from tiderl.runtime.ports import Actor, Cluster, Engine, Ports, RankChange, Reference, Update
from tiderl.sim.faults.engine import FaultyEngine
from tiderl.sim.faults.environments import FaultyEnvironments
from tiderl.sim.faults.plan import Dice
from tiderl.sim.faults.store import DriverLife, FaultyBlobs, FaultyLedger, MortalRecorder
from tiderl.sim.faults.trainer import Damage, FaultyActor, FaultyUpdate, TrainingCalls


class Losable(Cluster, Protocol):
    """A cluster whose ranks can be taken away."""

    def lose(self, rank: int, reason: str = ...) -> None: ...
    def restore(self, rank: int) -> None: ...


class FaultyCluster:
    """`inner`, with ports that fail and ranks that die."""

    def __init__(self, inner: Losable, dice: Dice, damage: Damage, *, checkpoints_kept: int) -> None:
        self._inner, self._dice = inner, dice
        self._down: dict[int, asyncio.TimerHandle] = {}
        self._untold: set[int] = set()
        """Ranks whose loss the runtime has not heard of: a cluster reports it before the rank is back."""
        self._due: set[int] = set()
        """Of these, the ones that would be back."""
        self._losses: Counter[int] = Counter()
        self._closed = False
        self._places: dict[TaskKey, int] = {}
        """Where each task's newest turn ran."""
        self.engine_ranks: Mapping[int, tuple[int, ...]] = inner.engine_ranks
        self._faulty = {replica: self._engine(replica, engine) for replica, engine in inner.engines.items()}
        self.engines: Mapping[int, Engine] = self._faulty
        self.references: Sequence[Reference] = inner.references
        trains = inner.actors[0].rank
        calls = TrainingCalls(dice, lambda: self.crash(trains, "trainer_crash"), lambda: self._losses[trains])
        self.actors: Sequence[Actor] = [FaultyActor(actor, calls) for actor in inner.actors]
        self.update: Update = FaultyUpdate(inner.update, calls, damage, checkpoints_kept=checkpoints_kept)

    @property
    def ranks(self) -> int:
        return self._inner.ranks

    def _engine(self, replica: int, engine: Engine) -> FaultyEngine:
        rank = self.engine_ranks[replica][0]
        crash, losses = lambda: self.crash(rank, "engine_crash"), lambda: self._losses[rank]
        return FaultyEngine(engine, self._dice, crash, losses, self._places)

    def pauses(self, key: TaskKey) -> None:
        """The task waits for room on its replica."""
        replica = self._places.get(key)
        if replica is not None and self._dice.strikes("crash_at_pause"):
            self.crash(self.engine_ranks[replica][0], "crash_at_pause")

    def crash(self, rank: int, fault: str) -> None:
        """The rank's process dies now, and comes back after a delay."""
        if rank in self._down or self._closed:
            return
        away_s = self._dice.delay_s(fault) if self._dice.enabled(fault) else self._dice.plan.delay_s
        self._down[rank] = asyncio.get_running_loop().call_later(away_s, self._restore, rank)
        self._untold.add(rank)
        self._losses[rank] += 1
        self._inner.lose(rank)

    def _restore(self, rank: int) -> None:
        if rank in self._untold:
            self._due.add(rank)
            return
        self._due.discard(rank)
        del self._down[rank]
        self._inner.restore(rank)

    async def start(self) -> None:
        await self._inner.start()

    async def next_change(self) -> RankChange:
        change = await self._inner.next_change()
        if self._dice.strikes("notice_late"):
            await asyncio.sleep(self._dice.delay_s("notice_late"))
        if change.lost:
            self._untold.discard(change.rank)
            if change.rank in self._due:
                self._restore(change.rank)
        return change

    async def close(self) -> None:
        self._closed = True
        for timer in self._down.values():
            timer.cancel()
        for engine in self._faulty.values():
            engine.close()
        await self._inner.close()


def with_faults(ports: Ports, dice: Dice, damage: Damage, life: DriverLife, *, checkpoints_kept: int) -> Ports:
    """The ports of one driver, failing by the dice's plan; `ports.cluster` must be able to lose ranks."""
    losable: Losable = ports.cluster  # type: ignore[assignment]
    cluster = FaultyCluster(losable, dice, damage, checkpoints_kept=checkpoints_kept)
    return replace(
        ports,
        cluster=cluster,
        environments=FaultyEnvironments(ports.environments, dice, cluster.pauses),
        ledger=FaultyLedger(ports.ledger, life),
        blobs=FaultyBlobs(ports.blobs, life),
        recorder=MortalRecorder(ports.recorder, life),
    )
