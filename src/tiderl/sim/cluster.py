"""The simulated cluster: ranks, engines and one trainer in virtual time, laid out as the process cluster lays them out.

A rank may hold an engine, the trainer, or both; then they take turns. `lose` and its return are what a dead process is
live: pending turns fail, weights and KV are gone, the same port objects go on (I5). Knows no schedule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tiderl.cost.model import CostModel
from tiderl.data.errors import ConfigurationError
from tiderl.data.records import TaskKey
from tiderl.data.settings import EngineSettings
from tiderl.runtime.ports import RankChange
from tiderl.sim.driver import SimDriver
from tiderl.sim.engine import SimEngine, Talk
from tiderl.sim.ranks import SimRank, Team
from tiderl.sim.trainer import ModelOnRank, SimActor, SimReference, SimUpdate
from tiderl.sim.transfer import SimTransfer, TransferKind


class SimCluster:
    """Build it anywhere, use it on a virtual loop.

    `engine_ranks`: replica -> its ranks. `actor_ranks` train together and hold the reference when `with_reference`: the
    first of them speaks for all, and their work is divided evenly. Ranks are numbered from 0 without a hole.
    `saved`: what earlier trainers of the run saved (folder -> update), to resume from. `weight_sync`: as in
    `sim/transfer.py`. Raises `ConfigurationError` for an impossible layout or a KV budget beyond memory.
    """

    def __init__(
        self,
        engine_ranks: Mapping[int, tuple[int, ...]],
        actor_ranks: Sequence[int],
        cost: CostModel,
        workload: Talk,
        engine: EngineSettings,
        *,
        with_reference: bool = True,
        saved: dict[str, int] | None = None,
        weight_sync: TransferKind = "relay",
    ) -> None:
        _check_layout(engine_ranks, actor_ranks)
        if engine.kv_budget_tokens > cost.kv_capacity_tokens:
            raise ConfigurationError(
                f"{engine.kv_budget_tokens} tokens of KV do not fit the simulated memory, which holds "
                f"{cost.kv_capacity_tokens}",
                where="rollout.kv_budget_tokens",
            )
        numbers = sorted({*actor_ranks, *(rank for ranks in engine_ranks.values() for rank in ranks)})
        hosts = {number: SimRank(number) for number in numbers}
        said: dict[TaskKey, tuple[int, int]] = {}
        self.ranks = len(hosts)
        trains = hosts[actor_ranks[0]]
        shared = cost.divided_among(len(actor_ranks))
        transfer = SimTransfer(cost, trains, weight_sync)
        driver = SimDriver(cost.driver_turn_s)
        self.engine_ranks = {replica: tuple(engine_ranks[replica]) for replica in sorted(engine_ranks)}
        self._engines = {
            replica: SimEngine(replica, [hosts[rank] for rank in ranks], cost, engine, workload, said, transfer, driver)
            for replica, ranks in self.engine_ranks.items()
        }
        self.engines: Mapping[int, SimEngine] = self._engines
        model = ModelOnRank(shared)
        self._team = team = Team(trains)
        actor = SimActor(team, shared, model)
        self.actors = (actor, *(SimActor(Team(hosts[rank]), shared, model) for rank in actor_ranks[1:]))
        self.references = (SimReference(team, shared, model),) if with_reference else ()
        self.update = SimUpdate(
            team, actor, tuple(actor_ranks), shared, {} if saved is None else saved, transfer.publish_s
        )
        self._hosts = hosts
        self._changes: asyncio.Queue[RankChange] = asyncio.Queue()

    async def start(self) -> None:
        """All ranks are up from the start: start-up costs nothing in virtual time."""

    async def next_change(self) -> RankChange:
        return await self._changes.get()

    async def close(self) -> None:
        """Nothing has to be closed."""

    def lose(self, rank: int, reason: str = "the rank's process died") -> None:
        """The process of `rank` dies now; it stays away until `restore`."""
        self._hosts[rank].lose()
        for replica, ranks in self.engine_ranks.items():
            if rank in ranks:
                self._engines[replica].lose(reason)
        if rank in (actor.rank for actor in self.actors):
            self._team.lose(rank)
            self.update.lose()
        self._changes.put_nowait(RankChange(rank, lost=True, reason=reason))

    def restore(self, rank: int) -> None:
        """The process of `rank` is back, empty."""
        self._hosts[rank].restore()
        self._team.restore(rank)
        self._changes.put_nowait(RankChange(rank, lost=False))


def _check_layout(engine_ranks: Mapping[int, tuple[int, ...]], actor_ranks: Sequence[int]) -> None:
    taken = [rank for ranks in engine_ranks.values() for rank in ranks]
    everyone = sorted({*actor_ranks, *taken})
    if not taken or not actor_ranks or len(set(taken)) < len(taken) or everyone != list(range(len(everyone))):
        raise ConfigurationError(
            f"impossible ranks: engines on {dict(engine_ranks)}, actors on {list(actor_ranks)}",
            where="cluster.ranks",
            hint="each rank belongs to one engine at most, and ranks count from 0 without a hole",
        )
