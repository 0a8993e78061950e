"""Supervised warm-up on expert demonstrations: cross-entropy on the tokens that the policy would sample.

At the engine's temperature, so that what is learned is the distribution that is sampled. Minibatches come from a named
stream. Knows nothing of rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tiderl.data.errors import ConfigurationError, NumericalFault
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.rng import stream
from tiderl.trainers.optimizer import make_optimizer
from tiderl.trainers.packing import pack
from tiderl.trainers.row_model import layout_for
from tiderl.trainers.scoring import score

BATCH_DEMOS = 16
"""Demonstrations per step. 16 of about 100 tokens cost 0.2 s on one laptop core."""
RISE_FRACTION, FINAL_FRACTION = 0.1, 0.1
"""The learning rate rises over this share of the steps, then falls on a line to this share of its value."""


def warm_up(
    model: Any,
    demos: Sequence[TrainSequence],
    *,
    updates: int,
    lr: float,
    seed: int,
    temperature: float,
    pad_id: int,
    max_call_tokens: int,
    max_grad_norm: float,
    compute_dtype: torch.dtype,
) -> dict[str, float]:
    """`updates` steps of AdamW in place. Returns the mean cross-entropy in nats per token of the first and of the last
    minibatch, each before its step; nothing for 0 updates.

    Raises `ConfigurationError` where the demonstrations have nothing to learn from, `NumericalFault` where the loss is
    not finite.
    """
    if updates == 0:
        return {}
    if not any(demo.loss_mask.any() for demo in demos):
        raise ConfigurationError(
            "the warm-up has no demonstration to learn from",
            where="warmup.demos",
            hint="set warmup.updates to 0, or give the environment an expert",
        )
    optimizer = make_optimizer(model, lr, weight_decay=0.0)
    layout = layout_for(model, pad_id, max_call_tokens)
    losses = []
    for step, batch in zip(range(updates), _minibatches(demos, seed), strict=False):
        optimizer.param_groups[0]["lr"] = lr * _lr_factor(step, updates)
        packed = pack(batch, layout)
        logprobs, _ = score(model, packed, temperature, compute_dtype)
        loss = -logprobs.mean()
        losses.append(float(loss.detach()))
        if not np.isfinite(losses[-1]):
            raise NumericalFault(f"the loss of step {step} is {losses[-1]}", where="warm-up", hint="lower warmup.lr")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"warmup_loss_first": losses[0], "warmup_loss_last": losses[-1]}


def _minibatches(demos: Sequence[TrainSequence], seed: int) -> Iterator[list[TrainSequence]]:
    """Endless passes over the demonstrations that bear loss, each in a new order; its last batch may be smaller."""
    useful = [demo for demo in demos if demo.loss_mask.any()]
    draws = stream(seed, "warmup")
    while True:
        order = draws.permutation(len(useful))
        for start in range(0, len(order), BATCH_DEMOS):
            yield [useful[index] for index in order[start : start + BATCH_DEMOS]]


def _lr_factor(step: int, updates: int) -> float:
    rise = max(1, round(RISE_FRACTION * updates))
    if step < rise:
        return (step + 1) / rise
    return 1.0 - (1.0 - FINAL_FRACTION) * (step - rise + 1) / max(1, updates - rise)
