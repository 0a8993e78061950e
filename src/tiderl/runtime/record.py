"""The growing token record of one task, and the context that a turn is asked with.

Keeps I8: ids are only appended, those sampled and those rendered from what is new. Under a window of images the context
is the record without what left it; each time something leaves, the record forks. Knows no engine and no environment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiderl.data.errors import InvariantViolation
from tiderl.data.forks import Fork, Span, joined_spans, remaining
from tiderl.data.turns import TurnResult
from tiderl.data.window import ImageWindow, WindowedContext


class TokenRecord:
    """Parts are joined only when needed. `window`: None keeps all images in the context."""

    def __init__(self, window: ImageWindow | None = None) -> None:
        self._ids: list[np.ndarray] = []
        self._sampled: list[tuple[int, TurnResult]] = []  # where each begins
        self._context = WindowedContext(window)

    @property
    def length(self) -> int:
        """Tokens of the record."""
        return self._context.record_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens of the context, at most `length`."""
        return self._context.tokens

    @property
    def forks(self) -> tuple[Fork, ...]:
        return tuple(self._context.forks)

    @property
    def rewrites(self) -> tuple[int, ...]:
        """As `Turn.rewrites`."""
        return self._context.rewrites

    def context_tokens_with(self, ids: np.ndarray, images: Sequence[Span] = ()) -> int:
        """Tokens of the context after `append_context` of the same."""
        return self._context.tokens_with(len(ids), len(images))

    def append_context(self, ids: np.ndarray, images: Sequence[Span] = ()) -> None:
        """What nobody sampled; `images`: where in `ids`. Those for which the window then has no place leave first."""
        self._ids.append(ids)
        self._context.observe(len(ids), images)

    def append_sampled(self, result: TurnResult) -> None:
        """Raises `InvariantViolation` for a result without a log-prob and a version for each id."""
        count = len(result.ids)
        if len(result.logprobs) != count or len(result.versions) != count:
            raise InvariantViolation(
                f"engine answered {count} ids, {len(result.logprobs)} log-probs, {len(result.versions)} versions",
                where=f"task {result.task}",
            )
        self._ids.append(result.ids)
        self._sampled.append((self.length, result))
        self._context.say(count)

    def joined(self) -> np.ndarray:
        """int32 [length]; joins the parts collected so far into one."""
        if len(self._ids) > 1:
            self._ids = [np.concatenate(self._ids)]
        return self._ids[0]

    def context(self) -> np.ndarray:
        """int32 [context_tokens]."""
        left = [span for fork in self._context.forks for span in fork.left]
        return joined_spans(self.joined(), remaining(left, self.length)) if left else self.joined()

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Loss mask bool, log-probs float32, versions int32, each [length]: of context False, 0 and -1."""
        loss_mask, logprobs = np.zeros(self.length, np.bool_), np.zeros(self.length, np.float32)
        versions = np.full(self.length, -1, np.int32)
        for start, result in self._sampled:
            of_turn = slice(start, start + len(result.ids))
            loss_mask[of_turn], logprobs[of_turn], versions[of_turn] = True, result.logprobs, result.versions
        return loss_mask, logprobs, versions
