"""The window of images: how many stay in a task's context, and what a context becomes as it grows under one.

Lengths only: the runtime keeps its token record by this, and virtual time plans by it. When an image comes and no place
is left, the oldest ones leave; their turns' texts and all actions stay. All that stood behind the first of them has
another place then, so the context begins like the one before only up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tiderl.data.forks import Fork, Span


class ImageWindow(msgspec.Struct, frozen=True):
    """At most `images` in a context; `drop`, at most as many, leave at once when another one comes."""

    images: int
    drop: int = 1

    def leaving(self, kept: int, coming: int) -> int:
        """How many of `kept` images leave, the oldest first, before an observation with `coming` ones is appended.

        A whole number of times `drop`, or all. An observation is never cut: one with more than `images` stays whole.
        """
        over = kept + coming - self.images
        return min(kept, -(-over // self.drop) * self.drop) if over > 0 else 0


@dataclass
class WindowedContext:
    """A task's context as it grows. Without a window it is the whole record, and nothing ever leaves."""

    window: ImageWindow | None = None
    record_tokens: int = 0
    """All that was ever appended."""
    forks: list[Fork] = field(default_factory=list)
    rewrites: tuple[int, ...] = ()
    """Of each fork: with how many tokens the context went on to begin as before (`Turn.rewrites`)."""
    _images: list[Span] = field(default_factory=list)  # in the context, oldest first
    _left_tokens: int = 0

    @property
    def tokens(self) -> int:
        """In the context now."""
        return self.record_tokens - self._left_tokens

    @property
    def images(self) -> int:
        """In the context now; not counted without a window."""
        return len(self._images)

    def tokens_with(self, tokens: int, images: int) -> int:
        """What `tokens` would be after `observe` of so many tokens and images."""
        return self.tokens + tokens - sum(end - start for start, end in self._leaving(images))

    def observe(self, tokens: int, images: Sequence[Span] = ()) -> None:
        """Append an observation. `images`: where in it they lie, in order."""
        if self.window is not None:
            leaving = self._leaving(len(images))
            if leaving:
                self.forks.append(Fork(self.record_tokens, leaving))
                self.rewrites = (*self.rewrites, leaving[0][0] - self._left_tokens)
                self._left_tokens += sum(end - start for start, end in leaving)
                del self._images[: len(leaving)]
            self._images += [(self.record_tokens + start, self.record_tokens + end) for start, end in images]
        self.record_tokens += tokens

    def say(self, tokens: int) -> None:
        """Append what was sampled."""
        self.record_tokens += tokens

    def _leaving(self, coming: int) -> tuple[Span, ...]:
        if self.window is None:
            return ()
        return tuple(self._images[: self.window.leaving(len(self._images), coming)])
