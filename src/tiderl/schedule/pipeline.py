"""Shaping a batch into micro-batches. The whole update is planned before its first micro-batch is computed."""

from __future__ import annotations

from collections.abc import Sequence


def shape_micro_batches(lengths: Sequence[int], budget_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Packs sequence indices into micro-batches of at most `budget_tokens` tokens, a longer sequence alone.

    In the order given (next fit): sequences come group by group, and the members of a group begin alike, which a
    trainer computes once where they are together. The last micro-batch is what is left over, at most as heavy as the
    others, and so the flush at the end of the step is short.
    """
    batches: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if not batches or length > room:
            batches.append([])
            room = budget_tokens
        batches[-1].append(i)
        room -= length
    return tuple(tuple(batch) for batch in batches)


def split_parts(groups: int, steps_per_batch: int) -> tuple[range, ...]:
    """Which groups, in consumption order, belong to which optimizer step of the update; `groups` divides evenly."""
    size = groups // steps_per_batch
    return tuple(range(start, start + size) for start in range(0, size * steps_per_batch, size))
