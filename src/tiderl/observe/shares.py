"""Sharing time among intervals that overlap: each of n open ones gets 1/n of a moment.

So the shares add up to the time in which any is open. Pure numpy; knows numbers, not what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Floats = np.ndarray  # float64 [n]


class Shares:
    """Intervals [starts, ends) within `span`, none of which gets anything within `masked`."""

    def __init__(
        self,
        starts: Floats,
        ends: Floats,
        masked: Sequence[tuple[float, float]],
        span: tuple[float, float],
        *,
        also: Floats | None = None,
    ) -> None:
        """`also`: further moments for which `of` may be asked."""
        holes = np.array(masked, dtype=np.float64).reshape(-1, 2)
        further = np.zeros(0) if also is None else also
        self.edges = np.unique(np.concatenate([starts, ends, further, holes.ravel(), span]))
        """Every moment at which something begins or ends, ascending."""
        opened = _until(starts, self.edges[:-1]) - _until(ends, self.edges[:-1])
        hidden = _until(holes[:, 0], self.edges[:-1]) - _until(holes[:, 1], self.edges[:-1])
        self._count = np.where(hidden > 0, 0, opened)
        share = np.divide(1.0, self._count, out=np.zeros(len(self._count)), where=self._count > 0)
        self._sums = np.concatenate([[0.0], np.cumsum(share * np.diff(self.edges))])

    def of(self, starts: Floats, ends: Floats) -> Floats:
        """The share of somebody who is open in each [start, end); both must be among `edges`."""
        shares: Floats = self._sums[np.searchsorted(self.edges, ends)] - self._sums[np.searchsorted(self.edges, starts)]
        return shares

    def count_at(self, moments: Floats) -> Floats:
        """Intervals open at these moments within the span, 0 within what is masked."""
        at: Floats = self._count[np.searchsorted(self.edges, moments, side="right") - 1]
        return at


def _until(moments: Floats, edges: Floats) -> Floats:
    """How many of `moments` are at or before each edge."""
    counts: Floats = np.searchsorted(np.sort(moments), edges, side="right")
    return counts


def intervals(changes: Sequence[tuple[float, str]], since_s: float, until_s: float) -> list[tuple[float, float, str]]:
    """(start, end, name) within [since, until], in order, from changes of state; nothing before the first one."""
    ends = [at for at, _ in changes[1:]] + [until_s]
    clipped = (
        [(max(since_s, start), min(until_s, end), name) for (start, name), end in zip(changes, ends, strict=True)]
        if changes
        else []
    )
    return [(start, end, name) for start, end, name in clipped if end > start]
