"""Traces of real agent runs: a CSV file of turns to trajectories, and the workload profile that resembles them.

One row is one turn of one trajectory, numbers only; trajectories may be mixed, turns of one come in order. What is
missing, blank, out of order or no number is a `ConfigurationError` with file and line. Reads one file, knows no clock.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import WorkloadProfile

SAMPLED = ("output_tokens", "action_tokens")
OBSERVED = ("obs_tokens", "observation_tokens")
ESTIMATED = "_est"
"""Ending of a column whose numbers are estimates; read like the column without it."""
SHOWN = "traj, turn, output_tokens, obs_tokens; optional: prompt_tokens, step_s, reset_s, reward"
ASSUMED_CORRELATION = 0.5
"""Of the turns within a group: a trace does not tell which trajectories are of one prompt."""


@dataclass(frozen=True)
class TracedTurn:
    """Tokens sampled, tokens observed after them (0: none came), and the environment's seconds (None: unknown)."""

    sampled_tokens: int
    observed_tokens: int
    prompt_tokens: int | None
    step_s: float | None
    served_s: float = 0.0
    """Further seconds, on a worker that serves one call at a time."""


@dataclass(frozen=True)
class TracedTrajectory:
    turns: tuple[TracedTurn, ...]
    reset_s: float | None
    reward: float | None
    reset_served_s: float = 0.0

    @property
    def first_tokens(self) -> int:
        """Of the first observation, at least 1."""
        first = self.turns[0]
        return max(1, first.observed_tokens if first.prompt_tokens is None else first.prompt_tokens)


@dataclass
class _Open:
    """A trajectory while its rows come."""

    turns: list[TracedTurn]
    reset_s: float | None = None
    reward: float | None = None


def read_trace(path: str | Path) -> tuple[TracedTrajectory, ...]:
    """The trajectories of a CSV file, in the order of their first rows. Columns: see `SHOWN`; others are ignored.

    Blank cells: no observation came, or what is optional is unknown. Raises `ConfigurationError` for a file that is
    not there or empty, a missing column, a row of another length, text or NaN where a number belongs, a negative
    number, no or fractional tokens, and turns that are not 0, 1, 2, … within a trajectory.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = _columns(path, reader.fieldnames or ())
            found = _trajectories(path, reader, columns)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the trace cannot be read: {error}", where=str(path)) from error
    if not found:
        raise ConfigurationError("the trace has no turns", where=str(path), hint=f"columns: {SHOWN}")
    return tuple(TracedTrajectory(tuple(open_.turns), open_.reset_s, open_.reward) for open_ in found.values())


def fitted_profile(trace: Iterable[TracedTrajectory], *, score_s: float = 0.0) -> WorkloadProfile:
    """The lognormal profile with the trace's medians and the deviations of its logarithms; unknown seconds are 0.
    `score_s`: of the verifier, which no trace tells.

    A lognormal misfits what has two modes or a time-out; then the tails belong into `env.wait`.
    """
    trajectories = list(trace)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    turns_median, turns_sigma = _lognormal([len(trajectory.turns) for trajectory in trajectories])
    action_tokens, action_sigma = _lognormal([turn.sampled_tokens for turn in turns])
    observation_tokens, observation_sigma = _lognormal([turn.observed_tokens for turn in turns])
    step_s, step_sigma = _lognormal([turn.step_s for turn in turns if turn.step_s is not None])
    resets = [trajectory.reset_s for trajectory in trajectories if trajectory.reset_s is not None]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    return WorkloadProfile(
        turns_median=turns_median,
        turns_sigma=turns_sigma,
        first_observation_tokens=_lognormal([trajectory.first_tokens for trajectory in trajectories])[0],
        observation_tokens=max(1.0, observation_tokens),
        observation_sigma=observation_sigma,
        action_tokens=max(1.0, action_tokens),
        action_sigma=action_sigma,
        step_s=step_s,
        step_sigma=step_sigma,
        reset_s=_lognormal(resets)[0],
        group_correlation=ASSUMED_CORRELATION,
        score_s=score_s,
        success_fraction=sum(reward > 0 for reward in rewards) / len(rewards) if rewards else 0.5,
    )


def _lognormal(values: Iterable[float]) -> tuple[float, float]:
    """Median, and deviation of the logarithm, of those above 0; (0, 0) when there are none."""
    positive = [value for value in values if value > 0]
    if not positive:
        return 0.0, 0.0
    return statistics.median(positive), statistics.pstdev(math.log(value) for value in positive)


def _columns(path: Path, names: Iterable[str]) -> Mapping[str, str]:
    """What is read -> the column that holds it."""
    plain = {name.removesuffix(ESTIMATED): name for name in names}
    if not plain:
        raise ConfigurationError("the trace is empty", where=str(path), hint=f"columns: {SHOWN}")
    wanted: dict[str, tuple[str, ...]] = {
        "traj": ("traj",),
        "turn": ("turn",),
        "sampled": SAMPLED,
        "observed": OBSERVED,
        "prompt": ("prompt_tokens",),
        "step_s": ("step_s",),
        "reset_s": ("reset_s",),
        "reward": ("reward",),
    }
    columns = {meaning: plain[name] for meaning, choices in wanted.items() for name in choices if name in plain}
    missing = [wanted[meaning][0] for meaning in ("traj", "turn", "sampled", "observed") if meaning not in columns]
    if missing:
        raise ConfigurationError(
            f"the trace has no column {', '.join(missing)}", where=f"{path}:1", hint=f"columns: {SHOWN}"
        )
    return columns


def _trajectories(path: Path, reader: csv.DictReader[str], columns: Mapping[str, str]) -> dict[int, _Open]:
    found: dict[int, _Open] = {}
    for row in reader:
        where = f"{path}:{reader.line_num}"
        _check_length(row, where)

        def number(meaning: str, row: dict[str, str] = row, where: str = where) -> float | None:
            """None where the cell is empty or the column is not there."""
            column = columns.get(meaning)
            text = row.get(column) if column else None
            if not text:
                return None
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{column} must be a number of at least 0, given {text!r}", where=where)
            return value

        def whole_or_blank(meaning: str, row: dict[str, str] = row, where: str = where) -> int | None:
            value = number(meaning, row, where)
            if value is not None and value != int(value):
                raise ConfigurationError(f"{columns[meaning]} must be a whole number", where=where)
            return None if value is None else int(value)

        def whole(meaning: str, row: dict[str, str] = row, where: str = where) -> int:
            value = whole_or_blank(meaning, row, where)
            if value is None:
                raise ConfigurationError(f"{columns[meaning]} must be a whole number, not blank", where=where)
            return value

        own = found.setdefault(whole("traj"), _Open([]))
        turn = whole("turn")
        if turn != len(own.turns):
            raise ConfigurationError(
                f"turn {turn} of trajectory {whole('traj')} comes where {len(own.turns)} belongs",
                where=where,
                hint="turns of one trajectory are 0, 1, 2, … in the order of the file",
            )
        own.turns.append(
            TracedTurn(
                sampled_tokens=whole("sampled"),
                observed_tokens=whole_or_blank("observed") or 0,
                prompt_tokens=whole_or_blank("prompt"),
                step_s=number("step_s"),
            )
        )
        own.reset_s = number("reset_s") if turn == 0 else own.reset_s
        own.reward = number("reward") if number("reward") is not None else own.reward
    return found


def _check_length(row: Mapping[str | None, object], where: str) -> None:
    """`csv` fills a short row with None, and keeps what is too much under None."""
    if None in row or None in row.values():
        what = "more" if None in row else "fewer"
        raise ConfigurationError(f"the row has {what} cells than the first line has columns", where=where)
