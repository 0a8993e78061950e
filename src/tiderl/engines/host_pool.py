"""KV of waiting tasks outside the accelerator's budget: a host pool with a budget of its own, least recently used out.

Correctness never depends on it: what is no longer here is computed again. Knows tensors and tasks; no rows, no turns.
"""

from __future__ import annotations

import torch

from tiderl.data.records import TaskKey
from tiderl.engines.residency import HeldKv


class HostPool:
    """Offloaded entries by task; together at most `budget_tokens` KV positions. 0 keeps nothing."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self._entries: dict[TaskKey, HeldKv] = {}  # least recently used first
        self.tokens = 0

    def has_room_for(self, tokens: int) -> bool:
        """Whether an entry of this size can be taken at all, evicting others where needed."""
        return tokens <= self.budget_tokens

    def put(self, task: TaskKey, entry: HeldKv) -> None:
        """Take an entry that `has_room_for` admits, in place of the task's older one."""
        self.drop(task)
        while self.tokens + entry.tokens > self.budget_tokens:
            self.drop(next(iter(self._entries)))
        self._entries[task] = HeldKv(entry.ids, entry.version, to_host(entry.kv))
        self.tokens += entry.tokens

    def peek(self, task: TaskKey) -> HeldKv | None:
        return self._entries.get(task)

    def drop(self, task: TaskKey) -> None:
        entry = self._entries.pop(task, None)
        if entry is not None:
            self.tokens -= entry.tokens

    def touch(self, task: TaskKey) -> None:
        """Mark an entry as most recently used."""
        if task in self._entries:
            self._entries[task] = self._entries.pop(task)

    def clear(self) -> None:
        self._entries.clear()
        self.tokens = 0


def to_host(kv: torch.Tensor) -> torch.Tensor:
    """The same KV in host memory: pinned when it comes from CUDA, so that both ways are one DMA; on CPU the tensor."""
    if kv.device.type != "cuda":
        return kv.cpu()
    host = torch.empty(kv.shape, dtype=kv.dtype, pin_memory=True)
    # Not waited for: the way back is queued on the same stream, and so is any reuse of the device memory.
    return host.copy_(kv, non_blocking=True)


def default_budget_tokens(device_type: str, kv_budget_tokens: int) -> int:
    """As much again as the accelerator holds; nothing on a CPU, where both would be the same memory."""
    return 0 if device_type == "cpu" else kv_budget_tokens
