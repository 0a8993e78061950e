"""What becomes of a group when a member fails: retry, refill or drop (architecture §8). I9: members are found by id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_RETRIES = 1
"""An environment fault is tried once more under the same trajectory id: most are transient, a second one is not."""
MAX_REFILLS = 3
"""New trajectories for failed members of one group; a prompt whose environment keeps failing is given up after
these."""

FailureKind = Literal["environment", "verifier", "infrastructure"]


@dataclass(frozen=True)
class FailureView:
    """A member that has just failed."""

    kind: FailureKind
    retries: int
    """Retries already made of this trajectory."""
    group_refills: int
    """Refills already made in its group for environment and verifier faults."""


AfterFailure = Literal["retry", "refill", "drop_group"]


def after_failure(view: FailureView) -> AfterFailure:
    """The verdict. A verifier fault arrives here after its own scoring retries, so it is refilled at once."""
    if view.kind == "infrastructure":
        return "refill"
    if view.kind == "environment" and view.retries < MAX_RETRIES:
        return "retry"
    return "refill" if view.group_refills < MAX_REFILLS else "drop_group"
