"""Which waiting tasks keep their KV blocks pinned in a vLLM pool, and which lose them first.

Pure: names, priorities and counts; the blocks are opaque. Who calls it touches and frees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Block = TypeVar("Block")


@dataclass(frozen=True)
class Pin(Generic[Block]):
    """The whole blocks of a waiting task, in the order of its context. One reference on each is the pin's."""

    blocks: tuple[Block, ...]
    priority: float  # of the task's last turn; larger is worth more


class Pins(Generic[Block]):
    """Pins by task, longest unused first.

    >>> pins = Pins()
    >>> pins.put("a", Pin((1, 2), 0.0)); pins.put("b", Pin((3,), -1.0)); pins.put("c", Pin((4,), 0.0))
    >>> list(pins.victims())
    ['b', 'a', 'c']
    >>> list(pins.victims(last="b"))
    ['a', 'c', 'b']
    """

    def __init__(self) -> None:
        self._pins: dict[str, Pin[Block]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, task: str) -> bool:
        return task in self._pins

    def put(self, task: str, pin: Pin[Block]) -> None:
        """In place of no older one: who puts has taken that."""
        assert task not in self._pins
        self._pins[task] = pin

    def take(self, task: str) -> Pin[Block] | None:
        """The task's pin, which is then no longer kept: its references are the caller's to give back."""
        return self._pins.pop(task, None)

    def touch(self, task: str, priority: float | None = None) -> None:
        """Mark as most recently used, with another priority where one is given."""
        pin = self._pins.pop(task, None)
        if pin is not None:
            self._pins[task] = pin if priority is None else Pin(pin.blocks, priority)

    def victims(self, last: str = "") -> Iterator[str]:
        """Every task in the order in which pins are dropped: lowest priority first, then longest unused. `last`: the
        task that asks for room comes at the end, for its own pin is what it would reuse."""
        ordered = sorted(self._pins.items(), key=lambda item: item[1].priority)  # stable: longest unused first
        yield from (task for task, _ in ordered if task != last)
        if last in self._pins:
            yield last

    def blocks(self) -> Iterator[Block]:
        """Of all pins; a block that several tasks share comes once for each."""
        for pin in self._pins.values():
            yield from pin.blocks

    def sizes(self) -> Iterable[tuple[str, int]]:
        return ((task, len(pin.blocks)) for task, pin in self._pins.items())


def may_help(need_blocks: int, free_blocks: int, pinned_blocks: int) -> bool:
    """Whether dropping pins can make room at all; where not, none is dropped and the request waits for a running one.

    `need_blocks`: the fewest that the request can do with. `pinned_blocks` counts a shared block for each of its
    owners, so this may say yes in vain, never no.

    >>> may_help(need_blocks=5, free_blocks=2, pinned_blocks=3), may_help(5, 2, 2)
    (True, False)
    """
    return free_blocks + pinned_blocks >= need_blocks
