"""Who waits for KV room, from when to when: pauses are paired from events here, for the figures and for the account.

A pause ends with its task's resume, and with whatever ends the task's attempt before that. Reads events only.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiderl.data.events import (
    Dropped,
    EvalFinished,
    Event,
    RunEnded,
    RunStarted,
    TaskAdmitted,
    TaskFinished,
    TaskMigrated,
    TaskPaused,
    TaskResumed,
)

Key = tuple[str, int, int]
"""(split, prompt, member)"""


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds on the run's clock, on one replica."""

    replica: int
    since_s: float
    until_s: float


class Pauses:
    """Those that last."""

    def __init__(self) -> None:
        self._open: dict[Key, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def lasting(self, now_s: float) -> list[Pause]:
        """As far as they have come."""
        return [Pause(replica, since_s, now_s) for replica, since_s in self._open.values()]

    def observe(self, event: Event) -> list[Pause]:
        """The pauses that end with this event."""
        if not self._open and not isinstance(event, TaskPaused):
            return []
        match event:
            case TaskPaused():
                self._open.setdefault((event.split, event.prompt_id, event.member), (event.replica, event.t_s))
            case TaskResumed() | TaskAdmitted() | TaskFinished():
                return self._end([(event.split, event.prompt_id, event.member)], event.t_s)
            case TaskMigrated():
                key = (event.split, event.prompt_id, event.member)
                ended = self._end([key], event.t_s)
                if ended:
                    self._open[key] = (event.to_replica, event.t_s)
                return ended
            case Dropped():
                return self._end([("train", event.prompt_id, event.member)], event.t_s)
            case EvalFinished():
                return self._end([key for key in self._open if key[0] == "eval"], event.t_s)
            case RunStarted() | RunEnded():  # whatever an earlier driver's tasks did is over
                return self._end(list(self._open), event.t_s)
        return []

    def _end(self, keys: list[Key], now_s: float) -> list[Pause]:
        found = [self._open.pop(key) for key in keys if key in self._open]
        return [Pause(replica, since_s, now_s) for replica, since_s in found]
