"""What swarms have found, each as a run of its own: the smallest one that shows it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.virtual_runs import HEAVY_TAIL, books_balance, virtual_run

from tiderl.data.errors import EnvironmentRaised, InfrastructureFault, RankLost
from tiderl.data.events import Dropped, Fault, VersionLoaded
from tiderl.data.records import MicroBatch, TaskKey, WeightHandle
from tiderl.data.turns import Sampling, Turn
from tiderl.runtime.ports import Ports
from tiderl.runtime.sync import MAX_FAILED_LOADS, Publisher
from tiderl.runtime.wakeup import Wakeup
from tiderl.sim.loop import run_virtual


class Wrapped:
    """A port that passes everything on but what a subclass says itself."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LosesItsRank(Wrapped):
    """An actor whose rank dies once, in the middle of update 2; notes whether its engine stood still in each call."""

    def __init__(self, inner: Any, cluster: Any) -> None:
        super().__init__(inner)
        self._cluster = cluster
        self.generating: list[int] = []
        self.lost = False

    async def backward(self, mb: MicroBatch, ref_logprobs: object) -> None:
        stats = self._cluster.engines[0].stats
        if not stats.paused and stats.version >= 0:
            self.generating.append(mb.update)
        if mb.update == 2 and not self.lost:
            self.lost = True
            self._cluster.lose(0)
            asyncio.get_running_loop().call_later(0.5, self._cluster.restore, 0)
        await self._inner.backward(mb, ref_logprobs)


def test_a_rank_that_was_lost_while_it_trained_does_not_generate_when_it_trains_again() -> None:
    """It comes back with an engine of its own life, which nobody had paused (I5)."""

    def change(ports: Ports) -> None:
        cluster: Any = ports.cluster
        cluster.actors = (LosesItsRank(cluster.actors[0], cluster),)

    run = virtual_run(["cluster.ranks=1", "schedule.max_staleness=2", HEAVY_TAIL], change=change)
    actor: Any = run.ports.cluster.actors[0]
    assert actor.lost
    assert actor.generating == []
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []


def test_a_task_that_outlives_its_replica_gets_weights_under_a_barrier() -> None:
    """`sync` loads only where nothing runs; a task in its environment while the replica died still ran there, and
    waited for weights that waited for it."""

    async def beside(run: object, ports: Any) -> None:
        await asyncio.sleep(1.0)
        ports.cluster.lose(0)
        await asyncio.sleep(0.5)
        ports.cluster.restore(0)

    wait = "env.wait={kind: lognormal, median_s: 5.0, sigma: 0.0}"
    run = virtual_run(["schedule.strategy=sync", "cluster.ranks=1", wait, "eval.every_updates=0"], beside=beside)
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []


class FailingLoads(Wrapped):
    """An engine whose first `failures` loads of each version fail, its process alive."""

    def __init__(self, inner: Any, failures: int) -> None:
        super().__init__(inner)
        self._failures = failures
        self._failed: dict[int, int] = {}

    async def load_weights(self, handle: WeightHandle) -> None:
        if self._failed.setdefault(handle.version, 0) < self._failures:
            self._failed[handle.version] += 1
            raise InfrastructureFault("the weights do not match their checksum")
        await self._inner.load_weights(handle)


def failing_loads(failures: int) -> Any:
    def change(ports: Ports) -> None:
        cluster: Any = ports.cluster
        cluster.engines = {r: FailingLoads(engine, failures) for r, engine in cluster.engines.items()}

    return change


def test_weights_that_arrive_broken_are_loaded_again() -> None:
    run = virtual_run([HEAVY_TAIL], change=failing_loads(MAX_FAILED_LOADS - 1))
    assert run.outcome.outcome == "done"
    loads, failed = run.log.of(VersionLoaded), [f for f in run.log.of(Fault) if f.where == "load_weights"]
    assert len(failed) == (MAX_FAILED_LOADS - 1) * len(loads)


def test_weights_that_never_arrive_whole_end_the_run_with_the_reason() -> None:
    with pytest.raises(InfrastructureFault, match="checksum"):
        virtual_run([HEAVY_TAIL], change=failing_loads(MAX_FAILED_LOADS))


def test_a_turn_that_was_being_aborted_when_its_rank_died_is_lost_not_forgotten() -> None:
    """The simulated engine ends an abort with the running iteration; the process died before that."""
    told: list[str] = []

    async def beside(run: object, ports: Any) -> None:
        await asyncio.sleep(0.5)
        engine, task = ports.cluster.engines[0], TaskKey("warmup", 0, 0)
        turn = Turn(task, 0, np.zeros(300, np.int32), Sampling(1.0, 4, ()), remaining_tokens=64)
        waiting = asyncio.create_task(engine.generate(turn))
        await asyncio.sleep(1e-4)
        aborting = asyncio.create_task(engine.abort(task, 0))
        await asyncio.sleep(0)
        ports.cluster.lose(0)
        ports.cluster.restore(0)
        try:
            await asyncio.wait_for(waiting, 60.0)
        except RankLost:
            told.append("lost")
        except TimeoutError:
            told.append("forgotten")
        aborting.cancel()

    virtual_run([HEAVY_TAIL, "train.updates=3"], beside=beside)
    assert told == ["lost"]


def test_a_call_to_a_rank_that_is_down_says_that_it_is_lost() -> None:
    """The simulated trainer looked at its empty state first, and called that a fault of the runtime."""

    async def beside(run: object, ports: Any) -> None:
        trains = ports.cluster.actors[0].rank
        await asyncio.sleep(0.5)
        ports.cluster.lose(trains)
        with pytest.raises(RankLost):
            await ports.cluster.update.export(7)
        with pytest.raises(RankLost):
            await ports.cluster.update.save("x")
        ports.cluster.restore(trains)

    assert virtual_run([HEAVY_TAIL], beside=beside).outcome.outcome == "done"


class Loads:
    """An engine that notes what it is told to load."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    async def load_weights(self, handle: WeightHandle) -> None:
        await asyncio.sleep(0.1)
        self.loaded.append(handle.version)


class OneReplica:
    """As much of a cluster as publishing looks at."""

    def __init__(self) -> None:
        self.engines = {0: Loads()}
        self.update = self

    async def export(self, version: int) -> WeightHandle:
        return WeightHandle(version, f"version-{version}", 1)

    async def discard(self, handle: WeightHandle) -> None:
        pass


@pytest.mark.parametrize(("busy", "reloaded"), [(True, [3]), (False, [0, 3])])
def test_an_empty_replica_loads_nothing_older_than_what_its_surviving_tasks_have_seen(
    busy: bool, reloaded: list[int]
) -> None:
    """An evaluation pins version 0 elsewhere. A replica at version 3 dies: what it loads first when it is back depends
    on whether training tasks outlived it."""
    cluster: Any = OneReplica()
    publisher = Publisher(
        cluster,
        Wakeup(),
        lambda event: None,
        at_new_version="interrupt",
        held=lambda replica, version: False,
        busy=lambda replica: busy,
        pinned=lambda: [0],
    )

    async def main() -> None:
        await publisher.publish(0)
        pulling = asyncio.create_task(publisher.pull(0))
        await asyncio.sleep(1.0)
        await publisher.publish(3)
        await asyncio.sleep(1.0)
        publisher.lost(0)
        publisher.back(0)
        await asyncio.sleep(1.0)
        pulling.cancel()

    run_virtual(main)
    assert cluster.engines[0].loaded == [0, 3, *reloaded]


def test_an_empty_replica_loads_the_version_that_its_surviving_evaluations_are_pinned_to() -> None:
    """Version 0 is still evaluated elsewhere, 3 is published: what died here with version 1 goes on with version 1."""
    cluster: Any = OneReplica()
    evaluated: list[int] = []
    publisher = Publisher(
        cluster,
        Wakeup(),
        lambda event: None,
        at_new_version="interrupt",
        held=lambda replica, version: version in evaluated,
        busy=lambda replica: False,
        pinned=lambda: [0, 1],
        evaluates=lambda replica: next(iter(evaluated), None),
    )

    async def main() -> None:
        await publisher.publish(0)
        pulling = asyncio.create_task(publisher.pull(0))
        await asyncio.sleep(1.0)
        await publisher.publish(1)
        await asyncio.sleep(1.0)
        evaluated.append(1)
        await publisher.publish(3)
        await asyncio.sleep(1.0)
        publisher.lost(0)
        publisher.back(0)
        await asyncio.sleep(1.0)
        evaluated.clear()
        publisher.ask_all()
        await asyncio.sleep(1.0)
        pulling.cancel()

    run_virtual(main)
    assert cluster.engines[0].loaded == [0, 1, 1, 3]


def test_a_task_that_is_cancelled_before_its_first_step_gives_its_slot_back() -> None:
    """All members of the first prompt fail at once, one of them for good: those that were started again in the same
    instant are cancelled before they begin. Their replica would count as busy for ever, and `sync` never load again."""

    def fault(key: TaskKey, turn: int) -> Exception | None:
        if (key.split, key.prompt_id) != ("train", 0):
            return None
        return EnvironmentRaised("poisoned") if key.member == 1 else InfrastructureFault("the worker died")

    run = virtual_run(["schedule.strategy=sync", "cluster.ranks=1", "eval.every_updates=0"], fault=fault)
    assert {event.reason for event in run.log.of(Dropped)} >= {"group_dropped", "environment_raised"}
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []
