"""The result of a run: the same keys for `train` and `simulate`, None where one has no meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiderl.config.check import NoEffect
from tiderl.data.events import Event
from tiderl.data.spans import span
from tiderl.observe.metrics import RunMetrics
from tiderl.runtime.ports import Recorder, Replay

BOUND_FIGURES = ("bound_tokens_per_s", "rho", "rho_order", "binding")
"""Of a simulation (`api/bound.py`), and of a run on real time (`api/live_bound.py`)."""


@dataclass(frozen=True)
class Result:
    """Figures by name; `observe.definitions` says what each means."""

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def to_json(self) -> dict[str, Any]:
        return dict(self.values)


class Fanout:
    """One recorder that is many: each event goes to all, in this order."""

    def __init__(self, recorders: Sequence[Recorder], metrics: RunMetrics, observers: Sequence[Any]) -> None:
        self.recorders, self.metrics, self.observers = recorders, metrics, observers
        self.events = 0

    def emit(self, event: Event) -> None:
        self.events += 1
        with span("events"):
            for recorder in self.recorders:
                recorder.emit(event)
            self.metrics.observe(event)
            for observer in self.observers:
                observer.observe(event)


def journal_counts(replay: Replay) -> dict[str, Any]:
    """`updates`, `issued`, `trained`, `dropped` by reason and `in_flight`, as the journal has them: the truth over
    crashes."""
    dropped: dict[str, int] = {}
    for row in replay.trajectories:
        if row.status == "dropped":
            dropped[str(row.reason)] = dropped.get(str(row.reason), 0) + 1
    trained = sum(row.status == "trained" for row in replay.trajectories)
    issued = len(replay.trajectories)
    return {
        "updates": len(replay.updates),
        "issued": issued,
        "trained": trained,
        "dropped": dict(sorted(dropped.items())),
        "in_flight": issued - trained - sum(dropped.values()),
    }


def make_result(
    metrics: RunMetrics,
    counts: Mapping[str, Any],
    no_effect: Sequence[NoEffect],
    *,
    run_dir: str | None,
    wall_s: float,
    driver_load_fraction: float | None,
    events: int,
    log_sha256: str | None,
    meaningless: Sequence[str] = (),
    bound: Mapping[str, Any] | None = None,
) -> Result:
    """Everything that `--json` prints, in one order for both clocks; the `meaningless` figures are None, and those of
    the `bound` where there is none."""
    return Result(
        {
            "run_dir": run_dir,
            **_without(metrics.summary(), meaningless),
            **counts,
            **(dict.fromkeys(BOUND_FIGURES) if bound is None else bound),
            "wall_s": wall_s,
            "driver_load_fraction": driver_load_fraction,
            "events": events,
            "log_sha256": log_sha256,
            "no_effect": [str(item) for item in no_effect],
        }
    )


def _without(figures: Mapping[str, Any], meaningless: Sequence[str]) -> dict[str, Any]:
    """The figures, None for those without meaning, each environment's of a mixture too."""
    return {
        name: None
        if name in meaningless
        else {environment: _without(own, meaningless) for environment, own in value.items()}
        if name == "environments"
        else value
        for name, value in figures.items()
    }
