"""Tasks in flight by replica, and of each version the replica with the fewest: what placement looks at.

A view of every replica for every start would cost as many as there are replicas; a heap for each version costs their
logarithm. Knows no task and decides nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tiderl.schedule.tasks import ReplicaView

SLACK = 4
"""Outdated heap entries for each replica before the heap is made anew."""


class Loads:
    """Counts of all replicas; only those with a version can be placed on."""

    def __init__(self, replicas: Iterable[int]) -> None:
        self.total = 0
        self._tasks = dict.fromkeys(replicas, 0)
        self._versions: dict[int, int] = {}
        self._heaps: dict[int, list[tuple[int, int]]] = {}  # by version: (tasks, replica), outdated ones included

    def add(self, replica: int, change: int) -> None:
        """`change` more tasks are in flight there."""
        self.total += change
        self._tasks[replica] += change
        self._push(replica)

    def usable(self, replica: int, version: int | None) -> None:
        """It can take tasks of this version; None: of none."""
        if version is None:
            self._versions.pop(replica, None)
        elif self._versions.get(replica) != version:
            self._versions[replica] = version
            self._push(replica)

    def of(self, replica: int) -> ReplicaView | None:
        """A replica that can take tasks."""
        version = self._versions.get(replica)
        return None if version is None else ReplicaView(replica, version, self._tasks[replica])

    def usable_versions(self) -> dict[int, int]:
        """The version of each replica that can take tasks, by number."""
        return dict(sorted(self._versions.items()))

    def least(self) -> list[ReplicaView]:
        """One replica for each version that any has: that with the fewest tasks, the lowest number first."""
        found = []
        for version, heap in list(self._heaps.items()):
            while heap and not self._holds(version, heap[0]):
                heapq.heappop(heap)
            if heap:
                tasks, replica = heap[0]
                found.append(ReplicaView(replica, version, tasks))
            else:
                del self._heaps[version]
        return found

    def _holds(self, version: int, entry: tuple[int, int]) -> bool:
        tasks, replica = entry
        return self._tasks[replica] == tasks and self._versions.get(replica) == version

    def _push(self, replica: int) -> None:
        version = self._versions.get(replica)
        if version is None:
            return
        heap = self._heaps.setdefault(version, [])
        heapq.heappush(heap, (self._tasks[replica], replica))
        if len(heap) > SLACK * len(self._tasks) + SLACK:
            heap[:] = sorted({entry for entry in heap if self._holds(version, entry)})
