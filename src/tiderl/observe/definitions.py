"""What every figure of a result means: unit, numerator and denominator, in one sentence each.

The keys are those of `RunMetrics.summary()`, exactly; a test keeps them so. Texts only.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFINITIONS: Mapping[str, str] = {
    "strategy": "name of the schedule",
    "seed": "the run's seed",
    "outcome": "done, stopped or failed; null while it runs",
    "updates": "number of the last committed update",
    "goodput_tokens_per_s": (
        "loss-bearing tokens of committed updates, each once, divided by the seconds from the first issued task (of "
        "training or of the first evaluation) to the last commit; checkpoints and evaluation are inside these seconds, "
        "the evaluation after the last commit, start-up and warm start are not"
    ),
    "goodput_tokens_per_rank_s": "goodput_tokens_per_s divided by all ranks",
    "consumed_groups_per_s": "groups of committed updates divided by the same seconds",
    "eval_success_first": (
        "successes over finished held-out episodes of the first evaluation; episodes lost to faults are in neither"
    ),
    "eval_success_last": "the same of the last evaluation",
    "eval_success_curve": "[version, success] of every evaluation, in order",
    "staleness_counts": "which of the two `schedule.max_staleness` bounds: oldest_token (`staleness_max`) or window",
    "staleness_max": "updates; largest (update - 1) - version over all loss-bearing tokens trained",
    "staleness_mean_tokens": "updates; mean of the same over all loss-bearing tokens trained",
    "window_staleness_max": "updates; the longest that a trained group waited after it was ready",
    "issued": (
        "trajectories: a group's members when its prompt is issued, and each refill; = trained + dropped + in_flight"
    ),
    "trained": "trajectories of committed updates",
    "dropped": "trajectories by reason",
    "in_flight": "trajectories running or ready",
    "dropped_tokens": "tokens of dropped trajectories as far as they had come, observations included",
    "dropped_tokens_mean": (
        "tokens of a dropped trajectory, observations included, when it was dropped: less than it would have become; "
        "mean over those of which that is known (not over those lost with a driver)"
    ),
    "dropped_tokens_mean_by_reason": "the same by reason",
    "trained_tokens_mean": (
        "tokens of a trained trajectory, observations included, mean, of all of its sequences where images left its "
        "context; where dropped_tokens_mean is larger, dropping favoured short trajectories"
    ),
    "generated_tokens": "tokens sampled for training, whatever became of them; evaluation is not in it",
    "trained_loss_tokens": "loss-bearing tokens of committed updates",
    "twt_s": "seconds that the trainer waited for data, over the committed updates",
    "rwt_s": (
        "seconds that a rollout rank waited for consumption or for new weights, from the first issued task to the last "
        "commit; mean over the rollout ranks"
    ),
    "reward_first": "mean trajectory reward of the first committed update",
    "reward_last": "mean trajectory reward of the last committed update",
    "reward_curve": (
        "[update, mean over the updates since the point before of their mean trajectory reward], at most 60 points"
    ),
    "kv_policy": "who decides what KV stays: lru (the engine, turn by turn) or ctb (the schedule, task by task)",
    "kv_hit_fraction": "context tokens of training turns that were not computed again, over all their context tokens",
    "kv_reprefilled_tokens": (
        "context tokens of training turns that the same attempt had computed in an earlier turn and that were computed "
        "again: context - cached - what is new in it since that turn"
    ),
    "kv_departures": (
        "waits between two turns of a task in which its KV was dropped or offloaded to make room, evaluation included; "
        "null under lru"
    ),
    "kv_retention_ratio": (
        "engine seconds that holding KV during waits and bringing it back cost, over what a clairvoyant would have "
        "paid, over all waits between two turns in which memory had a price; null where that is 0, and under lru"
    ),
    "tasks_paused": (
        "times that a task was to run and had to wait, evaluation included, because its context had no room or its "
        "replica was lost; null under lru"
    ),
    "tasks_migrated": "times that a paused task went to another replica, to be computed again there; null under lru",
    "paused_s": "task-seconds of these waits, until the task resumes or its attempt ends; null under lru",
    "kv_priority": "`rollout.priority`: the rule by which tasks resume and give way; null under lru",
    "kv_priority_weights": "of the rule weighted, all four; null under another rule, and under lru",
    "logprob_gap_mean": "mean |engine - trainer| log-prob at equal weight version, weighted by the tokens compared",
    "logprob_gap_alarms": "updates whose own mean gap is over the limit",
    "faults": "faults that were handled, by type",
    "ranks": "ranks of the run",
    "ranks_lost": "times that a rank was lost",
    "versions_published": "weight versions that rollout may load, version 0 included",
    "clock_s": "the run's clock at its last event, in seconds",
    "setup_s": (
        "seconds from the start of the run's clock to the first issued task, of training or of the first evaluation: "
        "start-up and warm start"
    ),
    "evals": "one row an evaluation: version, prompts, successes, failed, success, reward_mean, turns_mean, seconds",
    "environments": (
        "of a mixture, by environment: trained, dropped, reward_first, reward_last (updates that held a group of it), "
        "eval_success_first, eval_success_last; empty for one environment"
    ),
    "account": (
        "rank-seconds by category from the first issued task to the last commit: useful_prefill, useful_decode, "
        "useful_reference, useful_train, and the losses, each explained in `observe/account.py`; ranks x time in all"
    ),
    "account_total_rank_s": "the sum of the account, in rank-seconds",
}
