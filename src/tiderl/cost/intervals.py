"""What a replica did between any two moments at which its batch changed, from when its turns came, began and ended.

Within such an interval every iteration is alike: the same sequences decode. How many iterations it had follows from the
turns that have as many tokens as intervals, else from the fitted seconds of one iteration. Intervals that something
else disturbed (a load of weights, the trainer on the same rank) are left out. Knows turns, fits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.cost.recorded import TurnFact

TICK_S = 1e-7
"""Moments closer than this are one: a turn's times are differences of floats."""


@dataclass
class Intervals:
    """Of one replica, arrays [n]. `seconds` without the idle ones; counts are those of a whole interval."""

    seconds: np.ndarray  # float64
    decoding: np.ndarray  # int64: sequences that decode through all of it
    first_tokens: np.ndarray  # int64: sequences whose context is complete with its last iteration
    prefill_tokens: np.ndarray  # float64
    context_at_start: np.ndarray  # float64: positions attended in the first iteration, if no iteration had run before
    undisturbed: np.ndarray  # bool
    iterations: np.ndarray  # int64: what is believed so far
    pinned: np.ndarray  # bool: it is certain
    _first: np.ndarray  # for each decoding turn: the first interval that it decodes in
    _behind: np.ndarray  # and one more than the last

    def features(self) -> np.ndarray:
        """float64 [n, 4]: iterations, sequences, positions attended and tokens prefilled, summed over an interval."""
        n = self.iterations.astype(np.float64)
        done = np.concatenate([[0.0], np.cumsum(n)])
        # A turn attends to one position more with each of its iterations.
        started = _summed(self._first, self._behind, done[self._first], len(n))
        context = self.context_at_start + self.decoding * done[:-1] - started
        attended = n * context + self.decoding * n * (n - 1) / 2
        return np.column_stack([n, n * self.decoding + self.first_tokens, attended, self.prefill_tokens])

    def guess(self, constants: np.ndarray) -> bool:
        """Count iterations anew where they are not certain, from the seconds of `features`; whether a count changed."""
        found = self.features()
        each_s = (
            found[:, 0] * constants[0] + self.decoding * found[:, 0] * constants[1] + found[:, 2] * constants[2]
        ) / (self.iterations)
        once_s = self.first_tokens * constants[1] + self.prefill_tokens * constants[3]
        return self._count(each_s, once_s)

    def _count(self, each_s: np.ndarray, once_s: np.ndarray | float = 0.0) -> bool:
        """`each_s`: of one iteration; `once_s`: of the last one beyond that."""
        counted = np.maximum(1, np.rint((self.seconds - once_s) / np.maximum(each_s, TICK_S))).astype(np.int64)
        counted = np.where(self.pinned, 1, counted)
        changed = bool((counted != self.iterations).any())
        self.iterations = counted
        return changed


def intervals_of(turns: Sequence[TurnFact], disturbed_s: Sequence[tuple[float, float]]) -> Intervals | None:
    """The busy intervals of one replica's turns; None without any. `disturbed_s`: from when to when, on its clock."""
    turns = [turn for turn in turns if turn.new_tokens > 0 and not turn.aborted]
    if not turns:
        return None
    admitted, first, ended = (
        np.rint(np.array([getattr(turn, name) for turn in turns]) / TICK_S).astype(np.int64)
        for name in ("admitted_s", "first_token_s", "ended_s")
    )
    admitted = _at_boundaries(admitted, first, ended)
    moments = np.unique(np.concatenate([admitted, first, ended]))
    count = len(moments) - 1
    if count < 1:
        return None
    at, ft, et = (np.searchsorted(moments, these) for these in (admitted, first, ended))
    tokens = np.array([turn.new_tokens for turn in turns])
    context = np.array([turn.context_tokens for turn in turns], dtype=np.float64)
    seconds = np.diff(moments) * TICK_S
    one = np.ones(len(turns))
    decoding = np.rint(_summed(ft, et, one, count)).astype(np.int64)
    busy = (decoding > 0) | (_summed(at, ft, one, count) > 0.5)
    pinned = _summed(ft, et, (et - ft == tokens - 1).astype(np.float64), count) > 0.5
    pinned |= decoding == 0  # the engine was idle before
    shift = np.concatenate([[0], np.cumsum(busy)])  # without the idle intervals
    found = Intervals(
        seconds=seconds[busy],
        decoding=decoding[busy],
        first_tokens=np.bincount(ft[ft > at] - 1, minlength=count)[busy],
        prefill_tokens=_prefilled(turns, at, ft, seconds)[busy],
        context_at_start=_summed(ft, et, context + 1, count)[busy],
        undisturbed=~_disturbed(turns, disturbed_s, at, et, count)[busy],
        iterations=np.ones(int(busy.sum()), dtype=np.int64),
        pinned=pinned[busy],
        _first=shift[ft[et > ft]],
        _behind=shift[et[et > ft]],
    )
    # About how long an iteration is: what the quickest of the turns that decode there takes for a token.
    token_s = (ended - first) * TICK_S / np.maximum(1, tokens - 1)
    quickest_s = np.full(count, np.inf)
    for begin, end, each_s in zip(ft, et, token_s, strict=True):
        np.minimum(quickest_s[begin:end], each_s, out=quickest_s[begin:end])
    found._count(quickest_s[busy])
    return found


def _at_boundaries(admitted: np.ndarray, first: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """When each turn's first iteration began, int64 [n]: an engine admits a moment after the end of the one before it.
    Where it was idle, the first admission is the beginning."""
    order = np.argsort(admitted, kind="stable")
    ends = np.unique(np.concatenate([first, ended]))
    before = np.searchsorted(ends, admitted, "right") - 1
    # Decoding goes on at the last end before the admission: more turns had begun to decode than had ended.
    at = ends[np.maximum(before, 0)]
    decoding = np.searchsorted(np.sort(first), at, "right") - np.searchsorted(np.sort(ended), at, "right")
    found = admitted.copy()
    opened: dict[int, int] = {}  # index of the end before -> when an idle engine began
    busy_until = -1
    for turn in order:
        place = int(before[turn])
        if place in opened or place < 0 or not (decoding[turn] > 0 or busy_until > at[turn]):
            found[turn] = opened.setdefault(place, int(admitted[turn]))
        else:
            found[turn] = at[turn]
        busy_until = max(busy_until, int(first[turn]))
    return found


def _summed(first: np.ndarray, behind: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """For each of `count` intervals the sum of the values whose range [first, behind) it is in."""
    edges = np.zeros(count + 1)
    np.add.at(edges, first, values)
    np.add.at(edges, behind, -values)
    return np.cumsum(edges)[:-1]


def _prefilled(turns: Sequence[TurnFact], at: np.ndarray, ft: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Tokens prefilled in each interval. Contexts are computed in order of admission, so a turn's is between the last
    first token of others and its own; in proportion to time where that took several intervals."""
    found = np.zeros(len(seconds))
    completions = np.unique(ft)
    for turn, admitted, end in zip(turns, at, ft, strict=True):
        before = int(np.searchsorted(completions, end))
        begin = max(admitted, completions[before - 1] if before else 0)
        if end == begin + 1:
            found[begin] += turn.prefill_tokens
        elif end > begin:
            share = seconds[begin:end] / seconds[begin:end].sum()
            found[begin:end] += turn.prefill_tokens * share
    return found


def _disturbed(
    turns: Sequence[TurnFact],
    windows: Sequence[tuple[float, float]],
    at: np.ndarray,
    et: np.ndarray,
    count: int,
) -> np.ndarray:
    """Intervals of turns that were running when something else was on the replica: all of such a turn's."""
    begins = np.array(sorted(window[0] for window in windows))
    ends = np.array(sorted(window[1] for window in windows))
    started = np.array([turn.admitted_s for turn in turns])
    ended = np.array([turn.ended_s for turn in turns])
    # Windows of one replica do not overlap: more have begun before its end than have ended before its start.
    touched = np.searchsorted(begins, ended) > np.searchsorted(ends, started)
    return _summed(at, et, touched.astype(np.float64), count) > 0.5
