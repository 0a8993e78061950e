"""The simulated trainer: the Reference, Actor and Update ports of the ranks that train, seconds by tokens.

Each call occupies its rank after what came before, and loads its model first where only one fits. Keeps the order that
the real one asks for: a micro-batch is forwarded before it is backwarded, updates do not overlap. Makes no numbers
without a meaning: log-probs are 0, the metrics are counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from tiderl.cost.model import CostModel
from tiderl.data.errors import CheckpointError, ConfigurationError, InvariantViolation
from tiderl.data.records import MicroBatch, UpdateStats, WeightHandle
from tiderl.data.records import Sequence as TrainSequence
from tiderl.sim.ranks import Team


class ModelOnRank:
    """Which of reference and actor is on the accelerator: the other one is loaded over it, `swap_one_way_s` each time.

    Both stay where that is 0. The rank works in order of the calls, so each call knows what is there before it.
    """

    def __init__(self, cost: CostModel) -> None:
        self._swap_s = cost.swap_one_way_s
        self._there = "actor"
        self.spent_s: dict[str, float] = {}
        """Seconds of the running update, by what was loaded: `swap_to_reference_s`, `swap_to_actor_s`."""

    def swap_s(self, model: Literal["reference", "actor"]) -> float:
        """Seconds until `model` can work; it is there from then on."""
        there, self._there = self._there, model
        if there == model or not self._swap_s:
            return 0.0
        name = f"swap_to_{model}_s"
        self.spent_s[name] = self.spent_s.get(name, 0.0) + self._swap_s
        return self._swap_s

    def lose(self) -> None:
        self._there = "actor"


class SimReference:
    """The reference model on one rank."""

    def __init__(self, rank: Team, cost: CostModel, model: ModelOnRank) -> None:
        self.rank = rank.rank
        self._on, self._cost, self._model = rank, cost, model

    async def logprobs(self, mb: MicroBatch) -> np.ndarray:
        """float32 [mb.tokens], all 0."""
        await self._on.work(
            self._model.swap_s("reference") + self._cost.pass_s + mb.tokens * self._cost.reference_token_s
        )
        return np.broadcast_to(np.float32(0.0), (mb.tokens,))


class SimActor:
    """The actor on one rank; the books of the running update are shared with `SimUpdate`."""

    def __init__(self, rank: Team, cost: CostModel, model: ModelOnRank) -> None:
        self.rank = rank.rank
        self._on, self._cost, self.model = rank, cost, model
        self.forwarded: set[tuple[int, int, int]] = set()
        self.tokens = self.loss_tokens = 0

    async def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None:
        await self._on.work(self.model.swap_s("actor") + self._cost.pass_s + mb.tokens * self._cost.forward_token_s)
        if not proximal:
            self.forwarded.add((mb.update, mb.part, mb.index))

    async def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None:
        """Raises `InvariantViolation` for a micro-batch that was not forwarded."""
        self._on.require()
        name = (mb.update, mb.part, mb.index)
        if name not in self.forwarded:
            raise InvariantViolation(
                f"backward of micro-batch {mb.index} of update {mb.update}, which was not forwarded",
                where=f"rank {self.rank}",
            )
        self.forwarded.remove(name)
        await self._on.work(self.model.swap_s("actor") + self._cost.pass_s + mb.tokens * self._cost.backward_token_s)
        self.tokens += mb.tokens
        self.loss_tokens += sum(int(sequence.loss_mask.sum()) for sequence in mb.sequences)


class SimUpdate:
    """The optimizer of all actor ranks. Checkpoints are remembered in `saved` by their folder: nothing is written."""

    def __init__(
        self,
        rank: Team,
        actor: SimActor,
        members: tuple[int, ...],
        cost: CostModel,
        saved: dict[str, int],
        publish_s: float,
    ) -> None:
        self._on, self._actor, self._cost, self._publish_s = rank, actor, cost, publish_s
        self._members = members
        self._running: int | None = None
        self._updates_done = 0
        self._empty = False  # after a loss, until `restore`: a model that nobody trained
        self._checkpoints = saved

    async def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]:
        """`updates` steps, each over all of `demos`. Nothing is learned, so no metric comes back."""
        self._empty = False
        tokens = sum(demo.tokens for demo in demos)
        if updates:
            await self._on.work(updates * (tokens * self._cost.actor_token_s + self._cost.optimizer_s))
        return {}

    def lose(self) -> None:
        """The rank's process died: the running update is gone, checkpoints are not."""
        self._running, self._empty = None, True
        self._actor.forwarded.clear()
        self._actor.model.lose()

    def _require_state(self) -> None:
        self._on.require()
        if self._empty:
            raise InvariantViolation("the rank came back empty and was not restored", where=f"rank {self._actor.rank}")

    async def begin(self, update: int, members: Sequence[int]) -> None:
        if tuple(members) != self._members:
            what = f"an update over the ranks {list(members)} of {list(self._members)} is not yet supported"
            raise ConfigurationError(what, where=f"update {update}")
        self._require_state()
        if self._running is not None:
            raise InvariantViolation(f"update {update} begins within update {self._running}")
        self._running = update
        self._actor.tokens = self._actor.loss_tokens = 0
        self._actor.model.spent_s = {}

    async def finish(self) -> UpdateStats:
        self._on.require()
        if self._running is None:
            raise InvariantViolation("finish without begin")
        await self._on.work(self._actor.model.swap_s("actor") + self._cost.optimizer_s)
        self._updates_done, self._running = self._running, None
        metrics: Mapping[str, float] = {
            "tokens": float(self._actor.tokens),
            "loss_tokens": float(self._actor.loss_tokens),
            **self._actor.model.spent_s,
        }
        return UpdateStats(metrics=dict(metrics), seconds=self._cost.optimizer_s)

    async def export(self, version: int) -> WeightHandle:
        self._require_state()
        await self._on.work(self._publish_s)
        return WeightHandle(version=version, path=f"version-{version}", nbytes=self._cost.weight_bytes)

    async def discard(self, handle: WeightHandle) -> None:
        """A deletion costs nothing."""
        self._on.require()

    async def save(self, directory: str) -> None:
        self._require_state()
        await self._on.work(self._cost.checkpoint_s)
        self._checkpoints[directory] = self._updates_done

    async def restore(self, directory: str) -> None:
        """Raises `CheckpointError` for a directory that was never saved to."""
        if directory not in self._checkpoints:
            raise CheckpointError("there is no checkpoint", where=directory)
        await self._on.work(self._cost.checkpoint_s)
        self._updates_done, self._running = self._checkpoints[directory], None
        self._empty = False
        self._actor.forwarded.clear()

    async def save_model(self, directory: str) -> None:
        await self._on.work(self._cost.publish_s)
