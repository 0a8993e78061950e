"""The figures of each environment of a mixture: what it gave to the updates, what was dropped of it, how it evaluates.

An environment is what a prompt's event says it is; a run of one environment has none of these figures. Reads events
only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tiderl.data.events import (
    Dropped,
    EvalFinished,
    EvalShare,
    Event,
    PromptIssued,
    TaskFinished,
    UpdateCommitted,
)


@dataclass
class _Group:
    """One prompt's group: reward and success of each member's newest trajectory."""

    environment: str
    rewards: dict[int, float] = field(default_factory=dict)
    successes: dict[int, bool] = field(default_factory=dict)


@dataclass
class _Account:
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    reward_first: float | None = None
    reward_last: float | None = None
    evals: list[EvalShare] = field(default_factory=list)


class EnvironmentBook:
    """Feed it every event in order."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._groups: dict[int, _Group] = {}
        self._last_update: dict[str, dict[str, Any]] = {}

    def observe(self, event: Event) -> None:
        match event:
            case PromptIssued() if event.environment:
                self._groups[event.prompt_id] = _Group(event.environment)
                self._accounts.setdefault(event.environment, _Account())
            case TaskFinished(split="train") if event.prompt_id in self._groups:
                group = self._groups[event.prompt_id]
                group.rewards[event.member] = event.reward
                group.successes[event.member] = event.success
            case Dropped() if event.prompt_id in self._groups:
                self._accounts[self._groups[event.prompt_id].environment].dropped[event.reason] += 1
            case UpdateCommitted():
                self._committed(event.prompt_ids)
            case EvalFinished():
                for name, share in event.by_environment.items():
                    self._accounts.setdefault(name, _Account()).evals.append(share)

    def _committed(self, prompt_ids: tuple[int, ...]) -> None:
        consumed: dict[str, list[_Group]] = {}
        for prompt_id in prompt_ids:
            group = self._groups.pop(prompt_id, None)
            if group is not None:
                consumed.setdefault(group.environment, []).append(group)
        self._last_update = {}
        for name, groups in sorted(consumed.items()):
            rewards = [reward for group in groups for reward in group.rewards.values()]
            successes = [success for group in groups for success in group.successes.values()]
            account = self._accounts[name]
            account.trained += len(rewards)
            account.reward_last = _mean(rewards)
            if account.reward_first is None:
                account.reward_first = account.reward_last
            self._last_update[name] = {
                "groups": len(groups),
                "reward_mean": account.reward_last,
                "success_fraction": _mean([float(success) for success in successes]),
            }

    def update_row(self) -> dict[str, dict[str, Any]]:
        """Of the last committed update, by environment."""
        return self._last_update

    def summary(self) -> dict[str, dict[str, Any]]:
        """Of the run so far, by environment."""
        return {
            name: {
                "trained": account.trained,
                "dropped": dict(sorted(account.dropped.items())),
                "reward_first": account.reward_first,
                "reward_last": account.reward_last,
                "eval_success_first": _success(account.evals[0]) if account.evals else None,
                "eval_success_last": _success(account.evals[-1]) if account.evals else None,
            }
            for name, account in sorted(self._accounts.items())
        }


def eval_shares(event: EvalFinished) -> dict[str, dict[str, Any]]:
    """Of one evaluation, by environment."""
    return {
        name: {
            "prompts": share.prompts,
            "successes": share.successes,
            "failed": share.failed,
            "success": _success(share),
            "reward_mean": share.reward_mean,
        }
        for name, share in sorted(event.by_environment.items())
    }


def _success(share: EvalShare) -> float | None:
    return share.successes / share.prompts if share.prompts else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
