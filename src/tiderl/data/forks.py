"""Where a context was rewritten: which tokens left it, and the branches that the trainer sees instead of one sequence.

Keeps I8: the record of a task holds every token once and only grows; what left the context is said by forks, so that
each branch is the context as the policy saw it, and each sampled token bears loss in exactly one branch. Positions are
those of the record. Knows no images and no windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

Span = tuple[int, int]
"""From the first position up to, not including, the second."""


class Fork(msgspec.Struct, frozen=True):
    """From position `at` on, where an observation begins, the tokens of `left` were no longer in the context. They come
    before `at`, in order, and behind those that left at earlier forks."""

    at: int
    left: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """The record's tokens of `spans`, one after the other, at least one. Those from position `since` on bear loss."""

    spans: tuple[Span, ...]
    since: int

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    @property
    def context_tokens(self) -> int:
        """Of its tokens, how many come before `since`."""
        return sum(min(end, self.since) - start for start, end in self.spans if start < self.since)

    def of(self, column: np.ndarray) -> np.ndarray:
        """The branch's part of one of the record's columns: [record] -> [tokens]."""
        return joined_spans(column, self.spans)


def branches(forks: Sequence[Fork], tokens: int) -> Iterator[Branch]:
    """The branches of a record of `tokens` tokens, in order: one, and one more for each fork.

    A branch ends where the next fork is: what comes after the last token that it bears loss for predicts nothing in it.
    """
    since, left = 0, list[Span]()
    for fork in forks:
        yield Branch(remaining(left, fork.at), since)
        since = fork.at
        left += fork.left
    yield Branch(remaining(left, tokens), since)


def remaining(left: Iterable[Span], end: int) -> tuple[Span, ...]:
    """What is not in `left`, which is in order, of the positions up to `end`."""
    found, start = [], 0
    for gone, until in left:
        if gone > start:
            found.append((start, gone))
        start = until
    if end > start:
        found.append((start, end))
    return tuple(found)


def joined_spans(column: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """The parts of a column, one after the other; without a copy where it is one."""
    if len(spans) == 1:
        start, end = spans[0]
        return column[start:end]
    return np.concatenate([column[start:end] for start, end in spans])
