"""A run read back from its directory: figures, configuration, events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tiderl.config.load import load_config
from tiderl.config.schema import Config
from tiderl.data.errors import CheckpointError
from tiderl.data.events import Event
from tiderl.data.settings import ModelSettings
from tiderl.store.recorder import read_events
from tiderl.store.rundir import RunDirectory, find


@dataclass(frozen=True)
class RecordedRun:
    """A run directory, finished or not."""

    directory: RunDirectory

    @property
    def config(self) -> Config:
        return load_config(self.directory.config).config

    @property
    def summary(self) -> dict[str, Any]:
        """The result of the last driver. Raises `CheckpointError` while there is none."""
        try:
            values: dict[str, Any] = json.loads(self.directory.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError("this run has no result yet", where=str(self.directory.root)) from error
        return values

    @property
    def profile(self) -> dict[str, Any] | None:
        """Where the time of the last driver's processes went; None where it ran without `log.profile`."""
        try:
            values: dict[str, Any] = json.loads(self.directory.profile.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot be read: {error}", where=str(self.directory.profile)) from error
        return values

    def events(self) -> Iterator[Event]:
        yield from read_events(self.directory.events)


def read_policy(directory: RunDirectory) -> ModelSettings | None:
    """The model as the run's driver described it; None before it came so far. Raises `CheckpointError` when damaged."""
    try:
        return msgspec.json.decode(directory.policy.read_bytes(), type=ModelSettings)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(directory.policy)) from error


def load_run(run: str | Path) -> RecordedRun:
    """The run of this path, or of this name under `runs/`. Raises `ConfigurationError` when there is none."""
    return RecordedRun(find(run))
