"""What a schedule has to work with, and the rules it must keep: the other half of a bound's input.

Impossible clusters are refused here. Knows no workload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tiderl.cost.work import SlotsHeld
from tiderl.data.errors import ConfigurationError


@dataclass(frozen=True)
class Resources:
    """Ranks, limits and staleness of one run. Raises `ConfigurationError` for what cannot be."""

    updates: int
    batch_groups: int
    max_staleness: int
    """In updates, oldest token."""
    rollout_ranks: int
    trainer_ranks: int
    kv_tokens: int
    """Of one replica."""
    max_batch: int
    update_s: float
    """The optimizer's step, once an update; nothing else runs on the actor ranks."""
    sync_s: float
    """From a commit to the first token of the new version."""
    shared_ranks: int = 0
    """Ranks of both kinds, which generate and train by turns; with elastic roles all of them."""
    streaming: bool = True
    """Training may begin before the batch is whole."""
    env_slots: int | None = None
    """None: as many as there are tasks."""
    slots_held: SlotsHeld = "task"
    """For a task's whole life, or for each step only."""
    link_s: float = 0.0
    """Seconds that one version occupies a link which transfers one at a time; 0 = no such link."""
    publish_every_updates: int | None = None
    """Every so many versions must be transferred, in order; None: the schedule chooses."""

    def __post_init__(self) -> None:
        counts = ("updates", "batch_groups", "rollout_ranks", "trainer_ranks", "kv_tokens", "max_batch")
        for name in (*counts, "env_slots", "publish_every_updates"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, given {value}", where="cluster")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (value >= 0 and math.isfinite(value)):
                raise ConfigurationError(f"{field.name} must be seconds of at least 0, given {value}", where="cluster")
        if not 0 <= self.shared_ranks <= min(self.rollout_ranks, self.trainer_ranks):
            raise ConfigurationError(f"{self.shared_ranks} shared ranks are more than there are", where="cluster")
        if self.max_staleness < 0:
            raise ConfigurationError(f"max_staleness must be at least 0, given {self.max_staleness}", where="schedule")

    @property
    def consumed_groups(self) -> int:
        return self.updates * self.batch_groups

    @property
    def ranks(self) -> int:
        return self.rollout_ranks + self.trainer_ranks - self.shared_ranks

    @property
    def transfers(self) -> int:
        """Versions that must have been transferred before the last update's groups start.

        Its tokens are of version S-1-eta or newer. Where versions may be skipped, one transfer every eta+1 updates is
        enough.
        """
        newest = self.updates - 1 - self.max_staleness
        if newest <= 0:
            return 0
        return -(-newest // (self.publish_every_updates or self.max_staleness + 1))
