"""TideRL: reinforcement learning for LLM agents, scheduled by readiness.

The public API is what `__all__` lists, loaded lazily: importing `tiderl` imports no torch, transformers, vLLM or Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiderl.api import compare, load_run, simulate, train
    from tiderl.data.records import Observation, Prompt, Step
    from tiderl.envs.base import Environment
    from tiderl.schedule.strategy import Strategy

_HOMES = {
    "Environment": "tiderl.envs.base",
    "Observation": "tiderl.data.records",
    "Prompt": "tiderl.data.records",
    "Step": "tiderl.data.records",
    "Strategy": "tiderl.schedule.strategy",
    "compare": "tiderl.api",
    "load_run": "tiderl.api",
    "simulate": "tiderl.api",
    "train": "tiderl.api",
}

__all__ = ["Environment", "Observation", "Prompt", "Step", "Strategy", "compare", "load_run", "simulate", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiderl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
