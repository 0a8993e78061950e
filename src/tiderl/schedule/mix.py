"""Whose turn it is among several environments that are mixed by weight.

Not drawn but dealt: after every n turns each has had its share of n, to within one of two environments and two of five,
so that a batch holds the mixture that was asked for. Knows weights only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def weighted_order(weights: Sequence[float]) -> Iterator[int]:
    """Indices without end, each in proportion to its weight (smooth weighted round robin): every turn all gain their
    weight, the richest is chosen (the first of equals) and pays the sum of the weights. Weights are positive."""
    credit = [0.0] * len(weights)
    total = sum(weights)
    while True:
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        chosen = credit.index(max(credit))
        credit[chosen] -= total
        yield chosen
