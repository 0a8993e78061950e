"""Puts the checks around one driver's ports: below the faults what happens, above them what the runtime sees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiderl.data.events import Event, UpdateCommitted
from tiderl.data.pools import PoolBook
from tiderl.data.records import Trajectory
from tiderl.data.settings import RunSettings
from tiderl.runtime.ports import (
    Actor,
    Blobs,
    CheckpointRow,
    Cluster,
    Engine,
    Ledger,
    LedgerRow,
    Ports,
    RankChange,
    Recorder,
    Reference,
    Replay,
    Update,
)
from tiderl.sim.checks.events import EventBook
from tiderl.sim.checks.journal import JournalBook
from tiderl.sim.checks.report import Findings
from tiderl.sim.checks.seats import SeatBook
from tiderl.sim.checks.tasks import TaskBook, WatchedEngine, WatchedEnvironments
from tiderl.sim.checks.training import Lineage, TrainerBook, WatchedActor, WatchedUpdate
from tiderl.sim.faults.cluster import Losable


@dataclass
class Checks:
    """All books of one run, over its drivers."""

    settings: RunSettings
    findings: Findings = field(default_factory=Findings)
    saved: dict[str, Lineage] = field(default_factory=dict)
    common_tokens: int = 0
    """What the prompts of the run may have in common at most."""

    def __post_init__(self) -> None:
        self.journal = JournalBook(self.settings, self.findings)
        self.drivers = 0
        self.reported: set[int] = set()
        """Updates whose commit is among the events, of any driver."""
        self.tasks = TaskBook(self.findings, self.settings.slots)
        self.events: EventBook | None = None
        self.seats: SeatBook | None = None

    def below(self, ports: Ports) -> Ports:
        """Around the simulated ports, before the faults. A new driver begins."""
        cluster: Losable = ports.cluster  # type: ignore[assignment]
        self.drivers += 1
        book = TrainerBook(self.journal, self.findings, self.saved)
        self.tasks = TaskBook(self.findings, self.settings.slots)
        self.events = EventBook(
            self.journal, self.findings, cluster.engine_ranks, [actor.rank for actor in cluster.actors]
        )
        self.seats = SeatBook(self.events, self.settings, self.common_tokens)
        return replace(
            ports,
            cluster=WatchedCluster(cluster, book),
            ledger=WatchedLedger(ports.ledger, self.journal),
            blobs=WatchedBlobs(ports.blobs, self.journal),
            recorder=WatchedRecorder(ports.recorder, self.events, self.seats, self.reported),
        )

    def above(self, ports: Ports) -> Ports:
        """Around the ports as the runtime gets them."""
        cluster, seats = ports.cluster, self.seats
        assert seats is not None
        engines = {r: WatchedEngine(engine, self.tasks, seats) for r, engine in cluster.engines.items()}
        return replace(
            ports,
            cluster=SeenCluster(cluster, engines),
            environments=WatchedEnvironments(ports.environments, self.tasks),
        )

    def look_into(self, books: Callable[[], Mapping[int, PoolBook]], alive: Callable[[], bool]) -> None:
        """Where the driver's pools tell of themselves, and whether it lives."""
        assert self.seats is not None
        self.seats.books, self.seats.alive = books, alive

    def driver_over(self, *, finished: bool, killed: bool) -> None:
        """A driver ended; `finished`: the run with it. A killed one closes nothing by itself."""
        self.journal.check_whole(finished=finished)
        if finished:
            missing = self.journal.updates.keys() - self.reported
            self.findings.require(not missing, "I1", f"no event tells of the updates {sorted(missing)}")
        if not killed:
            self.tasks.over()
            if self.seats is not None:
                self.seats.driver_over()


class WatchedCluster:
    """The cluster below the faults: trainer and losses."""

    def __init__(self, inner: Losable, book: TrainerBook) -> None:
        self._inner, self._book = inner, book
        self.engines: Mapping[int, Engine] = inner.engines
        self.engine_ranks: Mapping[int, tuple[int, ...]] = inner.engine_ranks
        self.references: Sequence[Reference] = inner.references
        trains = inner.actors[0].rank
        shared = {r: engine for r, engine in inner.engines.items() if trains in inner.engine_ranks[r]}
        self.actors: Sequence[Actor] = [WatchedActor(actor, book, shared) for actor in inner.actors]
        self.update: Update = WatchedUpdate(inner.update, book)

    @property
    def ranks(self) -> int:
        return self._inner.ranks

    async def start(self) -> None:
        await self._inner.start()

    async def next_change(self) -> RankChange:
        return await self._inner.next_change()

    async def close(self) -> None:
        await self._inner.close()

    def lose(self, rank: int, reason: str = "the rank's process died") -> None:
        if rank in (actor.rank for actor in self.actors):
            self._book.lost()
        self._inner.lose(rank, reason)

    def restore(self, rank: int) -> None:
        self._inner.restore(rank)


class SeenCluster:
    """The cluster above the faults: engines."""

    def __init__(self, inner: Cluster, engines: Mapping[int, Engine]) -> None:
        self._inner = inner
        self.engines = engines
        self.engine_ranks, self.references = inner.engine_ranks, inner.references
        self.actors, self.update = inner.actors, inner.update

    @property
    def ranks(self) -> int:
        return self._inner.ranks

    async def start(self) -> None:
        await self._inner.start()

    async def next_change(self) -> RankChange:
        return await self._inner.next_change()

    async def close(self) -> None:
        await self._inner.close()


class WatchedLedger:
    """The journal as it is really written: a write that was refused is not."""

    def __init__(self, inner: Ledger, book: JournalBook) -> None:
        self._inner, self._book = inner, book

    def append(self, rows: Sequence[LedgerRow]) -> None:
        self._inner.append(rows)
        self._book.append(rows)

    async def commit(self, update: int, trajectory_ids: Sequence[int]) -> None:
        await self._inner.commit(update, trajectory_ids)
        self._book.commit(update, trajectory_ids)

    async def durable(self, checkpoint: CheckpointRow) -> None:
        await self._inner.durable(checkpoint)

    async def replay(self) -> Replay:
        return await self._inner.replay()

    async def close(self) -> None:
        await self._inner.close()


class WatchedBlobs:
    """The payloads as they are really stored."""

    def __init__(self, inner: Blobs, book: JournalBook) -> None:
        self._inner, self._book = inner, book

    async def put(self, trajectory: Trajectory) -> str:
        sha256 = await self._inner.put(trajectory)
        self._book.stored(trajectory, sha256)
        return sha256

    async def get(self, sha256: str) -> Trajectory:
        return await self._inner.get(sha256)

    async def delete(self, sha256s: Sequence[str]) -> None:
        await self._inner.delete(sha256s)

    async def keep_only(self, sha256s: Collection[str]) -> None:
        await self._inner.keep_only(sha256s)


class WatchedRecorder:
    """The events, before they go on."""

    def __init__(self, inner: Recorder, book: EventBook, seats: SeatBook, reported: set[int]) -> None:
        self._inner, self._book, self._seats, self._reported = inner, book, seats, reported

    def emit(self, event: Event) -> None:
        if isinstance(event, UpdateCommitted):
            self._reported.add(event.update)
        self._book.emit(event)
        self._seats.emit(event)
        self._inner.emit(event)
