"""Named random streams: one per component and identity, so that a draw in one place shifts no other.

A stream is a function of the run's seed and a path of names only (I10), the same in every process
and Python version: SHA-256 of the path seeds numpy's Philox counter generator.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream_seed(seed: int, *path: str | int) -> int:
    """A 64-bit seed for the named stream; equal arguments give equal seeds everywhere."""
    digest = hashlib.sha256(repr((int(seed), *path)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def stream(seed: int, *path: str | int) -> np.random.Generator:
    """The generator of the named stream."""
    return np.random.Generator(np.random.Philox(key=stream_seed(seed, *path)))
