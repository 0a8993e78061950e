"""A recorded run as facts: what each turn, environment call and trainer pass was, and how long it took.

Read from the run's events alone, so live and simulated runs are alike. What cannot be (negative times, turns out of
order) is refused here, before anything is fitted or replayed. Fits nothing, knows no file and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, cast

from tiderl.data.errors import ConfigurationError
from tiderl.data.events import (
    BackwardDone,
    EnvStepFinished,
    Event,
    ForwardDone,
    MicrobatchFormed,
    RankState,
    ReferenceDone,
    RoleChanged,
    RunStarted,
    StepStarted,
    TaskAdmitted,
    TaskFinished,
    TurnFinished,
    UpdateCommitted,
    VersionLoaded,
)
from tiderl.data.records import Split, TaskKey

PassKind = Literal["reference", "forward", "backward"]
RESET = -1
"""The turn of an environment's reset."""
AT_ONCE_S = 2e-5
"""Longer than the driver's own answer to a malformed action, shorter than any message to a worker and back."""


@dataclass(frozen=True, slots=True)
class TurnFact:
    """One generation. It came to the engine, was admitted, gave its first token and its last one at these moments of
    the replica's clock; `t_s` is when the driver knew."""

    key: TaskKey
    turn: int
    replica: int
    context_tokens: int
    new_tokens: int
    cached_tokens: int
    added_s: float
    admitted_s: float
    first_token_s: float
    ended_s: float
    t_s: float
    aborted: bool

    @property
    def prefill_tokens(self) -> int:
        return self.context_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class EnvCall:
    """A reset (turn `RESET`) or step, as the driver saw it begin and end; before it began, it waited `waited_s` as
    `env.wait` told it to."""

    key: TaskKey
    turn: int
    begun_s: float
    ended_s: float
    waited_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s

    @property
    def served(self) -> bool:
        """Whether an environment was asked: a malformed action is answered by the driver itself, at once."""
        return self.turn == RESET or self.seconds + self.waited_s > AT_ONCE_S


@dataclass(frozen=True, slots=True)
class PassFact:
    """One pass of the trainer over one micro-batch."""

    kind: PassKind
    tokens: int
    seconds: float


@dataclass
class Recording:
    """Everything of one run, in the order of its events."""

    started: RunStarted | None = None
    turns: list[TurnFact] = field(default_factory=list)
    env_calls: list[EnvCall] = field(default_factory=list)
    finished: dict[TaskKey, TaskFinished] = field(default_factory=dict)
    """The attempts that came to their own end."""
    score_s: list[float] = field(default_factory=list)
    """From the last step of a trajectory to its end: the verifier, and keeping the payload."""
    passes: list[PassFact] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    """From the last backward pass of an update to its commit."""
    begin_s: list[float] = field(default_factory=list)
    """From the start of an update to its first pass' start."""
    publish_s: list[float] = field(default_factory=list)
    checkpoint_s: list[float] = field(default_factory=list)
    loads: list[VersionLoaded] = field(default_factory=list)
    commits: list[UpdateCommitted] = field(default_factory=list)
    taken: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Rank -> when its engine stood still because the rank trained."""


def read_recording(
    events: Iterable[Event], *, where: str, wait_s: Callable[[TaskKey, int], float] = lambda key, turn: 0.0
) -> Recording:
    """The facts of a run. `where` names it in errors; `wait_s`: what `env.wait` made the turn's step wait.

    Raises `ConfigurationError` for a time that is negative or no number, and for turns of a trajectory that are not
    0, 1, 2, … in the order of the events.
    """
    reader = _Reader(where, wait_s)
    for event in events:
        reader.read(event)
    return reader.recording


class _Reader:
    """Events in, facts out."""

    def __init__(self, where: str, wait_s: Callable[[TaskKey, int], float]) -> None:
        self.recording = Recording()
        self._where, self._wait_s = where, wait_s
        self._tokens: dict[tuple[int, int], int] = {}  # of a micro-batch
        self._admitted_s: dict[TaskKey, float] = {}
        self._next_turn: dict[TaskKey, int] = {}
        self._stepped_s: dict[TaskKey, float] = {}
        self._step_started_s: float | None = None
        self._last_pass_s: float | None = None
        self._activity: tuple[str, float] | None = None  # of the trainer, and since when
        self._taken_s: dict[int, float] = {}

    def read(self, event: Event) -> None:
        found = self.recording
        match event:
            case RunStarted():
                found.started = event
            case TaskAdmitted():
                self._admitted_s[_key(event)] = event.t_s
                self._next_turn[_key(event)] = 0  # a held-out prompt is played again at every evaluation
            case TurnFinished():
                self._turn(event)
            case EnvStepFinished():
                self._step(event)
            case TaskFinished():
                found.finished[_key(event)] = event
                if _key(event) in self._stepped_s:
                    found.score_s.append(event.t_s - self._stepped_s[_key(event)])
            case MicrobatchFormed():
                self._tokens[event.update, event.index] = event.tokens
            case StepStarted():
                self._step_started_s = event.t_s
            case ReferenceDone():
                self._pass("reference", event)
            case ForwardDone():
                self._pass("forward", event)
            case BackwardDone():
                self._pass("backward", event)
            case UpdateCommitted():
                if self._last_pass_s is not None:
                    found.finish_s.append(event.t_s - self._last_pass_s)
                self._last_pass_s = None
                found.commits.append(event)
            case VersionLoaded():
                self._number(event.seconds, event)
                found.loads.append(event)
            case RankState():
                self._trainer_does(event)
            case RoleChanged():
                self._role(event)

    def _turn(self, event: TurnFinished) -> None:
        for seconds in (event.queued_s, event.prefill_s, event.decode_s):
            self._number(seconds, event)
        key = _key(event)
        expected = self._next_turn.get(key, 0)
        if event.turn not in (expected, expected - 1):  # the same one again: it was interrupted and went on
            raise ConfigurationError(
                f"turn {event.turn} of {key} comes where {expected} belongs", where=self._where, hint=_DAMAGED
            )
        self._next_turn[key] = event.turn + 1
        if event.ended_s < 0:
            what = "its engine did not record when turns ended"
            raise ConfigurationError(what, where=self._where, hint="record the run again with this version")
        ended_s = event.ended_s
        first_token_s = ended_s - event.decode_s
        admitted_s = first_token_s - event.prefill_s
        added_s = admitted_s - event.queued_s
        if event.turn == 0 and expected == 0 and key in self._admitted_s:
            begun_s = self._admitted_s[key]
            reset_over_s = event.t_s - (ended_s - added_s)
            self.recording.env_calls.append(EnvCall(key, RESET, begun_s, max(begun_s, reset_over_s)))
        self.recording.turns.append(
            TurnFact(
                key=key,
                turn=event.turn,
                replica=event.replica,
                context_tokens=event.context_tokens,
                new_tokens=event.new_tokens,
                cached_tokens=event.cached_tokens,
                added_s=added_s,
                admitted_s=admitted_s,
                first_token_s=first_token_s,
                ended_s=ended_s,
                t_s=event.t_s,
                aborted=event.finish_reason == "aborted",
            )
        )

    def _step(self, event: EnvStepFinished) -> None:
        self._number(event.seconds, event)
        key = _key(event)
        self._stepped_s[key] = event.t_s
        waited_s = min(event.seconds, self._wait_s(key, event.turn)) if event.seconds > AT_ONCE_S else 0.0
        begun_s = event.t_s - event.seconds + waited_s
        self.recording.env_calls.append(EnvCall(key, event.turn, begun_s, event.t_s, waited_s))

    def _pass(self, kind: PassKind, event: ReferenceDone | ForwardDone | BackwardDone) -> None:
        self._number(event.seconds, event)
        tokens = self._tokens.get((event.update, event.index))
        if tokens is not None:
            self.recording.passes.append(PassFact(kind, tokens, event.seconds))
        if self._step_started_s is not None:
            self.recording.begin_s.append(event.t_s - event.seconds - self._step_started_s)
            self._step_started_s = None
        self._last_pass_s = event.t_s if kind == "backward" else self._last_pass_s

    def _trainer_does(self, event: RankState) -> None:
        if event.role != "actor":
            return
        if self._activity is not None:
            what, since_s = self._activity
            spent = {"publishing": self.recording.publish_s, "checkpointing": self.recording.checkpoint_s}.get(what)
            if spent is not None:
                spent.append(event.t_s - since_s)
        self._activity = (event.activity, event.t_s)

    def _role(self, event: RoleChanged) -> None:
        if event.to_role == "actor":
            self._taken_s[event.rank] = event.t_s
        elif event.rank in self._taken_s:
            self.recording.taken.setdefault(event.rank, []).append((self._taken_s.pop(event.rank), event.t_s))

    def _number(self, seconds: float, event: Event) -> None:
        if not (math.isfinite(seconds) and seconds >= 0):
            name = type(event).__name__
            what = f"{name} at {event.t_s:g} s lasted {seconds} s"
            raise ConfigurationError(what, where=self._where, hint=_DAMAGED)


_DAMAGED = "the run's events are damaged; record it again"


def _key(event: TaskAdmitted | TurnFinished | EnvStepFinished | TaskFinished) -> TaskKey:
    return TaskKey(cast(Split, event.split), event.prompt_id, event.member, event.attempt)
