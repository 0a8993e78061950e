"""Shaping a batch into micro-batches. The whole update is planned before its first micro-batch is computed."""

from __future__ import annotations

from collections.abc import Sequence


def shape_micro_batches(lengths: Sequence[int], budget_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Packs sequence indices into micro-batches of at most `budget_tokens` tokens, a longer sequence alone.

    Sequences are taken longest first into the open micro-batch (next fit), so that each holds sequences of like length
    and padding stays small; the last micro-batch is the lightest and so the flush at the end of the step is short.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    room = 0
    for i in order:
        # Padded size, not the sum: the longest of a micro-batch is its first.
        if not batches or room < lengths[batches[-1][0]]:
            batches.append([])
            room = budget_tokens
        batches[-1].append(i)
        room -= lengths[batches[-1][0]]
    return tuple(tuple(batch) for batch in batches)


def split_parts(groups: int, steps_per_batch: int) -> tuple[range, ...]:
    """Which groups, in consumption order, belong to which optimizer step of the update; `groups` divides evenly."""
    size = groups // steps_per_batch
    return tuple(range(start, start + size) for start in range(0, size * steps_per_batch, size))
