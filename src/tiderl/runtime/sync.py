"""Publishing versions: the trainer exports, every replica loads the newest when it may, nobody waits for the slowest.

Keeps I2 (a version number is exported once) and the pin of an evaluation: while a replica holds evaluation tasks it
loads no newer version, and a version that is to be evaluated is not skipped. Knows no files: handles only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tiderl.data.errors import InfrastructureFault, RankLost
from tiderl.data.events import Event, Fault, VersionLoaded, VersionPublished
from tiderl.data.records import WeightHandle
from tiderl.runtime.ports import Cluster
from tiderl.runtime.wakeup import Wakeup
from tiderl.schedule.strategy import AtNewVersion

NOT_LOADED = -1
MAX_FAILED_LOADS = 5
"""Loads of one replica that fail in a row, its process alive, before the run ends: the weights themselves are bad."""


class Publisher:
    """Which version is where. One loop per replica pulls; `publish` only exports and tells."""

    def __init__(
        self,
        cluster: Cluster,
        wakeup: Wakeup,
        emit: Callable[[Event], None],
        *,
        at_new_version: AtNewVersion,
        held: Callable[[int, int], bool],
        busy: Callable[[int], bool],
        pinned: Callable[[], list[int]],
        evaluates: Callable[[int], int | None] = lambda replica: None,
    ) -> None:
        """`held(replica, version)`: evaluation keeps the replica there. `busy(replica)`: it runs training tasks.
        `pinned()`: versions that wait for their evaluation, ascending. `evaluates(replica)`: the version of the
        evaluation tasks that it runs."""
        self.cluster, self.wakeup, self.emit = cluster, wakeup, emit
        self.at_new_version = at_new_version
        self.held, self.busy, self.pinned, self.evaluates = held, busy, pinned, evaluates
        self.loaded = dict.fromkeys(cluster.engines, NOT_LOADED)
        self.up = dict.fromkeys(cluster.engines, True)
        self.losses = dict.fromkeys(cluster.engines, 0)
        self.seen = dict.fromkeys(cluster.engines, NOT_LOADED)
        """The newest version that made tokens on a replica, as far as can be known, when its process died."""
        self.loading: dict[int, int] = {}
        self.handles: dict[int, WeightHandle] = {}
        self.newest = NOT_LOADED
        self.changed: list[int] = []
        """Replicas whose version or state changed since somebody emptied it."""
        self._parked: dict[int, asyncio.Future[None]] = {}

    def ask(self, replica: int) -> None:
        """Something changed that may have kept this replica from loading: an evaluation, its tasks, its rank."""
        parked = self._parked.get(replica)
        if parked is not None and not parked.done() and self._wanted(replica) is not None:
            parked.set_result(None)

    def ask_all(self) -> None:
        for replica in self._parked:
            self.ask(replica)

    def usable_version(self, replica: int) -> int | None:
        """The version that tasks can be given to; None while it has none, loads or is away."""
        version = self.loaded[replica]
        return version if version != NOT_LOADED and self.up[replica] and replica not in self.loading else None

    async def publish(self, version: int) -> None:
        handle = await self.cluster.update.export(version)
        self.handles[version] = handle
        self.newest = version
        self.emit(VersionPublished(t_s=_now(), version=version, nbytes=handle.nbytes))
        self.ask_all()
        self.wakeup.notify()

    async def pull(self, replica: int) -> None:
        """The loop of one replica; runs until cancelled."""
        engine = self.cluster.engines[replica]
        failed = 0
        while True:
            version = self._wanted(replica)
            if version is None:
                # Until `ask`: were every loop to look at every change, each would cost as many looks as replicas.
                self._parked[replica] = asyncio.get_running_loop().create_future()
                await self._parked[replica]
                continue
            started, losses = _now(), self.losses[replica]
            self.loading[replica] = version
            self.changed.append(replica)
            try:
                await engine.load_weights(self.handles[version])
            except RankLost as fault:
                self.emit(Fault(t_s=_now(), where="load_weights", what=type(fault).__name__))
                failed = 0  # the next load is another process's
                self.suspect(replica, losses)
            except InfrastructureFault as fault:  # they came in part, or no answer did: it still has what it had
                self.emit(Fault(t_s=_now(), where="load_weights", what=type(fault).__name__))
                failed += 1
                if failed >= MAX_FAILED_LOADS:
                    raise
            else:
                failed = 0
                if self.losses[replica] == losses and self.up[replica]:
                    self.loaded[replica] = version
                    self.emit(VersionLoaded(t_s=_now(), version=version, replica=replica, seconds=_now() - started))
            finally:
                del self.loading[replica]
                self.changed.append(replica)
            await self._discard_unread()
            self.wakeup.notify()

    def lost(self, replica: int) -> None:
        """Its rank died: whatever it had loaded is gone."""
        self.losses[replica] += 1
        self._empty(replica)
        self.wakeup.notify()

    def suspect(self, replica: int, losses: int) -> None:
        """A call that began after this many losses failed with `RankLost`: unless that loss is known by now, nothing
        more starts there until the cluster reports it and its return."""
        if self.losses[replica] == losses:
            self._empty(replica)

    def _empty(self, replica: int) -> None:
        self.seen[replica] = max(self.seen[replica], self.loaded[replica], self.loading.get(replica, NOT_LOADED))
        self.loaded[replica], self.up[replica] = NOT_LOADED, False
        self.changed.append(replica)

    def back(self, replica: int) -> None:
        self.up[replica] = True
        self.changed.append(replica)
        self.ask(replica)
        self.wakeup.notify()

    def may_progress(self) -> bool:
        """True while a load is running or could start."""
        return bool(self.loading) or any(self._wanted(replica) is not None for replica in self.loaded)

    def _wanted(self, replica: int) -> int | None:
        loaded = self.loaded[replica]
        after = loaded
        evaluated = self.evaluates(replica) if loaded == NOT_LOADED else None
        if evaluated is not None:  # tasks that outlived its process: they keep their version (I6)
            return evaluated if self.up[replica] and evaluated in self.handles else None
        if loaded == NOT_LOADED and self.busy(replica):
            after = self.seen[replica] - 1  # tasks that outlived its process: their tokens get no older (I6)
        newer = [version for version in (*self.pinned(), self.newest) if version > after and version in self.handles]
        if not newer or not self.up[replica] or self.held(replica, loaded):
            return None
        if self.at_new_version == "barrier" and loaded != NOT_LOADED and self.busy(replica):
            return None  # an empty one loads at once: tasks that outlived its process wait for weights
        return min(newer)

    async def _discard_unread(self) -> None:
        pinned, loading = self.pinned(), self.loading.values()
        for version in [v for v in self.handles if v != self.newest and v not in pinned and v not in loading]:
            handle = self.handles.pop(version)
            try:
                await self.cluster.update.discard(handle)
            except RankLost:  # the trainer's rank is away: another time
                self.handles[version] = handle
                return


def _now() -> float:
    return asyncio.get_running_loop().time()
