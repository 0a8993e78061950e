"""The entry of the torch trainer: `build` checks the settings and what is installed, and makes the core.

Importing this module costs no torch. Knows nothing of ranks, runs or engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiderl.data.errors import ConfigurationError, MissingExtraError
from tiderl.data.settings import TrainerSettings

if TYPE_CHECKING:
    from tiderl.trainers.core import TorchTrainer


def build(settings: TrainerSettings) -> TorchTrainer:
    """A `TrainerCore` at the start model. Raises `MissingExtraError` or `ConfigurationError`."""
    _check(settings)
    for package in ("torch", "transformers", "tokenizers"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingExtraError(package, "train", where="trainer") from error
    from tiderl.trainers.core import TorchTrainer

    return TorchTrainer(settings)


def _check(settings: TrainerSettings) -> None:
    model = settings.model
    if not settings.temperature > 0:
        raise ConfigurationError(
            f"cannot train at temperature {settings.temperature}", where="rollout.temperature", hint="use 1.0"
        )
    if settings.importance_weight_cap <= 0 or settings.clip_low < 0 or settings.clip_high < 0:
        raise ConfigurationError("clip ranges and the importance-weight cap must be positive", where="algorithm")
    if model.words and (len(model.words) != model.vocab_size or len(set(model.words)) != model.vocab_size):
        raise ConfigurationError(
            f"{len(set(model.words))} different words for a vocabulary of {model.vocab_size}", where="model"
        )
