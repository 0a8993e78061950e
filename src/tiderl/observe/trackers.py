"""Trackers of other people's making that a run can feed beside its own files: TensorBoard.

Derived from events, as every figure is. A package that is missing is refused before a run starts. Knows no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiderl.data.errors import MissingExtraError
from tiderl.data.events import EvalFinished, Event, UpdateCommitted
from tiderl.observe.metrics import RunMetrics, eval_row

NO_SCALARS = frozenset({"kind", "update", "version", "t_s", "prompts", "successes"})
"""What of a row is no curve of its own: its name, its place on the axis, and the parts of a fraction."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises `MissingExtraError` for a tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise MissingExtraError(name, "track", where=f"log.trackers {name}")


class TensorboardTracker:
    """An observer that writes scalars over updates: `train/…` for each update, `eval/…` for each evaluation.

    A resumed run adds a file of its own; TensorBoard shows both as one run. Raises `MissingExtraError`.
    """

    def __init__(self, directory: Path, metrics: RunMetrics) -> None:
        try:
            from tensorboard.summary import Writer
        except ModuleNotFoundError as missing:
            raise MissingExtraError("tensorboard", "track", where="log.trackers tensorboard") from missing
        self.metrics = metrics
        self._writer = Writer(str(directory))

    def observe(self, event: Event) -> None:
        """Call it after the metrics have observed the event."""
        if isinstance(event, UpdateCommitted):
            row = self.metrics.update_row(event)
            trainer = row.pop("trainer")
            self._write("train", event.update, {**row, **trainer})
        elif isinstance(event, EvalFinished):
            self._write("eval", event.version, eval_row(event))
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, section: str, step: int, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if value is not None and name not in NO_SCALARS:
                self._writer.add_scalar(f"{section}/{name}", value, step)
