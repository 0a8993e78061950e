"""Tokens per second of the trainer on batches that the quick start really trained on: what padding costs, and sharing.

    python bench/trainer.py [--model tiny|small] [--rounds 10] [--json]
    python bench/trainer.py --short          checks that all layouts give the same gradient; measures nothing

`data/quickstart_batches.json` holds five updates of one run: 64 sequences each, by group. Three layouts take turns:

  padded   one right-padded [n, longest] call per micro-batch, sequences as they come, padding within the token budget
  sorted   sequences of like length together, in chunks of little padding
  rows     all in one row without padding, beginnings that sequences share computed once

A round computes one update each: reference log-probs, forward, backward. Each layout runs with the micro-batches that
suit it. Tokens are the sequences' real ones, so all layouts have the same number; seconds are CPU seconds of the one
thread, which are those of the clock on a quiet machine. `recorded` are the batches as they were; in `unshared` every
sequence has the same length and other ids, so that no two begin alike: what is left is the padding.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import ModelSettings
from tiderl.schedule.pipeline import shape_micro_batches
from tiderl.trainers.model import build_model
from tiderl.trainers.packing import Layout, Packed, pack
from tiderl.trainers.padding import padded_chunks
from tiderl.trainers.rows import shared_rows
from tiderl.trainers.scoring import score

DATA = Path(__file__).parent / "data" / "quickstart_batches.json"
BUDGET_TOKENS = 4096  # the quick start's micro_batch_tokens
PAD_ID = 0
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},  # the quick start's model, 0.8 million weights
    "small": {"layers": 6, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab_size": 4096},  # 5.8 million
}
GRADIENT_TOLERANCE = 1e-5  # of the largest element of a parameter's gradient; float32 rounding is near 1e-6
TARGET_RATIO = 1.3

Batch = list[TrainSequence]
Cuts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Alternative:
    """How a batch is cut into micro-batches, and a micro-batch laid out."""

    shape: Callable[[Sequence[int], int], Cuts]
    layout: Layout

    def packed(self, batch: Batch) -> list[Packed]:
        cuts = self.shape([sequence.tokens for sequence in batch], BUDGET_TOKENS)
        return [pack([batch[i] for i in cut], self.layout) for cut in cuts]


def as_they_come(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Micro-batches of at most `budget_tokens`, padding included, in the order given."""
    cuts: list[list[int]] = []
    for i, length in enumerate(lengths):
        if not cuts or (len(cuts[-1]) + 1) * max(length, *(lengths[j] for j in cuts[-1])) > budget_tokens:
            cuts.append([])
        cuts[-1].append(i)
    return cuts


def longest_first(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """As above, sorted by length."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [[order[i] for i in cut] for cut in as_they_come([lengths[i] for i in order], budget_tokens)]


ALTERNATIVES = {
    "padded": Alternative(
        as_they_come,
        partial(padded_chunks, pad_id=PAD_ID, max_chunk_tokens=BUDGET_TOKENS, shortest_fraction=0.0),
    ),
    "sorted": Alternative(longest_first, partial(padded_chunks, pad_id=PAD_ID, max_chunk_tokens=BUDGET_TOKENS)),
    "rows": Alternative(shape_micro_batches, partial(shared_rows, max_row_tokens=BUDGET_TOKENS)),
}


def recorded() -> tuple[list[Batch], int]:
    """The recorded batches, and how many ids their vocabulary has."""
    data = json.loads(DATA.read_text())
    batches = []
    for update in data["batches"]:
        ids: list[int] = []
        batch = []
        for number, (prompt_id, member, shared, others, spans) in enumerate(update["sequences"]):
            ids = [*ids[:shared], *others]
            batch.append(sequence(number, prompt_id, member, ids, spans))
        batches.append(batch)
    return batches, data["vocab_size"]


def sequence(number: int, prompt_id: int, member: int, ids: list[int], spans: list[list[int]]) -> TrainSequence:
    """The rewards, log-probs and versions are not read here."""
    mask = np.zeros(len(ids), bool)
    for start, end in spans:
        mask[start:end] = True
    nothing = np.zeros(len(ids), np.float32)
    rewards = np.zeros(8)
    return TrainSequence(
        number, prompt_id, member, np.array(ids, np.int32), mask, nothing, nothing.astype(np.int32), 0.0, rewards
    )


def unshared(batch: Batch, vocab_size: int) -> Batch:
    """Other ids in the same places: a sequence's first ones are its number, the rest are drawn."""
    draws = np.random.default_rng(0)
    others = []
    for number, old in enumerate(batch):
        ids = draws.integers(1, vocab_size, size=old.tokens).astype(np.int32)
        ids[:2] = divmod(number, vocab_size)
        others.append(sequence(number, old.prompt_id, old.member, ids.tolist(), _spans(old.loss_mask)))
    return others


def _spans(mask: np.ndarray) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return edges.reshape(-1, 2).tolist()


def compute(model: Any, reference: Any, calls: Sequence[Packed]) -> float:
    """One update without its optimizer step: the summed loss; the gradients are in the model."""
    total = 0.0
    for packed in calls:
        with torch.no_grad():
            reference_logprobs, _ = score(reference, packed, 1.0, torch.float32)
        logprobs, _ = score(model, packed, 1.0, torch.float32)
        loss = (0.01 * (logprobs - reference_logprobs) ** 2 - logprobs).sum()
        loss.backward()
        total += float(loss.detach())
    return total


def models(size: str, vocab_size: int) -> tuple[Any, Any]:
    """The policy, and a reference that differs from it."""
    sizes = {"vocab_size": vocab_size} | SIZES[size]
    settings = ModelSettings(path="scratch", max_context_tokens=512, pad_id=PAD_ID, stop_ids=(1,), **sizes)
    return build_model(settings, 0), build_model(settings, 1).requires_grad_(False)


def largest_difference(model: Any, reference: Any, batch: Batch) -> float:
    """Between the gradients of the layouts, relative to the largest element of each parameter's."""
    gradients, losses = [], []
    for alternative in ALTERNATIVES.values():
        model.zero_grad()
        losses.append(compute(model, reference, alternative.packed(batch)))
        gradients.append({name: copy.deepcopy(p.grad) for name, p in model.named_parameters()})
    first, *others = gradients
    differences = [abs(loss / losses[0] - 1) for loss in losses]
    for other in others:
        differences += [float((other[n] - g).abs().max() / g.abs().max()) for n, g in first.items()]
    model.zero_grad()
    return max(differences)


def rates(model: Any, reference: Any, batches: Sequence[Batch], rounds: int) -> dict[str, Any]:
    """Per layout the median tokens per second, what it computed, and the ratio to `padded` (median over the rounds)."""
    tokens_per_s: dict[str, list[float]] = {name: [] for name in ALTERNATIVES}
    computed = dict.fromkeys(ALTERNATIVES, 0)
    for turn in range(rounds + 1):
        batch = batches[turn % len(batches)]
        for name, alternative in ALTERNATIVES.items():
            model.zero_grad()
            started = time.process_time()
            calls = alternative.packed(batch)
            compute(model, reference, calls)
            seconds = time.process_time() - started
            if turn:  # the first round is warm-up
                tokens_per_s[name].append(sum(s.tokens for s in batch) / seconds)
                computed[name] += sum(packed.computed_tokens for packed in calls)
    baseline = tokens_per_s["padded"]
    return {
        name: {
            "tokens_per_s": round(statistics.median(found)),
            "ratio": round(statistics.median(f / b for f, b in zip(found, baseline, strict=True)), 2),
            "ratio_range": [round(f(a / b for a, b in zip(found, baseline, strict=True)), 2) for f in (min, max)],
            "computed_tokens_per_round": computed[name] // rounds,
        }
        for name, found in tokens_per_s.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--short", action="store_true", help="only check that the layouts agree")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    batches, vocab_size = recorded()
    workloads = {"recorded": batches, "unshared": [unshared(batch, vocab_size) for batch in batches]}
    model, reference = models(options.model, vocab_size)
    differences = {name: largest_difference(model, reference, found[0]) for name, found in workloads.items()}
    agree = max(differences.values()) < GRADIENT_TOLERANCE
    result: dict[str, Any] = {"model": options.model, "gradients_agree": agree, "largest_difference": differences}
    if agree and not options.short:
        result["parameters"] = sum(p.numel() for p in model.parameters())
        result["rounds"] = options.rounds
        result |= {name: rates(model, reference, found, options.rounds) for name, found in workloads.items()}
        result["within_target"] = result["recorded"]["rows"]["ratio"] >= TARGET_RATIO
    print(json.dumps(result) if options.json else _as_lines(result))
    return 0 if agree else 1


def _as_lines(result: dict[str, Any]) -> str:
    lines = [f"gradients agree: {result['gradients_agree']} ({result['largest_difference']})"]
    for workload in ("recorded", "unshared"):
        for name, found in result.get(workload, {}).items():
            low, high = found["ratio_range"]
            lines.append(
                f"{workload:9} {name:7} {found['tokens_per_s']:7} tokens/s  {found['ratio']:5} x padded "
                f"({low} to {high}), {found['computed_tokens_per_round']} tokens computed"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
