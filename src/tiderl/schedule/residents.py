"""One task in flight on a replica, and what is known of the tasks that behave like it.

Records only: `pool` decides about them, `charges`, `bookings`, `order` and `holding` keep the books.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tiderl.data.records import TaskKey
from tiderl.schedule.growth import TaskGrowth
from tiderl.schedule.priority import TaskFacts
from tiderl.schedule.retention import Choice, Outcome, Price, Waits

State = Literal["admitted", "active", "waiting", "ready"]
"""Not begun; its turn runs; its environment works; its turn is to run and has no room."""


@dataclass
class Kind:
    """What is known of tasks that behave alike: those of one environment, training and evaluation apart."""

    growth: TaskGrowth
    waits: Waits = field(default_factory=Waits)
    resets: Waits = field(default_factory=Waits)
    """From admission to the first turn."""

    def begins(self, resident: Resident, context_tokens: int, now_s: float) -> None:
        """One of its tasks asks for another turn, not for the rest of one."""
        if resident.turns:
            self.growth.went_on(resident.turns, context_tokens - resident.asked_tokens)
            self.waits.observe(now_s - resident.since_s)
        else:
            self.resets.observe(now_s - resident.since_s)
            self.growth.started(context_tokens)
            resident.first_tokens = context_tokens
        resident.asked_tokens = context_tokens


@dataclass(eq=False)
class Resident:
    """One task in flight. Tokens are KV positions, moments are seconds on the run's clock."""

    key: TaskKey
    kind: str
    group: Hashable
    facts: Callable[[Resident, float], TaskFacts]
    """What its priority rests on at a moment."""
    state: State = "admitted"
    turns: int = 0
    """Turns done; one that was interrupted is not."""
    first_tokens: int = 0
    """Context of its first turn."""
    first_ids: np.ndarray | None = None
    """Its ids, int32 [first_tokens]; None: not known."""
    asked_tokens: int = 0
    """Context of its last turn."""
    context_tokens: int = 0
    """Its context now."""
    wanted_tokens: int = 0
    """Positions that its next turn needs, while it is ready."""
    said_tokens: int = 0
    """Sampled so far of a turn that was interrupted."""
    interrupted: bool = False
    """What it asks for next is the rest of its last turn."""

    charged_tokens: int = 0
    """What it has of the pool beside its part in the group's prompt; 0: it holds nothing."""
    charged_running: bool = False
    """For a turn that runs."""
    computed: bool = False
    """It has KV of a turn that has ended."""
    charged_due: bool = False
    """It may leave."""
    late: bool = False
    """Its environment begins so slowly that others take turns meanwhile."""
    booked_tokens: int = 0
    booked_step: int = 0
    """How the forecast counts it; 0 tokens: not at all."""

    since_s: float = 0.0
    """When its last turn ended: since then it holds what it holds. Before the first: when it was admitted."""
    ready_s: float = 0.0
    """Since when its next turn could run."""
    held_tokens: int = 0
    """Context that it held then."""
    left: Choice | None = None
    """How its KV went, when it went during this wait."""
    held_s: float = 0.0
    """For how long it was held, when it went."""
    since_queued_s: float = 0.0
    held_queued_s: float = 0.0
    """As these, of the time in which others queued for room."""
    price: Price | None = None
    """Of memory, when others needed some during this wait."""

    def begins_to_wait(self, context_tokens: int, now_s: float, queued_s: float) -> None:
        """Its turn ended; it holds KV of its context. `queued_s`, here and below: how long others have queued for room
        since the run began."""
        self.context_tokens = self.held_tokens = context_tokens
        self.since_s, self.left, self.held_s, self.price = now_s, None, 0.0, None
        self.since_queued_s = queued_s

    def lets_go(self, choice: Choice, now_s: float, queued_s: float) -> None:
        """Its KV goes."""
        self.left, self.held_s = choice, now_s - self.since_s
        self.held_queued_s = queued_s - self.since_queued_s

    def outcome(self, now_s: float, queued_s: float) -> Outcome | None:
        """Of the wait that ends now; None: memory had no price meanwhile."""
        if self.price is None:
            return None
        waited_s, queued_s = now_s - self.since_s, queued_s - self.since_queued_s
        if self.left is None:
            return Outcome("keep", self.held_tokens, waited_s, waited_s, self.price, queued_s, queued_s)
        # Somebody has needed the room from then on, whether anybody else queued or not.
        queued_s = self.held_queued_s + waited_s - self.held_s
        return Outcome(self.left, self.held_tokens, waited_s, self.held_s, self.price, queued_s, self.held_queued_s)


Facts = Callable[[Resident, float], TaskFacts]
