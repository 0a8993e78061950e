"""Stateless draws: a number is a hash of who asks for what, so that the order of asking changes nothing (I10).

Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014) over a 64-bit combination of seed, purpose and
identity: about a microsecond a draw, where a named numpy stream costs some twenty. Knows no workload.
"""

from __future__ import annotations

from statistics import NormalDist

from tiderl.data.rng import stream_seed

_MASK = (1 << 64) - 1
# Odd 64-bit constants without structure: the fractional digits of pi, one per part of an identity.
_GROUP, _MEMBER, _TURN = 0x243F6A8885A308D3, 0x13198A2E03707345, 0xA4093822299F31D1
_UNIT = 2.0**-53
_STANDARD_NORMAL = NormalDist()


class Draws:
    """The draws of one purpose under one seed."""

    __slots__ = ("_base",)

    def __init__(self, seed: int, *purpose: str) -> None:
        self._base = stream_seed(seed, *purpose)

    def uniform(self, group: int, member: int = 0, turn: int = 0) -> float:
        """In the open interval (0, 1)."""
        x = (self._base + group * _GROUP + member * _MEMBER + turn * _TURN) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= (x >> 31) ^ self._base
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return (((x ^ (x >> 31)) >> 11) + 0.5) * _UNIT

    def normal(self, group: int, member: int = 0, turn: int = 0) -> float:
        """Standard normal."""
        return _STANDARD_NORMAL.inv_cdf(self.uniform(group, member, turn))


def normal_cdf(z: float) -> float:
    """The probability that a standard normal is at most `z`."""
    return _STANDARD_NORMAL.cdf(z)
