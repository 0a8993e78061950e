"""What the trainer can take: how fast updates follow each other, and how many tasks in flight that calls for.

Little's law ("A proof for the queuing formula L = λW", 1961): n* = X·E[l], with X the trajectories that the trainer
consumes a second and E[l] the seconds that one lives. More than n* in flight only grows contexts and staleness, once
the trainer is what limits.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.3
"""Weight of the newest update and, through the number of tasks, of the newest lives."""

SATED = 0.05
"""Share of its time that a trainer which limits waits at most."""

MARGIN = 1.25
"""In flight beyond n*, for what varies."""


@dataclass
class Appetite:
    """Observations of one run; times are arguments."""

    batch_trajectories: int
    update_s: float | None = None
    life_s: float | None = None
    waited_fraction: float = 1.0
    """Of the trainer's time, waiting for data."""
    _updates: int = 0
    _since_s: float | None = None

    def trained(self, waited_s: float, seconds: float) -> None:
        """An update is committed, for which the trainer waited so long and worked so long."""
        newest = waited_s / (waited_s + seconds) if waited_s + seconds > 0.0 else 0.0
        self.waited_fraction += SMOOTHING * (newest - self.waited_fraction)

    def updates_done(self, updates: int, now_s: float) -> None:
        """How many updates there have been, as often as one likes."""
        if updates == self._updates:
            return
        if self._since_s is not None:
            newest = (now_s - self._since_s) / (updates - self._updates)
            self.update_s = newest if self.update_s is None else self.update_s + SMOOTHING * (newest - self.update_s)
        self._updates, self._since_s = updates, now_s

    def lived(self, seconds: float) -> None:
        """A task has left, so long after its admission."""
        share = SMOOTHING / self.batch_trajectories
        self.life_s = seconds if self.life_s is None else self.life_s + share * (seconds - self.life_s)

    def tasks(self, *, batch_is_ready: bool) -> float:
        """n* with its margin. Without end unless the trainer is what limits (it hardly waits, and its next batch is
        ready), and while not enough is known."""
        limits = batch_is_ready and self.waited_fraction <= SATED
        if not limits or not self.update_s or self.life_s is None:
            return float("inf")
        return MARGIN * self.batch_trajectories * self.life_s / self.update_s
