"""What a rank host is built from, and what its channel carries: one line per method, payload type, result type.

Cores are named, not imported: `module:function`, a function of the settings. Must not know how messages travel.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from tiderl.data.errors import ConfigurationError, MissingExtraError
from tiderl.data.records import MicroBatch, Sequence, TaskKey, UpdateStats, WeightHandle
from tiderl.data.settings import EngineSettings, TrainerSettings
from tiderl.data.spans import ProcessSpans
from tiderl.data.turns import EngineCapabilities, EngineStats, PauseMode, Turn, TurnResult


class HostSpec(msgspec.Struct, frozen=True):
    """One rank: the cores it holds (None = not this one) and where their builders are."""

    rank: int
    engine: EngineSettings | None = None
    engine_core: str = "tiderl.engines.torch_engine:build"
    trainer: TrainerSettings | None = None
    trainer_core: str = "tiderl.trainers.torch_trainer:build"
    profile: bool = False  # count where the time of its process goes

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    @property
    def holds(self) -> str:
        """What its cores are, for people."""
        cores = (("engine", self.engine), ("trainer", self.trainer))
        return " and ".join(name for name, core in cores if core is not None)


class Started(msgspec.Struct, frozen=True):
    """A host's answer when its cores stand."""

    capabilities: EngineCapabilities | None
    stats: EngineStats | None


class Generated(msgspec.Struct, frozen=True):
    """A turn's result, and the engine's state right after it."""

    result: TurnResult
    stats: EngineStats


class TurnName(msgspec.Struct, frozen=True):
    task: TaskKey
    turn: int


class WarmUp(msgspec.Struct, frozen=True):
    demos: tuple[Sequence, ...]
    updates: int
    lr: float


class Forward(msgspec.Struct, frozen=True):
    mb: MicroBatch
    proximal: bool


class Backward(msgspec.Struct, frozen=True):
    mb: MicroBatch
    ref_logprobs: np.ndarray | None


class Begin(msgspec.Struct, frozen=True):
    update: int
    members: tuple[int, ...]


class Method(msgspec.Struct, frozen=True):
    payload: Any
    result: Any


METHODS: dict[str, Method] = {
    "generate": Method(Turn, Generated),
    "abort": Method(TurnName, EngineStats),
    "retain": Method(TaskKey, None),
    "release": Method(TaskKey, None),
    "offload": Method(TaskKey, None),
    "pause": Method(PauseMode, EngineStats),
    "resume": Method(None, EngineStats),
    "load_weights": Method(WeightHandle, EngineStats),
    "warm_up": Method(WarmUp, dict[str, float]),
    "reference_logprobs": Method(MicroBatch, np.ndarray),
    "forward": Method(Forward, None),
    "backward": Method(Backward, None),
    "begin": Method(Begin, None),
    "finish": Method(None, UpdateStats),
    "export": Method(int, WeightHandle),
    "discard": Method(WeightHandle, None),
    "save": Method(str, None),
    "restore": Method(str, None),
    "save_model": Method(str, None),
    "spans": Method(None, ProcessSpans | None),
    "close": Method(None, None),
}


def load_builder(name: str) -> Callable[[Any], Any]:
    """The function that `module:function` names. Raises `ConfigurationError` when there is none."""
    module_name, _, function = name.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("torch", "transformers", "tokenizers"):
            raise MissingExtraError(error.name, "train", where=name) from error
        raise ConfigurationError(f"no core {name!r}: {error}") from error
    builder: Callable[[Any], Any] | None = getattr(module, function, None)
    if builder is None:
        raise ConfigurationError(f"no core {name!r}: the module has no {function!r}")
    return builder
