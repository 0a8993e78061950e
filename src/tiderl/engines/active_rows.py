"""Who sits in which row of the slot cache, and how rows are filled, put in order and emptied.

Rows [0, decoding) need one token a step; behind them, in order of admission, are those with context to prefill: only
the first of these can be partly computed. A row with nothing computed changes its place for free. Knows no budgets.
"""

from __future__ import annotations

from tiderl.engines.admission import SENIORITY
from tiderl.engines.live_turn import LiveTurn
from tiderl.engines.residency import HeldKv
from tiderl.engines.reuse import Reuse, Sources
from tiderl.engines.slot_cache import SlotCache


class ActiveRows:
    """`lives[row]` is the turn of a row; `cached_tokens` counts positions that were copied instead of computed."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.lives: list[LiveTurn] = []
        self.decoding = 0
        self.cached_tokens = 0

    def append(self, lives: list[LiveTurn]) -> None:
        """New rows behind the others, and room for what every turn has reserved by now."""
        self.lives += lives
        if self.lives:
            self.cache.ensure(len(self.lives), max(live.reserved_tokens for live in self.lives))

    def fill(self, limit_tokens: int, sources: Sources) -> list[int]:
        """Choose the rows that prefill now, put them first behind the decoding ones, fill them with what they reuse.

        Returns how many tokens each computes, padded at most `limit_tokens` in all; only the first can be a chunk. A
        row that waits for a sibling, or finds no room, holds nothing yet.
        """
        widths: list[int] = []
        chosen: list[LiveTurn] = []
        later: list[LiveTurn] = []
        widest = 0
        waiting = self.lives[self.decoding :]
        for at, live in enumerate(waiting):
            reuse = Reuse(live.filled) if live.filled else sources.best(live)
            if not live.filled and sources.is_worth_waiting(live, reuse):
                later.append(live)
                continue
            pending = live.length - reuse.tokens
            widest = max(widest, pending)
            if chosen and (len(chosen) + 1) * widest > limit_tokens:
                later += waiting[at:]
                break
            row = self.decoding + len(chosen)
            if not live.filled:
                self._activate(live, row, reuse)
            sources.add_row(row, live, prefills=True)
            chosen.append(live)
            widths.append(min(pending, limit_tokens))
        self.lives[self.decoding :] = chosen + later
        return widths

    def _activate(self, live: LiveTurn, row: int, reuse: Reuse) -> None:
        if reuse.kv is not None:
            self.cache.copy_in(row, reuse.kv, reuse.tokens)
        elif reuse.tokens:
            self.cache.move(reuse.row, row, reuse.tokens)
        live.activated(reuse.tokens)
        self.cached_tokens += reuse.tokens

    def advanced(self, prefilled_rows: int) -> list[LiveTurn]:
        """After the forwards: the turns that were computed, decoding ones first. Those without pending context decode
        from now on: all but a chunked one, which is the last."""
        computed = self.lives[: self.decoding + prefilled_rows]
        self.decoding = sum(live.pending == 0 for live in computed)
        return computed

    def computed_kv(self, row: int, version: int) -> HeldKv:
        """A copy of all that a row has computed."""
        live = self.lives[row]
        return HeldKv(live.ids[: live.filled].copy(), version, self.cache.copy_out(row, live.filled))

    def shortened(self, entry: HeldKv, tokens: int) -> HeldKv:
        """The first `tokens` positions of an entry, without the memory of the rest."""
        if tokens == entry.tokens:
            return entry
        return HeldKv(entry.ids[:tokens].copy(), entry.version, self.cache.shorten(entry.kv, tokens))

    def numbers(self, lives: list[LiveTurn]) -> set[int]:
        """The rows of these turns; those without a row are left out."""
        wanted = set(map(id, lives))
        return {row for row, live in enumerate(self.lives) if id(live) in wanted}

    def vacate(self, gone: set[int]) -> None:
        """Take these rows out and close the gaps."""
        staying = [row for row in range(self.decoding) if row not in gone]
        order = staying_in_place(staying) + [
            row for row in range(self.decoding, len(self.lives)) if row not in gone
        ]  # prefilling rows keep their order, so that a chunked one stays first
        for target, source in enumerate(order):
            if source != target:
                self.cache.move(source, target, self.lives[source].filled)
        self.lives = [self.lives[source] for source in order]
        self.decoding = len(staying)

    def rewind(self) -> None:
        """All context is to be computed again, under other weights; the senior ones first."""
        for live in self.lives:
            live.forget_kv()
        self.lives.sort(key=SENIORITY)
        self.decoding = 0


def staying_in_place(rows: list[int]) -> list[int]:
    """Order `rows` (ascending) so that every row below their count keeps its place and the others fill the gaps.

    >>> staying_in_place([0, 2, 4, 5])
    [0, 5, 2, 4]
    """
    count = len(rows)
    inside = {row for row in rows if row < count}
    outside = [row for row in rows if row >= count]
    return [row if row in inside else outside.pop() for row in range(count)]
