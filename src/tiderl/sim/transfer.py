"""How a version's weights come from the trainer to the engines: what it takes, and whose time.

`relay`: the trainer only writes them; each engine reads at its own moment. `broadcast`: one collective in which the
trainer takes part until the end; engines that ask before it begins share it. `delta`: a relay of what changed since the
engine's version. Knows no schedule and no KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from tiderl.cost.model import CostModel
from tiderl.data.errors import RankLost
from tiderl.sim.ranks import SimRank

TransferKind = Literal["relay", "broadcast", "delta"]


class SimTransfer:
    """Of one cluster. `sender` is the rank that speaks for the trainer."""

    def __init__(self, cost: CostModel, sender: SimRank, kind: TransferKind = "relay") -> None:
        self._cost, self._sender, self._kind = cost, sender, kind
        self._open: dict[int, asyncio.Task[bool]] = {}  # by version: asked for and not begun

    @property
    def publish_s(self) -> float:
        """Of the trainer alone, at the end of an update."""
        if self._kind == "broadcast":
            return 0.0
        return self._cost.publish_s * (self._cost.delta_fraction if self._kind == "delta" else 1.0)

    async def load(self, ranks: Sequence[SimRank], have: int, want: int) -> None:
        """Occupy `ranks` until version `want` is there in place of `have`, -1 for none. Raises `RankLost` for one of
        them; without the trainer a broadcast becomes a read of what it wrote."""
        if self._kind == "broadcast" and self._sender not in ranks and self._sender.up:
            sending = self._broadcast(want)
            await asyncio.gather(*(rank.during(sending) for rank in ranks))
            if sending.result():
                return
        seconds = self._cost.load_s
        if self._kind == "delta" and have >= 0:
            seconds *= min(1.0, self._cost.delta_fraction * max(1, want - have))
        await asyncio.gather(*(rank.work(seconds) for rank in ranks))

    def _broadcast(self, version: int) -> asyncio.Task[bool]:
        sending = self._open.get(version)
        if sending is None:
            sending = self._open[version] = asyncio.create_task(self._send(version), name=f"broadcast {version}")
        return sending

    async def _send(self, version: int) -> bool:
        """Whether it came to its end."""
        try:
            await self._sender.work(self._cost.load_s, begun=lambda: self._open.pop(version, None))
        except RankLost:
            self._open.pop(version, None)
            return False
        return True
