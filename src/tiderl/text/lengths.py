"""The `lengths` renderer of virtual time: ids that take no memory, because only their number matters.

Every array has stride zero over one zero, so a simulated trajectory of 100,000 tokens costs a few bytes. Must
not know what the tokens would have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tiderl.data.errors import ConfigurationError
from tiderl.data.forks import Span
from tiderl.data.records import Action, Observation, TokenCount

# Longer than any context; a slice of it is a view without memory, at a tenth of the cost of another broadcast.
_LONGEST = 1 << 24
_BLANK = np.broadcast_to(np.int32(0), (_LONGEST,))


def blank_ids(tokens: int) -> np.ndarray:
    """int32 [tokens], read-only, stride 0. At most 16.8 million."""
    return _BLANK[:tokens]


class LengthsRenderer:
    """One token, the pad, the stop and all: nothing is said and nothing is malformed."""

    stop_ids: tuple[int, ...] = (0,)
    pad_id = 0
    vocab_size = 1

    def begin(self, observation: Observation, tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """int32 [n]: as many as the observation's `TokenCount` parts count. Tools cost nothing."""
        return self.extend(observation)

    def extend(self, observation: Observation, said: np.ndarray | None = None) -> np.ndarray:
        tokens = 0
        for part in observation.parts:
            if not isinstance(part, TokenCount):
                raise ConfigurationError(
                    f"virtual time takes lengths, not a part of type {type(part).__name__}", where="sim"
                )
            tokens += part.tokens
        return blank_ids(tokens)

    def images(self, observation: Observation) -> tuple[Span, ...]:
        found, start = [], 0
        for part in observation.parts:
            if isinstance(part, TokenCount):
                if part.image:
                    found.append((start, start + part.tokens))
                start += part.tokens
        return tuple(found)

    def action_ids(self, text: str) -> np.ndarray:
        """int32 [n]: one a word, and the stop."""
        return blank_ids(len(text.split()) + 1)

    def parse(self, ids: np.ndarray) -> Action:
        return Action("")
