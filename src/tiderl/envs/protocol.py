"""What driver and environment worker say to each other: one request type a method, over `tiderl.wire`.

A *lane* is one thread of the worker that runs one environment's calls, one after the other; its number is the
driver's. `abandon` is answered by the worker's main thread, so it also tells whether the worker answers at
all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tiderl.data.records import Action, Prompt, Split, Trajectory

LOAD, PROMPTS, VOCABULARY, EXPERT = "load", "prompts", "vocabulary", "expert"
RESET, STEP, SCORE, CLOSE, ABANDON = "reset", "step", "score", "close", "abandon"
PAUSE, RESUME = "pause", "resume"
SPANS = "spans"  # no payload; answered by `ProcessSpans`, or None where the worker is not profiled


class LoadRequest(msgspec.Struct, frozen=True):
    """Import the class; answered by a `Description`. The first request, and only once."""

    name: str
    options: Mapping[str, Any]
    alone: bool = False  # one environment at a time in this worker
    profile: bool = False  # count where the worker's time goes


class LaneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What every call of the user's code carries; `where` names it in faults. A lane begins with its first
    request."""

    lane: int
    where: str


class PromptsRequest(LaneRequest, frozen=True, kw_only=True):
    split: Split


class VocabularyRequest(LaneRequest, frozen=True, kw_only=True):
    """Answered by the words."""


class ExpertRequest(LaneRequest, frozen=True, kw_only=True):
    prompt: Prompt


class ResetRequest(LaneRequest, frozen=True, kw_only=True):
    prompt: Prompt


class StepRequest(LaneRequest, frozen=True, kw_only=True):
    action: Action


class ScoreRequest(LaneRequest, frozen=True, kw_only=True):
    trajectory: Trajectory


class PauseRequest(LaneRequest, frozen=True, kw_only=True):
    """Sent only where the class declares `pause`; answered by nothing."""


class ResumeRequest(LaneRequest, frozen=True, kw_only=True):
    """Sent only where the class declares `resume`; answered by nothing."""


class CloseRequest(LaneRequest, frozen=True, kw_only=True):
    """End the lane and its environment."""


class AbandonRequest(LaneRequest, frozen=True, kw_only=True):
    """Forget the lane: it ends when its call returns, if ever. Answered at once by how many calls of
    abandoned lanes have been running for longer than `hung_after_s`."""

    hung_after_s: float


REQUESTS: Mapping[str, type[LaneRequest]] = {
    PROMPTS: PromptsRequest,
    VOCABULARY: VocabularyRequest,
    EXPERT: ExpertRequest,
    RESET: ResetRequest,
    STEP: StepRequest,
    SCORE: ScoreRequest,
    PAUSE: PauseRequest,
    RESUME: ResumeRequest,
    CLOSE: CloseRequest,
    ABANDON: AbandonRequest,
}
