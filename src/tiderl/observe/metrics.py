"""Every figure of a result, derived from the run's events alone, each with its unit and denominator.

The same class reads a live run, a simulation and a recorded one, so that their figures mean the same (`definitions.py`
says what). A figure that has no meaning yet is None. Knows no files, no clock and no engine.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from tiderl.data.events import (
    Dropped,
    EvalFinished,
    Event,
    Fault,
    PromptIssued,
    RankLostEvent,
    RankState,
    RoleChanged,
    RunEnded,
    RunStarted,
    TaskAdmitted,
    TurnFinished,
    UpdateCommitted,
    VersionPublished,
)
from tiderl.observe.account import Account
from tiderl.observe.books import IssueBook, WaitBook
from tiderl.observe.curves import shares
from tiderl.observe.environments import EnvironmentBook, eval_shares
from tiderl.observe.kv import KvBook

REWARD_CURVE_POINTS = 60
"""As many as a line of a terminal shows; all updates are in `metrics.jsonl`."""
LOGPROB_GAP_ALARM = "LogprobGapAlarm"
"""The fault that the runtime records for an update whose engine-trainer gap exceeds its limit."""


class RunMetrics:
    """Feed it every event in order, ask for `summary()` at any moment."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.outcome: str | None = None
        self.clock_s = 0.0
        self.first_issue_s: float | None = None
        self.last_commit: UpdateCommitted | None = None
        self.first_commit: UpdateCommitted | None = None
        self.evals: list[EvalFinished] = []
        self.rewards: dict[int, float] = {}
        self.faults: Counter[str] = Counter()
        self.ranks_lost = 0
        self.versions: set[int] = set()
        self.generated_tokens = 0
        self.groups = 0
        self.loss_tokens = 0
        self.trained_tokens = 0
        self.stale_token_updates = 0.0
        self.staleness_max: int | None = None
        self.window_staleness_max: int | None = None
        self.twt_s = 0.0
        self.rwt_rank_s = 0.0
        self.gap_sum = 0.0
        self.gap_tokens = 0.0
        self.issue = IssueBook()
        self.waits = WaitBook()
        self.environments = EnvironmentBook()
        self.kv = KvBook()
        self.account = Account()

    def observe(self, event: Event) -> None:
        self.clock_s = max(self.clock_s, event.t_s)
        self.environments.observe(event)
        self.kv.observe(event)
        self.account.observe(event)
        match event:
            case TurnFinished():
                if event.split == "train":
                    self.generated_tokens += event.new_tokens
            case RankState() | RoleChanged():
                self.waits.observe(event)
            case TaskAdmitted() | PromptIssued():
                self._begin(event.t_s)
                self.issue.observe(event)
            case Dropped():
                self.issue.observe(event)
            case UpdateCommitted():
                self._committed(event)
            case EvalFinished():
                self.evals.append(event)
            case Fault():
                self.faults[event.what] += 1
            case RankLostEvent():
                self.ranks_lost += 1
            case VersionPublished():
                self.versions.add(event.version)  # a resumed run publishes its newest once more
            case RunStarted():
                self.started = event
                self.waits.forget()
                self.issue.group_size = event.group_size
            case RunEnded():
                self.outcome = event.outcome

    def _begin(self, t_s: float) -> None:
        """The first task, of training or of the first evaluation, starts the clock of goodput."""
        if self.first_issue_s is None:
            self.first_issue_s = self.waits.start_s = t_s

    def _committed(self, event: UpdateCommitted) -> None:
        self.issue.observe(event)
        self.first_commit = self.first_commit or event
        self.last_commit = event
        self.rewards[event.update] = event.reward_mean
        self.groups += event.groups
        self.loss_tokens += event.loss_tokens
        self.trained_tokens += event.tokens
        self.stale_token_updates += event.staleness_mean_tokens * event.loss_tokens
        self.staleness_max = max(self.staleness_max or 0, event.staleness_max)
        self.window_staleness_max = max(self.window_staleness_max or 0, event.window_staleness_max)
        self.twt_s += event.waited_s
        self.waits.settle(event.t_s)
        self.rwt_rank_s = self.waits.rank_seconds
        gap_tokens = event.metrics.get("logprob_gap_tokens", 0.0)
        if gap_tokens > 0:
            self.gap_sum += event.metrics.get("logprob_gap_mean", 0.0) * gap_tokens
            self.gap_tokens += gap_tokens

    @property
    def updates(self) -> int:
        """The number of the last committed update."""
        return self.last_commit.update if self.last_commit else 0

    @property
    def consuming_s(self) -> float | None:
        """Seconds from the first issued task to the last committed update: the denominator of every rate."""
        if self.last_commit is None or self.first_issue_s is None or self.last_commit.t_s <= self.first_issue_s:
            return None
        return self.last_commit.t_s - self.first_issue_s

    def summary(self) -> dict[str, Any]:
        """The figures and the account, by name, each defined in `definitions.py`."""
        account = self.account.summary()
        total = sum(account.values()) if account is not None else None
        return {**self.figures(), "account": account, "account_total_rank_s": total}

    def figures(self) -> dict[str, Any]:
        """All but the account, which takes a moment. Plain JSON values; None where one has no meaning."""
        started, seconds = self.started, self.consuming_s
        goodput = _ratio(self.loss_tokens, seconds)
        curve = [[e.version, _success(e)] for e in self.evals]
        return {
            "strategy": started.strategy if started else None,
            "seed": started.seed if started else None,
            "outcome": self.outcome,
            "updates": self.updates,
            "goodput_tokens_per_s": goodput,
            "goodput_tokens_per_rank_s": _ratio(goodput, started.ranks if started else None),
            "consumed_groups_per_s": _ratio(self.groups, seconds),
            "eval_success_first": curve[0][1] if curve else None,
            "eval_success_last": curve[-1][1] if curve else None,
            "eval_success_curve": curve,
            "staleness_counts": started.staleness_counts if started else None,
            "staleness_max": self.staleness_max,
            "staleness_mean_tokens": _ratio(self.stale_token_updates, self.loss_tokens),
            "window_staleness_max": self.window_staleness_max,
            "issued": self.issue.issued,
            "trained": self.issue.trained,
            "dropped": dict(sorted(self.issue.dropped.items())),
            "in_flight": self.issue.in_flight,
            "dropped_tokens": self.issue.dropped_tokens.total(),
            "dropped_tokens_mean": self.issue.dropped_tokens_mean,
            "dropped_tokens_mean_by_reason": self.issue.dropped_tokens_mean_by_reason(),
            "trained_tokens_mean": _ratio(self.trained_tokens, self.issue.trained),
            "generated_tokens": self.generated_tokens,
            "trained_loss_tokens": self.loss_tokens,
            "twt_s": self.twt_s if self.last_commit else None,
            "rwt_s": _ratio(self.rwt_rank_s, len(self.waits.rollout_ranks)) if self.last_commit else None,
            "reward_first": self.first_commit.reward_mean if self.first_commit else None,
            "reward_last": self.last_commit.reward_mean if self.last_commit else None,
            "reward_curve": self._reward_curve(),
            **self.kv.figures(),
            "logprob_gap_mean": _ratio(self.gap_sum, self.gap_tokens),
            "logprob_gap_alarms": self.faults[LOGPROB_GAP_ALARM],
            "faults": dict(sorted(self.faults.items())),
            "ranks": started.ranks if started else None,
            "ranks_lost": self.ranks_lost,
            "versions_published": len(self.versions),
            "clock_s": self.clock_s,
            "setup_s": self.first_issue_s,
            "evals": [eval_row(event) for event in self.evals],
            "environments": self.environments.summary(),
        }

    def _reward_curve(self) -> list[list[float]]:
        updates, rewards = list(self.rewards), list(self.rewards.values())
        return [
            [updates[end - 1], sum(rewards[start:end]) / (end - start)]
            for start, end in shares(len(rewards), REWARD_CURVE_POINTS)
        ]

    def update_row(self, event: UpdateCommitted) -> dict[str, Any]:
        """One line of `metrics.jsonl`: this update, and the run so far. Call it after `observe(event)`."""
        return {
            "kind": "update",
            "update": event.update,
            "t_s": event.t_s,
            "seconds": event.seconds,
            "reward_mean": event.reward_mean,
            "success_fraction": event.success_fraction,
            "groups": event.groups,
            "trajectories": event.trajectories,
            "loss_tokens": event.loss_tokens,
            "tokens": event.tokens,
            "staleness_max": event.staleness_max,
            "staleness_mean_tokens": event.staleness_mean_tokens,
            "window_staleness_max": event.window_staleness_max,
            "goodput_tokens_per_s": _ratio(self.loss_tokens, self.consuming_s),
            "twt_s": self.twt_s,
            "rwt_s": _ratio(self.rwt_rank_s, len(self.waits.rollout_ranks)),
            "in_flight": self.issue.in_flight,
            "dropped": sum(self.issue.dropped.values()),
            "trainer": {name: value if math.isfinite(value) else None for name, value in sorted(event.metrics.items())},
            **_of_a_mixture(self.environments.update_row()),
        }


def eval_row(event: EvalFinished) -> dict[str, Any]:
    """One evaluation. `success` = successes ÷ `prompts`; `failed` episodes ended in a fault and are in neither."""
    return {
        "kind": "eval",
        "version": event.version,
        "t_s": event.t_s,
        "seconds": event.seconds,
        "prompts": event.prompts,
        "successes": event.successes,
        "failed": event.failed,
        "success": _success(event),
        "reward_mean": event.reward_mean,
        "turns_mean": event.turns_mean,
        **_of_a_mixture(eval_shares(event)),
    }


def _of_a_mixture(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """No key at all for a run of one environment."""
    return {"environments": rows} if rows else {}


def _success(event: EvalFinished) -> float | None:
    return _ratio(event.successes, event.prompts)


def _ratio(above: float | None, below: float | None) -> float | None:
    """None where either is missing or the denominator is 0."""
    return above / below if above is not None and below else None
