"""`metrics.jsonl` in the run directory: one line an update, one an evaluation, readable while the run goes on.

Derived from events; nothing reads it back to decide anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiderl.data.errors import CheckpointError
from tiderl.data.events import EvalFinished, Event, UpdateCommitted
from tiderl.observe.metrics import RunMetrics, eval_row


class MetricsFile:
    """Appends a line when its event comes. Raises `CheckpointError` when the file cannot be written."""

    def __init__(self, path: Path, metrics: RunMetrics) -> None:
        self.path, self.metrics = path, metrics
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"cannot be written: {error.strerror}", where=str(path)) from error

    def observe(self, event: Event) -> None:
        """Call it after the metrics have observed the event."""
        if isinstance(event, UpdateCommitted):
            self._write(self.metrics.update_row(event))
        elif isinstance(event, EvalFinished):
            self._write(eval_row(event))

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"cannot be written: {error.strerror}", where=str(self.path)) from error

    def close(self) -> None:
        self._file.close()
