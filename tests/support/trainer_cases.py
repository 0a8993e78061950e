"""Sequences, groups and trainers small enough to check by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiderl.data.records import MicroBatch
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import ModelSettings, TrainerSettings
from tiderl.trainers.torch_trainer import build

WORDS = ("<pad>", "<end>", "<act>", "<unk>", "go", "left", "right", "door")
TINY_MODEL = ModelSettings(
    path="scratch",
    vocab_size=len(WORDS),
    max_context_tokens=64,
    pad_id=0,
    stop_ids=(1,),
    layers=2,
    hidden=16,
    heads=2,
    kv_heads=1,
    words=WORDS,
)


def settings(directory: object, **changes: Any) -> TrainerSettings:
    """Trainer settings over the tiny model; versions go to `directory`."""
    return TrainerSettings(
        **{"model": TINY_MODEL, "seed": 3, "temperature": 1.0, "weights_dir": str(directory)} | changes
    )


def tiny_trainer(directory: object, **changes: Any) -> Any:
    """A trainer whose reference is fixed at its start model."""
    trainer = build(settings(directory, **changes))
    trainer.warm_up((), 0, 0.0)
    return trainer


def sequence(
    ids: Sequence[int],
    loss_positions: Sequence[int],
    logprobs: Sequence[float] | float = -2.0,
    *,
    rewards: Sequence[float] = (1.0, 0.0),
    member: int = 0,
    prompt_id: int = 0,
    version: int = 0,
    trajectory_id: int = 0,
) -> TrainSequence:
    """One sequence whose loss-bearing tokens are at `loss_positions`, with these behaviour log-probs."""
    mask = np.zeros(len(ids), bool)
    mask[list(loss_positions)] = True
    behaviour = np.zeros(len(ids), np.float32)
    behaviour[mask] = logprobs
    return TrainSequence(
        trajectory_id=trajectory_id,
        prompt_id=prompt_id,
        member=member,
        ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=behaviour,
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=float(rewards[member]),
        group_rewards=np.array(rewards, np.float64),
    )


def random_group(prompt_id: int, seed: int, size: int = 4) -> list[TrainSequence]:
    """A group of different lengths and rewards, its log-probs near those of an untrained model."""
    draws = np.random.default_rng(seed)
    rewards = draws.random(size)
    members = []
    for member in range(size):
        length = int(draws.integers(4, 24))
        positions = sorted({1, *(int(p) for p in draws.integers(1, length, size=length // 3))})
        members.append(
            sequence(
                draws.integers(1, len(WORDS), size=length).tolist(),
                positions,
                draws.normal(-2.0, 0.3, size=len(positions)).tolist(),
                rewards=rewards.tolist(),
                member=member,
                prompt_id=prompt_id,
                trajectory_id=size * prompt_id + member,
            )
        )
    return members


def alike_group(prompt_id: int, seed: int, size: int = 4) -> list[TrainSequence]:
    """A group as agents make it: one beginning for all, members that part ways later, and two that never do."""
    draws = np.random.default_rng(seed)
    ids = draws.integers(1, len(WORDS), size=12).tolist()
    members = []
    for member in range(size):
        kept = 12 if member < 2 else int(draws.integers(4, 12))
        own = [] if member < 2 else draws.integers(1, len(WORDS), size=int(draws.integers(1, 8))).tolist()
        positions = [p for p in (4, 5, 8, 11, 14) if p < kept + len(own)]
        members.append(
            sequence(
                ids[:kept] + own,
                positions,
                draws.normal(-2.0, 0.3, size=len(positions)).tolist(),
                rewards=[float(i == 0) for i in range(size)],
                member=member,
                prompt_id=prompt_id,
                trajectory_id=size * prompt_id + member,
            )
        )
    return members


def micro_batch(sequences: Sequence[TrainSequence], index: int = 0, *, update: int = 1, part: int = 0) -> MicroBatch:
    return MicroBatch(update, part, index, tuple(sequences))


def accumulate(trainer: Any, batches: Sequence[MicroBatch]) -> None:
    """Everything of one optimizer step but its `finish`."""
    trainer.begin(batches[0].update, [0])
    for mb in batches:
        reference = trainer.reference_logprobs(mb) if trainer.settings.kl_coef > 0 else None
        trainer.forward(mb)
        trainer.backward(mb, reference)


def weights(trainer: Any) -> dict[str, np.ndarray]:
    """The weights as they are now, copied."""
    return {name: p.detach().numpy().copy() for name, p in trainer.model.named_parameters()}


def gradients(trainer: Any) -> dict[str, np.ndarray]:
    """The un-normalised gradients accumulated so far, copied."""
    return {name: p.grad.numpy().copy() for name, p in trainer.model.named_parameters() if p.grad is not None}
