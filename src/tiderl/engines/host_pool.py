"""KV of waiting tasks outside the accelerator's budget: a host pool with a budget of its own, which keeps what it has.

Tasks come back in turn: were the longest unused to go when the pool is full, each would go just before it is needed.
Correctness never depends on it: what is no longer here is computed again. Knows tensors and tasks; no rows, no turns.
"""

from __future__ import annotations

import math
import time

import torch

from tiderl.data.records import TaskKey
from tiderl.engines.residency import HeldKv

PROBE_BYTES, PROBE_TOKENS = 64 * 2**20, 1024


class HostPool:
    """Offloaded entries by task; together at most `budget_tokens` KV positions. 0 keeps nothing."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self._entries: dict[TaskKey, HeldKv] = {}
        self.tokens = 0

    def has_room_for(self, task: TaskKey, tokens: int) -> bool:
        """Whether an entry of this size can be taken, in place of the task's older one."""
        older = self._entries.get(task)
        return self.tokens - (0 if older is None else older.tokens) + tokens <= self.budget_tokens

    def put(self, task: TaskKey, entry: HeldKv) -> None:
        """Take an entry that `has_room_for` admits, in place of the task's older one."""
        self.drop(task)
        self._entries[task] = HeldKv(entry.ids, entry.version, to_host(entry.kv))
        self.tokens += entry.tokens

    def peek(self, task: TaskKey) -> HeldKv | None:
        return self._entries.get(task)

    def drop(self, task: TaskKey) -> None:
        entry = self._entries.pop(task, None)
        if entry is not None:
            self.tokens -= entry.tokens

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


def measured_reload_s(device: torch.device, token_bytes: int) -> float:
    """Seconds to bring one position back, `token_bytes` of KV: the fastest of three copies of 64 MiB, or of 1,024
    positions where they are more. For an accelerator; on a CPU a copy within the same memory."""
    tokens = max(PROBE_BYTES // token_bytes, PROBE_TOKENS)
    host = torch.empty(tokens * token_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    fastest = math.inf
    for _ in range(3):
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest / tokens


def default_budget_tokens(device_type: str, kv_budget_tokens: int) -> int:
    """As much again as the accelerator holds; nothing on a CPU, where both would be the same memory."""
    return 0 if device_type == "cpu" else kv_budget_tokens
