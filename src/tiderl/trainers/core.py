"""The torch trainer: reference, actor and update of one rank, as `TrainerCore`.

Keeps I7: a micro-batch adds the *sum* of its token losses to the gradient, and `finish` divides once by the
loss-bearing tokens of the whole optimizer step. So every sampled token weighs the same (the token mean over the step,
as in DAPO, arXiv 2503.14476), whatever the micro-batches, their order and the other sequences in them. The metrics are
defined in `metrics.py`. Knows nothing of schedules, engines or the journal.

With `steps_per_batch` 1 the proximal policy of decoupled PPO is this step's own forward, detached; with more, it is the
policy before the update, from `forward(mb, proximal=True)`, which costs nothing where the loss needs none.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiderl.data.errors import ConfigurationError, InvariantViolation, NumericalFault
from tiderl.data.records import MicroBatch, UpdateStats, WeightHandle
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import TrainerSettings
from tiderl.trainers.advantages import sequence_advantage
from tiderl.trainers.checkpoint import load_checkpoint, save_checkpoint
from tiderl.trainers.export import WeightExports
from tiderl.trainers.metrics import MetricSums
from tiderl.trainers.model import build_model, compute_dtype, named_weights
from tiderl.trainers.objective import token_terms
from tiderl.trainers.optimizer import clipped_mean_gradient, lr_at, make_optimizer
from tiderl.trainers.packing import Packed, pack
from tiderl.trainers.row_model import layout_for
from tiderl.trainers.saving import save_model_folder
from tiderl.trainers.scoring import score
from tiderl.trainers.targets import loss_values
from tiderl.trainers.warmup import warm_up

Key = tuple[int, int, int]  # (update, part, index): names a micro-batch


@dataclass(frozen=True)
class _Forwarded:
    """A micro-batch between its forward and its backward. Tensors are [K]."""

    packed: Packed
    current: Tensor  # with its graph
    entropy: Tensor


@dataclass
class _OpenUpdate:
    """From `begin` to `finish`."""

    update: int
    sums: MetricSums = field(default_factory=MetricSums)
    forwarded: dict[Key, _Forwarded] = field(default_factory=dict)
    seconds: float = 0.0  # spent computing
    first_fault: Key | None = None  # of the first micro-batch whose loss was not finite


class TorchTrainer:
    """One rank's trainer. Calls come one at a time; nothing waits. Make it with `torch_trainer.build`."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        self._dtype = compute_dtype(settings.model)
        self.model = build_model(settings.model, settings.seed)
        self._device = next(self.model.parameters()).device
        self._layout = layout_for(self.model, settings.model.pad_id, settings.micro_batch_tokens)
        self.reference: Any | None = None
        self._optimizer = make_optimizer(self.model, settings.lr, settings.weight_decay)
        self._optimizer_steps = 0
        self._open: _OpenUpdate | None = None
        self._proximal: dict[Key, Tensor] = {}
        weight_bytes = sum(p.numel() for p in self.model.parameters()) * self._dtype.itemsize
        self._exports = WeightExports(settings.weights_dir, weight_bytes)

    # ---- start

    def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]:
        """See `warmup.warm_up`. Afterwards the reference is this model (kept only where `kl_coef` > 0) and the
        optimizer is new."""
        result = warm_up(
            self.model,
            demos,
            updates=updates,
            lr=lr,
            seed=self.settings.seed,
            temperature=self.settings.temperature,
            pad_id=self.settings.model.pad_id,
            max_call_tokens=self.settings.micro_batch_tokens,
            max_grad_norm=self.settings.max_grad_norm,
            compute_dtype=self._dtype,
        )
        self.reference = self._frozen_copy() if self._uses_reference else None
        self._optimizer = make_optimizer(self.model, self.settings.lr, self.settings.weight_decay)
        self._optimizer_steps = 0
        return result

    # ---- reference

    def reference_logprobs(self, mb: MicroBatch) -> np.ndarray:
        """float32 [mb.tokens], in sequence order; 0 where the loss mask is False.

        Raises `InvariantViolation` where there is no reference: `kl_coef` is 0, or no `warm_up` or `restore` came.
        """
        if self.reference is None:
            raise InvariantViolation("there is no reference model", where="trainer")
        packed = self._pack(mb)
        with torch.no_grad():
            logprobs, _ = score(self.reference, packed, self.settings.temperature, self._dtype)
        flat = np.zeros(mb.tokens, np.float32)
        flat[packed.positions] = logprobs.cpu().numpy()
        return flat

    # ---- actor

    def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None:
        """Log-probs of the loss-bearing tokens, kept for `backward` by (update, part, index).

        `proximal`: without gradient, kept as the proximal policy for this micro-batch's backward; also before `begin`.
        """
        if proximal:
            if self._needs_proximal:
                with torch.no_grad():
                    logprobs, _ = score(self.model, self._pack(mb), self.settings.temperature, self._dtype)
                self._proximal[_key(mb)] = logprobs
            return
        step = self._opened(mb)
        started_s = time.perf_counter()
        packed = self._pack(mb)
        current, entropy = score(self.model, packed, self.settings.temperature, self._dtype)
        step.forwarded[_key(mb)] = _Forwarded(packed, current, entropy)
        step.seconds += time.perf_counter() - started_s

    def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None:
        """Add the micro-batch's summed token losses to the gradient and free its graph.

        `ref_logprobs`: what `reference_logprobs` gave; None only where `kl_coef` is 0. Raises `InvariantViolation` for
        a micro-batch that was not forwarded, lacks its proximal or reference log-probs, or whose rewards break I9.
        """
        step = self._opened(mb)
        started_s = time.perf_counter()
        forwarded = step.forwarded.pop(_key(mb), None)
        if forwarded is None:
            raise InvariantViolation("backward without a forward", where=_name(mb))
        packed, current = forwarded.packed, forwarded.current
        behaviour = self._tensor(loss_values(mb.sequences, "logprobs", np.float32))
        terms = token_terms(
            self.settings,
            current=current,
            behaviour=behaviour,
            advantages=self._advantages(mb, packed),
            entropy=forwarded.entropy,
            proximal=self._kept_proximal(mb),
            reference=self._kept_reference(mb, packed, ref_logprobs),
        )
        step.sums.add(mb, packed, terms)
        if not step.sums.is_finite() and step.first_fault is None:
            step.first_fault = _key(mb)
        if mb.part == 0:
            at_this_version = loss_values(mb.sequences, "versions", np.int64) == mb.update - 1
            step.sums.add_gap((behaviour - current.detach()).abs().cpu().numpy()[at_this_version])
        if packed.loss_tokens:
            terms["loss"].sum().backward()
        step.seconds += time.perf_counter() - started_s

    # ---- update

    def begin(self, update: int, members: Sequence[int]) -> None:
        """Open one optimizer step of `update`. One that is open is given up: after a lost member it starts again."""
        if len(members) > 1:
            raise ConfigurationError(
                f"training on several ranks is not yet supported: {list(members)}",
                where="cluster",
                hint="leave one rank to train",
            )
        self._open = _OpenUpdate(update)
        self._optimizer.zero_grad(set_to_none=True)
        self._proximal = {key: kept for key, kept in self._proximal.items() if key[0] == update}

    def finish(self) -> UpdateStats:
        """One division by the loss-bearing tokens (I7), clip, optimizer step; closes the step.

        `seconds` is the time spent computing since `begin`. Raises `NumericalFault` for a loss or gradient that is not
        finite: no weight changes then. Raises `InvariantViolation` where micro-batches wait for their backward, or none
        bore loss.
        """
        step = self._open
        if step is None:
            raise InvariantViolation("finish without begin", where="trainer")
        if step.forwarded or not step.sums.loss_tokens:
            what = f"{len(step.forwarded)} micro-batches without backward, {step.sums.loss_tokens} loss-bearing tokens"
            raise InvariantViolation(f"an update cannot finish: {what}", where=f"update {step.update}")
        started_s = time.perf_counter()
        self._open = None
        lr = lr_at(self._optimizer_steps, self.settings.lr)
        try:
            grad_norm = clipped_mean_gradient(self.model, step.sums.loss_tokens, self.settings.max_grad_norm)
            if step.first_fault is not None or not np.isfinite(grad_norm):
                raise _numerical_fault(step, grad_norm)
            self._optimizer.param_groups[0]["lr"] = lr
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._optimizer_steps += 1
        seconds = step.seconds + time.perf_counter() - started_s
        return UpdateStats(step.sums.result(grad_norm=grad_norm, lr=lr), seconds)

    # ---- weights and state

    def export(self, version: int) -> WeightHandle:
        """Write the weights in the model's dtype, under the names of `state_dict()` without a tied head."""
        return self._exports.write(version, named_weights(self.model, self._dtype))

    def discard(self, handle: WeightHandle) -> None:
        """Delete an exported version; one that is gone already is none the worse."""
        self._exports.discard(handle)

    def save(self, directory: str) -> None:
        """See `checkpoint.py`. Within an optimizer step: the state before it, whose gradients are no part of that."""
        save_checkpoint(
            directory,
            model=self.model,
            reference=self.reference,
            optimizer=self._optimizer,
            optimizer_steps=self._optimizer_steps,
        )

    def restore(self, directory: str) -> None:
        """The inverse of `save`; an open step is given up. Raises `CheckpointError`, and then no weight has changed."""
        self._open = None
        self._proximal = {}
        self._optimizer.zero_grad(set_to_none=True)
        reference = (self.reference or self._frozen_copy()) if self._uses_reference else None
        self._optimizer_steps = load_checkpoint(
            directory, model=self.model, reference=reference, optimizer=self._optimizer
        )
        self.reference = reference

    def save_model(self, directory: str) -> None:
        """A Hugging Face folder, see `saving.py`."""
        save_model_folder(self.model, self.settings.model, self.settings.temperature, self._dtype, directory)

    def close(self) -> None:
        """Remove the exported versions, where their folder is our own. Idempotent."""
        self._open = None
        self._proximal = {}
        self._exports.close()

    # ---- parts

    @property
    def _uses_reference(self) -> bool:
        return self.settings.kl_coef > 0

    @property
    def _needs_proximal(self) -> bool:
        return self.settings.loss == "decoupled_ppo" and self.settings.steps_per_batch > 1

    def _opened(self, mb: MicroBatch) -> _OpenUpdate:
        if self._open is None or self._open.update != mb.update:
            raise InvariantViolation("a micro-batch outside its update", where=_name(mb))
        return self._open

    def _pack(self, mb: MicroBatch) -> Packed:
        return pack(mb.sequences, self._layout)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _frozen_copy(self) -> Any:
        return copy.deepcopy(self.model).requires_grad_(False)

    def _advantages(self, mb: MicroBatch, packed: Packed) -> Tensor:
        by_sequence = [sequence_advantage(self.settings.advantage, sequence) for sequence in mb.sequences]
        return self._tensor(np.repeat(np.array(by_sequence, np.float32), packed.lengths))

    def _kept_proximal(self, mb: MicroBatch) -> Tensor | None:
        if not self._needs_proximal:
            return None
        if _key(mb) not in self._proximal:
            raise InvariantViolation("no proximal forward came before", where=_name(mb))
        return self._proximal[_key(mb)]

    def _kept_reference(self, mb: MicroBatch, packed: Packed, ref_logprobs: np.ndarray | None) -> Tensor | None:
        if not self._uses_reference:
            return None
        if ref_logprobs is None or len(ref_logprobs) != mb.tokens:
            given = "none" if ref_logprobs is None else str(len(ref_logprobs))
            raise InvariantViolation(f"{mb.tokens} reference log-probs are needed, given: {given}", where=_name(mb))
        return self._tensor(np.asarray(ref_logprobs, np.float32)[packed.positions])


def _key(mb: MicroBatch) -> Key:
    return mb.update, mb.part, mb.index


def _name(mb: MicroBatch) -> str:
    return f"update {mb.update}, part {mb.part}, micro-batch {mb.index}"


def _numerical_fault(step: _OpenUpdate, grad_norm: float) -> NumericalFault:
    what = (
        f"the gradient's norm is {grad_norm}"
        if step.first_fault is None
        else f"the loss of micro-batch {step.first_fault[2]} (part {step.first_fault[1]}) is not finite"
    )
    return NumericalFault(
        what, where=f"update {step.update}", hint="the optimizer step was not applied; lower train.lr"
    )
