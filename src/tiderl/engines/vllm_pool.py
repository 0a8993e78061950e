"""How much of a vLLM pool is in use, and by whom: read from its scheduler between two steps."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tiderl.engines.vllm_setup import Pool
from tiderl.engines.vllm_turns import VllmTurn

HOLDERS_SHOWN = 8


@dataclass(frozen=True)
class PoolUse:
    """As in `EngineStats`. A part-filled block counts whole, a block that several hold once."""

    resident_tokens: int = 0
    held_tokens: int = 0
    evicted_tokens: int = 0
    holders: tuple[str, ...] = ()


def pool_use(scheduler: Any, pool: Pool, turns: Iterable[VllmTurn]) -> PoolUse:
    """`turns`: all that are queued or running. Pins are those of a `PinsTasks` scheduler; vLLM's own has none."""
    manager = scheduler.kv_cache_manager
    running = {str(turn.turn.task): manager.get_blocks(turn.name).blocks[0] for turn in turns}
    sizes = {task: len(blocks) for task, blocks in running.items() if blocks}
    pins = getattr(scheduler, "pins", None)
    for task, size in pins.sizes() if pins is not None else ():
        sizes[task] = max(size, sizes.get(task, 0))
    used = pool.blocks - manager.block_pool.get_num_free_blocks()
    held = used - len({block.block_id for blocks in running.values() for block in blocks})
    return PoolUse(
        resident_tokens=used * pool.block_tokens,
        held_tokens=held * pool.block_tokens,
        evicted_tokens=getattr(scheduler, "dropped_blocks", 0) * pool.block_tokens,
        holders=tuple(heapq.nlargest(HOLDERS_SHOWN, sizes, key=sizes.__getitem__)),
    )
