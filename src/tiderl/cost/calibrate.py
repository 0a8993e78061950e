"""`--calibrate RUN`: the cost model's constants from a recorded run, and what they leave unexplained.

Every fit keeps the run's total: fitted seconds add up to the measured ones (weights 1 / fitted, as for counts), so a
mean is right even where single pieces of work scatter. Constants that the run cannot tell apart are given to the
first of them, the others are 0 and named. Knows facts of `recorded.py`, no file and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.cost.fits import ROUNDS, Residual, conserving_fit, residual
from tiderl.cost.intervals import Intervals, intervals_of
from tiderl.cost.model import CostModel
from tiderl.cost.recorded import RESET, EnvCall, PassKind, Recording, TurnFact
from tiderl.data.errors import ConfigurationError

MIN_TURNS = 50
"""Fewer say nothing reliable about four constants of the engine."""
MIN_CERTAIN = 20
"""Intervals with a certain count of iterations from which the first fit is made; with fewer, from all."""
ENGINE = ("iteration_s", "sequence_s", "context_token_s", "prefill_token_s")
TRAINER = ("reference_token_s", "forward_token_s", "backward_token_s", "pass_s")
SERIAL_SHARE = 0.03
"""Environment calls are served one at a time where a queue explains at least this share of their seconds' variance.
Simulated worlds that answer all at once are below 0.001, live workers between 0.06 and 0.6."""
IDLE_ARRIVALS = 20
"""Turns that find their engine idle, from which the way to it is known; with fewer, the shortest ways of all count."""
SHORT_WAY_QUANTILE = 0.05
CLOCK_ROUNDING_S = 1e-7
"""Of a turn: shorter ways to the driver are differences of floats."""


@dataclass(frozen=True)
class Calibration:
    """Constants by the names of `CostModel`, the service seconds of environment workers, and the residuals by fit."""

    constants: Mapping[str, float]
    env_step_s: float
    """One step on a worker that serves one call at a time; 0: all are served at once."""
    env_reset_s: float
    score_s: float
    """From a trajectory's last step to its end: the verifier, and what the driver does then."""
    residuals: Mapping[str, Residual]
    unknown: tuple[str, ...]
    """Constants that the run says nothing about: they stay as they are, or are in another one."""

    def applied(self, cost: CostModel) -> CostModel:
        return cost.with_constants(self.constants)


def calibrate(recording: Recording, *, where: str) -> Calibration:
    """Fits every constant that the run tells something about. `where` names the run in errors.

    Raises `ConfigurationError` for a run without enough turns or without an update.
    """
    turns = [turn for turn in recording.turns if not turn.aborted]
    if len(turns) < MIN_TURNS or not recording.passes:
        what = f"{len(turns)} turns and {len(recording.commits)} updates are too few to calibrate from"
        hint = f"record at least {MIN_TURNS} turns and one update"
        raise ConfigurationError(what, where=where, hint=hint)
    constants: dict[str, float] = {}
    residuals: dict[str, Residual] = {}
    unknown: list[str] = []
    for name, names, (features, seconds) in (
        ("engine iterations", ENGINE, _engine(recording, where)),
        ("trainer passes", TRAINER, _trainer(recording)),
    ):
        fitted = conserving_fit(features, seconds)
        constants |= zip(names, fitted.tolist(), strict=True)
        residuals[name] = residual(seconds, features @ fitted)
        unknown += [constant for constant, value in zip(names, fitted, strict=True) if value == 0.0]
    for constant, measured in (
        ("optimizer_s", [sum(recording.finish_s + recording.begin_s) / max(1, len(recording.finish_s))]),
        ("publish_s", recording.publish_s),
        ("checkpoint_s", recording.checkpoint_s),
    ):
        if measured:
            constants[constant] = float(np.mean(measured))
        else:
            unknown.append(constant)
    if recording.loads:
        constants["load_s"] = _load_s(recording)
    else:
        unknown.append("load_s")
    constants["driver_turn_s"], message_s = driver_s(recording.turns)
    constants["turn_s"] = to_engine_s(recording) + message_s
    step_s, reset_s, calls = _environment(recording.env_calls)
    if calls is not None:
        residuals["environment calls"] = calls
    score_s = float(np.mean(recording.score_s)) if recording.score_s else 0.0
    return Calibration(constants, step_s, reset_s, score_s, residuals, tuple(unknown))


# ---------------------------------------------------------------------------------------------- the engine


def _engine(recording: Recording, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The busy intervals of all replicas, undisturbed ones: features [n, 4] and seconds [n]. Iterations are counted
    anew with what was fitted, until no count changes."""
    found: list[Intervals] = []
    for replica, turns in sorted(_by_replica(recording.turns).items()):
        intervals = intervals_of(turns, _disturbances(recording, replica, turns))
        if intervals is not None:
            found.append(intervals)
    certain = sum(int((each.pinned & each.undisturbed).sum()) for each in found) >= MIN_CERTAIN
    for attempt in range(ROUNDS):
        chosen = [each.undisturbed & (each.pinned | (not certain or attempt > 0)) for each in found]
        if not any(rows.any() for rows in chosen):
            what = "no turn of it ran without a load of weights or training on its rank"
            raise ConfigurationError(what, where=where, hint="calibrate on a run with more turns in an update")
        features = np.concatenate([each.features()[rows] for each, rows in zip(found, chosen, strict=True)])
        seconds = np.concatenate([each.seconds[rows] for each, rows in zip(found, chosen, strict=True)])
        constants = conserving_fit(features, seconds)
        changed = [each.guess(constants) for each in found]
        if attempt > 0 and not any(changed):
            break
    return features, seconds


def _load_s(recording: Recording) -> float:
    """Mean seconds of a load on ranks that do not train; the median where all do: some of those waited for the
    trainer's work."""
    started = recording.started
    trains = set(started.actor_ranks) if started else set()
    ranks = started.engine_ranks if started else ()
    alone = [
        load.seconds for load in recording.loads if load.replica < len(ranks) and not trains & {*ranks[load.replica]}
    ]
    return float(np.mean(alone) if alone else np.median([load.seconds for load in recording.loads]))


def _disturbances(recording: Recording, replica: int, turns: Sequence[TurnFact]) -> list[tuple[float, float]]:
    """Loads of weights, and training on the same rank, on the replica's clock."""
    behind_s = clock_behind_s(turns)
    windows = [(load.t_s - load.seconds, load.t_s) for load in recording.loads if load.replica == replica]
    ranks = recording.started.engine_ranks[replica] if recording.started and recording.started.engine_ranks else ()
    windows += [window for rank in ranks for window in recording.taken.get(rank, ())]
    return [(begin - behind_s, end - behind_s) for begin, end in windows]


def clock_behind_s(turns: Sequence[TurnFact]) -> float:
    """By how much the replica's clock is behind the driver's: the turn that the driver knew of soonest took no time."""
    return min(turn.t_s - turn.ended_s for turn in turns)


def driver_s(turns: Sequence[TurnFact]) -> tuple[float, float]:
    """Seconds of the driver for each turn that ends, and of the message that tells it: a stretch in which some turn has
    ended and the driver does not know yet lasts one message and as many turns as are in it."""
    behind_s = {replica: clock_behind_s(of_replica) for replica, of_replica in _by_replica(turns).items()}
    rows: list[list[float]] = []
    stretches: list[float] = []
    begun_s = known_s = -np.inf
    for ended_s, told_s in sorted((turn.ended_s + behind_s[turn.replica], turn.t_s) for turn in turns):
        if ended_s > known_s:
            rows.append([0.0, 1.0])
            stretches.append(0.0)
            begun_s = ended_s
        known_s = max(known_s, told_s)
        rows[-1][0] += 1
        stretches[-1] = max(0.0, known_s - begun_s)
    if sum(stretches) < CLOCK_ROUNDING_S * len(turns):
        return 0.0, 0.0
    turn_s, message_s = conserving_fit(np.array(rows), np.array(stretches))
    return float(turn_s), float(message_s)


def to_engine_s(recording: Recording) -> float:
    """Mean seconds from a step's end to an engine that was idle."""
    sent_s = {(call.key, call.turn): call.ended_s for call in recording.env_calls if call.turn != RESET}
    ways: list[float] = []
    idle_ways: list[float] = []
    for turns in _by_replica(recording.turns).values():
        behind_s = clock_behind_s(turns)
        begins = np.sort([turn.added_s for turn in turns])
        ends = np.sort([turn.ended_s for turn in turns])
        for turn in turns:
            asked_s = sent_s.get((turn.key, turn.turn - 1))
            if asked_s is None or turn.aborted:
                continue
            asked_s -= behind_s
            ways.append(max(0.0, turn.added_s - asked_s))
            if np.searchsorted(begins, turn.added_s, "left") == np.searchsorted(ends, asked_s, "right"):
                idle_ways.append(ways[-1])
    if not ways:
        return 0.0
    return float(np.mean(idle_ways) if len(idle_ways) >= IDLE_ARRIVALS else np.quantile(ways, SHORT_WAY_QUANTILE))


def _by_replica(turns: Sequence[TurnFact]) -> dict[int, list[TurnFact]]:
    found: dict[int, list[TurnFact]] = {}
    for turn in turns:
        found.setdefault(turn.replica, []).append(turn)
    return found


# ---------------------------------------------------------------------------------------------- the trainer


def _trainer(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    """All passes: features [n, 4] in the order of `TRAINER`, seconds [n]. Ranks that train together share tokens."""
    ranks = max(1, len(recording.started.actor_ranks) if recording.started else 1)
    place: dict[PassKind, int] = {"reference": 0, "forward": 1, "backward": 2}
    features = np.zeros((len(recording.passes), len(TRAINER)))
    for row, one in enumerate(recording.passes):
        features[row, place[one.kind]] = one.tokens / ranks
        features[row, 3] = 1.0
    return features, np.array([one.seconds for one in recording.passes])


# ---------------------------------------------------------------------------------------------- environments


def _environment(calls: Sequence[EnvCall]) -> tuple[float, float, Residual | None]:
    """Service seconds of a step and a reset on a worker that serves one at a time, (0, 0) where calls do not wait for
    each other. Each busy stretch of the worker lasts as long as its calls together."""
    # Of those that begin together, in the order of their tasks: the order of the record is that of their ends.
    calls = sorted((call for call in calls if call.served), key=lambda call: (call.begun_s, call.key))
    if len(calls) < MIN_TURNS:
        return 0.0, 0.0, None
    if explained_by_queue(calls) < SERIAL_SHARE:
        return 0.0, 0.0, None
    features, stretches = _busy_stretches(calls)
    step_s, reset_s = conserving_fit(features, stretches)
    return float(step_s), float(reset_s), residual(stretches, features @ np.array([step_s, reset_s]))


def explained_by_queue(calls: Sequence[EnvCall]) -> float:
    """The share of the calls' variance in seconds, given whether they are resets, that a queue explains: 0 where calls
    that find more of others are no longer."""
    seconds = np.array([call.seconds for call in calls])
    resets = np.array([call.turn == RESET for call in calls], dtype=np.float64)
    kinds = np.column_stack([np.ones(len(calls)), resets])
    queued = np.column_stack([kinds, queue_ahead(calls)])
    left = []
    for columns in (kinds, queued):
        solution = np.linalg.lstsq(columns, seconds, rcond=None)[0]
        left.append(float(np.var(seconds - columns @ solution)))
    return 1 - left[1] / left[0] if solution[-1] > 0 and left[0] > 0 else 0.0


def queue_ahead(calls: Sequence[EnvCall]) -> np.ndarray:
    """float64 [n]: how many calls were there when each began, itself included; of those that began together, the ones
    before it."""
    begins = np.array([call.begun_s for call in calls])
    ended = np.sort([call.ended_s for call in calls])
    place = np.empty(len(calls))
    place[np.argsort(begins, kind="stable")] = np.arange(1, len(calls) + 1)
    return place - np.searchsorted(ended, begins, "right")


def _busy_stretches(calls: Sequence[EnvCall]) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of time in which a call is always open: (steps, resets) in it [m, 2], and its seconds [m]."""
    rows: list[list[float]] = []
    stretches: list[float] = []
    begun_s = ended_s = -np.inf
    for call in sorted(calls, key=lambda call: call.begun_s):
        if call.begun_s > ended_s:
            rows.append([0.0, 0.0])
            stretches.append(0.0)
            begun_s = call.begun_s
        ended_s = max(ended_s, call.ended_s)
        rows[-1][call.turn == RESET] += 1
        stretches[-1] = ended_s - begun_s
    return np.array(rows), np.array(stretches)
