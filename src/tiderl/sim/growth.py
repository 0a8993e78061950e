"""How many KV blocks a decoding batch takes, in closed form: each sequence a new one every `block_tokens` iterations.

A sequence with kv positions after n iterations has the phase (kv - n) modulo the block size, which stays while it
decodes; it needs a new block in iteration n + 1 when (n + phase) is a multiple of that size. Knows no pool.
"""

from __future__ import annotations


class Growth:
    """Counts of sequences by phase."""

    def __init__(self, block_tokens: int) -> None:
        self._counts = [0] * block_tokens
        self._sequences = 0

    def add(self, kv_tokens: int, iterations: int) -> int:
        """A sequence with so many positions decodes from now on; returns its phase, for `remove`."""
        phase = (kv_tokens - iterations) % len(self._counts)
        self._counts[phase] += 1
        self._sequences += 1
        return phase

    def remove(self, phase: int) -> None:
        self._counts[phase] -= 1
        self._sequences -= 1

    def next(self, iterations: int) -> int:
        """Blocks that iteration number `iterations + 1` takes."""
        return self._counts[-iterations % len(self._counts)]

    def between(self, iterations: int, until: int) -> int:
        """Blocks that the iterations after number `iterations` take, up to number `until`."""
        rounds, rest = divmod(until - iterations, len(self._counts))
        return rounds * self._sequences + sum(self.next(iterations + i) for i in range(rest))

    def fits(self, iterations: int, free: int, limit: int) -> int:
        """The most iterations, at most `limit`, that take no more than `free` blocks."""
        size = len(self._counts)
        if self._sequences * (limit // size + 1) <= free:
            return limit
        count = free // self._sequences * size
        free %= self._sequences
        while count < limit:
            free -= self.next(iterations + count)
            if free < 0:
                break
            count += 1
        return min(count, limit)
