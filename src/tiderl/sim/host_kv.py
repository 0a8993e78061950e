"""KV of waiting tasks in the host memory of a simulated replica, and the link over which it comes back.

A pool of its own budget that keeps what it has, as `engines/host_pool.py` is. Copies out run beside the computing and
cost nothing; copies in share one link and follow each other. Knows tasks and positions; no blocks, no batch.
"""

from __future__ import annotations

from tiderl.data.records import TaskKey


class HostKv:
    """`reload_token_s`: of one position over the link, in seconds. `tokens`: positions here now, at most the budget."""

    def __init__(self, budget_tokens: int, reload_token_s: float) -> None:
        self.budget_tokens = budget_tokens
        self.tokens = 0
        self._reload_token_s = reload_token_s
        self._free_s = 0.0  # when the link has done what it was asked for so far
        self._tokens: dict[TaskKey, int] = {}

    def put(self, task: TaskKey, tokens: int) -> bool:
        """Take the first `tokens` positions of a task's context, in place of what was here of it; False where there is
        no room for them beside what others have."""
        if self.tokens - self.tokens_of(task) + tokens > self.budget_tokens:
            return False
        self.drop(task)
        self._tokens[task] = tokens
        self.tokens += tokens
        return True

    def tokens_of(self, task: TaskKey) -> int:
        return self._tokens.get(task, 0)

    def cut(self, task: TaskKey, tokens: int) -> None:
        """A task's context goes on as it was only up to here: forget what is here behind."""
        if task in self._tokens:
            gone = max(0, self._tokens[task] - tokens)
            self._tokens[task] -= gone
            self.tokens -= gone

    def reload(self, tokens: int, now_s: float) -> float:
        """The moment at which `tokens` positions have come back that are asked for now."""
        self._free_s = max(self._free_s, now_s) + tokens * self._reload_token_s
        return self._free_s

    def drop(self, task: TaskKey) -> None:
        self.tokens -= self._tokens.pop(task, 0)

    def clear(self) -> None:
        """Other weights: nothing here is worth anything, and nobody waits for the link."""
        self._tokens.clear()
        self.tokens = 0
        self._free_s = 0.0
