"""Placement over a new version: replicas load it a moment apart, and share what has waited for it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from tiderl.api.drivers import VirtualRun
from tiderl.api.result import Fanout
from tiderl.config.machine import prepare
from tiderl.data.events import Event, TaskAdmitted, TaskFinished
from tiderl.observe.metrics import RunMetrics
from tiderl.sim.loop import run_virtual

FILE = Path(__file__).parents[2] / "examples" / "sim" / "family-rollout.yaml"


class InFlight:
    """Tasks of each replica, and the most that any has had."""

    def __init__(self) -> None:
        self.place: dict[tuple[int, int], int] = {}
        self.now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()

    def observe(self, event: Event) -> None:
        if isinstance(event, TaskAdmitted):
            self.place[event.prompt_id, event.member] = event.replica
            self.now[event.replica] += 1
            self.most[event.replica] = max(self.most[event.replica], self.now[event.replica])
        elif isinstance(event, TaskFinished):
            self.now[self.place.pop((event.prompt_id, event.member))] -= 1


def test_no_replica_ever_has_more_than_its_part_and_each_gets_it() -> None:
    resolved = prepare(FILE, ["train.updates=4", "train.global_batch_groups=8"], command="sim")
    tasks = InFlight()
    run_virtual(VirtualRun(resolved, Fanout([], RunMetrics(), [tasks])).to_its_end)
    part = math.ceil(resolved.slots / len(resolved.layout.engine_ranks))
    assert tasks.most == Counter(dict.fromkeys(resolved.layout.engine_ranks, part))
