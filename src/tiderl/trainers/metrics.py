"""The metrics of one optimizer step: sums over its loss-bearing tokens, divided once at the end (I7).

Only loss-bearing tokens enter, never padding, and `mean` is over all of the step's. The reported keys:

| key | meaning |
| --- | --- |
| `loss` | what was minimised: `policy_loss + kl_coef * kl_ref` |
| `policy_loss` | mean policy loss (`losses.py`) |
| `kl_ref` | mean k3 estimate of KL(current ‖ reference), nats; 0 where `kl_coef` is 0, which keeps no reference |
| `entropy` | mean entropy of the current policy at the trained temperature, nats |
| `ratio_mean` | mean of the clipped ratio: current / behaviour (`grpo`) or current / proximal (`decoupled_ppo`) |
| `clip_fraction` | fraction of tokens whose gradient the clip cut |
| `importance_weight_mean` | mean of min(proximal / behaviour, cap); 1 under `grpo` |
| `importance_weight_capped_fraction` | fraction of tokens whose weight was cut at the cap; 0 under `grpo` |
| `advantage_abs_mean` | mean absolute advantage |
| `zero_advantage_groups_fraction` | fraction of the step's groups whose members all had the same reward |
| `logprob_gap_mean`, `logprob_gap_max` | absolute difference of behaviour and current log-probs at equal version (*) |
| `logprob_gap_tokens` | how many tokens those are; with 0, the two above are 0 |
| `grad_norm` | Euclidean norm of the mean gradient before clipping |
| `lr` | learning rate of this step |
| `loss_tokens`, `tokens` | loss-bearing, and all real tokens |
| `padding_fraction` | share of padding in the tokens that the model computed: 0 where it takes rows (`rows.py`) |
| `computed_tokens` | real tokens that it computed: those before the last loss-bearing one, common beginnings once |

(*) Over tokens made by exactly the weights of this forward: version `update - 1`, in the first part of `update`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tiderl.data.records import MicroBatch
from tiderl.trainers.advantages import is_uninformative
from tiderl.trainers.packing import Packed

MEANS = (
    "loss",
    "policy_loss",
    "kl_ref",
    "entropy",
    "ratio_mean",
    "clip_fraction",
    "importance_weight_mean",
    "importance_weight_capped_fraction",
    "advantage_abs_mean",
)


class MetricSums:
    """The books of one optimizer step, from `begin` to `finish`."""

    def __init__(self) -> None:
        self.loss_tokens = 0
        self._sums = dict.fromkeys(MEANS, 0.0)
        self._gap_sum = self._gap_max = 0.0
        self._gap_tokens = 0
        self._tokens = self._computed_tokens = self._padding_tokens = 0
        self._uninformative: dict[int, bool] = {}  # by prompt id: a group may be spread over micro-batches

    def add(self, mb: MicroBatch, packed: Packed, per_token: Mapping[str, Tensor]) -> None:
        """`per_token` holds one [K] tensor for each of `MEANS`."""
        self.loss_tokens += packed.loss_tokens
        self._tokens += packed.tokens
        self._computed_tokens += packed.computed_tokens
        self._padding_tokens += packed.padding_tokens
        for sequence in mb.sequences:
            self._uninformative[sequence.prompt_id] = is_uninformative(sequence.group_rewards)
        with torch.no_grad():
            sums = torch.stack([per_token[name].sum(dtype=torch.float64) for name in MEANS])
        for name, value in zip(MEANS, sums.tolist(), strict=True):
            self._sums[name] += value

    def add_gap(self, gap: np.ndarray) -> None:
        """Absolute log-prob differences of tokens at equal version, float32 [n]."""
        if len(gap):
            self._gap_sum += float(gap.sum(dtype=np.float64))
            self._gap_max = max(self._gap_max, float(gap.max()))
            self._gap_tokens += len(gap)

    def is_finite(self) -> bool:
        return math.isfinite(self._sums["loss"])

    def result(self, *, grad_norm: float, lr: float) -> dict[str, float]:
        means = {name: value / self.loss_tokens for name, value in self._sums.items()}
        return means | {
            "zero_advantage_groups_fraction": sum(self._uninformative.values()) / len(self._uninformative),
            "logprob_gap_mean": self._gap_sum / max(1, self._gap_tokens),
            "logprob_gap_max": self._gap_max,
            "logprob_gap_tokens": float(self._gap_tokens),
            "grad_norm": grad_norm,
            "lr": lr,
            "loss_tokens": float(self.loss_tokens),
            "tokens": float(self._tokens),
            "computed_tokens": float(self._computed_tokens - self._padding_tokens),
            "padding_fraction": self._padding_tokens / self._computed_tokens,
        }
