"""Every figure of a result from hand-made events, with the arithmetic written out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

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
    StepStarted,
    TaskAdmitted,
    TurnFinished,
    UpdateCommitted,
    VersionPublished,
)
from tiderl.observe.definitions import DEFINITIONS
from tiderl.observe.metrics import RunMetrics, eval_row
from tiderl.observe.metrics_file import MetricsFile

GROUP_SIZE = 2


def started(ranks: int = 4) -> RunStarted:
    return RunStarted(
        t_s=0.0,
        strategy="areal",
        seed=7,
        ranks=ranks,
        replicas=ranks - 1,
        updates=10,
        global_batch_groups=1,
        group_size=GROUP_SIZE,
        max_staleness=1,
        staleness_counts="oldest_token",
    )


def issued(t_s: float, prompt_id: int) -> PromptIssued:
    return PromptIssued(t_s=t_s, prompt_id=prompt_id, task_id=f"p{prompt_id}", start_version=0, replica=0)


def admitted(
    prompt_id: int, member: int, trajectory_id: int, *, split: str = "train", attempt: int = 0
) -> TaskAdmitted:
    return TaskAdmitted(
        t_s=0.0,
        split=split,
        trajectory_id=trajectory_id,
        prompt_id=prompt_id,
        member=member,
        attempt=attempt,
        replica=0,
    )


def dropped(prompt_id: int, member: int, trajectory_id: int, reason: str, tokens: int = 0) -> Dropped:
    return Dropped(
        t_s=0.0, trajectory_id=trajectory_id, prompt_id=prompt_id, member=member, reason=reason, tokens=tokens
    )


def step(update: int, waited_s: float, prompt_ids: tuple[int, ...] = ()) -> StepStarted:
    return StepStarted(
        t_s=0.0, update=update, prompt_ids=prompt_ids, waited_s=waited_s, ready_groups=0, oldest_ready_s=0.0
    )


def committed(t_s: float, update: int, **changes: Any) -> UpdateCommitted:
    values: dict[str, Any] = {
        "groups": 1,
        "trajectories": GROUP_SIZE,
        "loss_tokens": 10,
        "tokens": 50,
        "reward_mean": 0.5,
        "success_fraction": 0.5,
        "staleness_max": 0,
        "staleness_mean_tokens": 0.0,
        "window_staleness_max": 0,
        "seconds": 1.0,
        "metrics": {},
        **changes,
    }
    return UpdateCommitted(t_s=t_s, update=update, **values)


def turn(split: str, context: int, new: int, cached: int) -> TurnFinished:
    return TurnFinished(
        t_s=0.0,
        split=split,
        prompt_id=0,
        member=0,
        attempt=0,
        turn=0,
        replica=0,
        context_tokens=context,
        new_tokens=new,
        cached_tokens=cached,
        version=0,
        finish_reason="stop",
        queued_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )


def evaluation(version: int, prompts: int, successes: int, failed: int = 0) -> EvalFinished:
    return EvalFinished(
        t_s=1.0,
        version=version,
        prompts=prompts,
        successes=successes,
        failed=failed,
        reward_mean=0.0,
        turns_mean=0.0,
        seconds=1.0,
    )


def activity(t_s: float, rank: int, role: str, what: str) -> RankState:
    return RankState(t_s=t_s, rank=rank, role=role, activity=what)


def summary_of(events: Iterable[Event]) -> dict[str, Any]:
    metrics = RunMetrics()
    for event in events:
        metrics.observe(event)
    return metrics.summary()


def test_goodput_divides_committed_loss_tokens_by_first_issue_to_last_commit() -> None:
    shown = summary_of(
        [
            started(ranks=4),
            issued(5.0, 0),
            issued(6.0, 1),
            committed(15.0, 1, loss_tokens=100, groups=3),
            committed(25.0, 2, loss_tokens=60, groups=3),
            RunEnded(t_s=30.0, outcome="done", updates=2),
        ]
    )
    assert shown["goodput_tokens_per_s"] == (100 + 60) / (25.0 - 5.0)
    assert shown["goodput_tokens_per_rank_s"] == 160 / 20.0 / 4
    assert shown["consumed_groups_per_s"] == (3 + 3) / 20.0
    assert (shown["setup_s"], shown["clock_s"], shown["updates"], shown["outcome"]) == (5.0, 30.0, 2, "done")


def test_without_a_committed_update_rates_have_no_meaning() -> None:
    shown = summary_of([started(), issued(1.0, 0), RunEnded(t_s=3.0, outcome="stopped", updates=0)])
    assert shown["updates"] == 0 and shown["issued"] == GROUP_SIZE
    nothing = ["goodput_tokens_per_s", "staleness_max", "twt_s", "rwt_s", "reward_last", "kv_hit_fraction"]
    assert [shown[key] for key in [*nothing, "eval_success_last", "logprob_gap_mean"]] == [None] * 8


def test_every_figure_is_defined_and_every_definition_is_a_figure() -> None:
    assert list(RunMetrics().summary()) == list(DEFINITIONS)
    json.dumps(RunMetrics().summary(), allow_nan=False)


def test_staleness_mean_is_weighted_by_loss_tokens_not_by_updates() -> None:
    shown = summary_of(
        [
            started(),
            issued(0.0, 0),
            committed(1.0, 1, loss_tokens=30, staleness_max=2, staleness_mean_tokens=0.5, window_staleness_max=1),
            committed(2.0, 2, loss_tokens=10, staleness_max=1, staleness_mean_tokens=0.1, window_staleness_max=3),
        ]
    )
    assert shown["staleness_mean_tokens"] == pytest.approx((30 * 0.5 + 10 * 0.1) / 40)
    assert (shown["staleness_max"], shown["window_staleness_max"]) == (2, 3)


def test_the_log_prob_gap_is_weighted_by_the_tokens_compared() -> None:
    shown = summary_of(
        [
            started(),
            issued(0.0, 0),
            committed(1.0, 1, metrics={"logprob_gap_mean": 1e-06, "logprob_gap_tokens": 300.0}),
            committed(2.0, 2, metrics={"logprob_gap_mean": 5e-06, "logprob_gap_tokens": 100.0}),
            committed(3.0, 3, metrics={"logprob_gap_mean": 0.0, "logprob_gap_tokens": 0.0}),
            Fault(t_s=3.0, where="update 2", what="LogprobGapAlarm"),
        ]
    )
    assert shown["logprob_gap_mean"] == pytest.approx((300 * 1e-6 + 100 * 5e-6) / 400)
    assert shown["logprob_gap_alarms"] == 1


def test_a_long_reward_curve_is_a_few_means_over_equal_shares() -> None:
    events = [started(), issued(0.0, 0), *(committed(float(n), n, reward_mean=float(n)) for n in range(1, 241))]
    curve = summary_of(events)["reward_curve"]
    assert len(curve) == 60
    assert curve[0] == [4, 2.5] and curve[-1] == [240, 238.5]


def test_rewards_and_held_out_success_are_first_and_last() -> None:
    shown = summary_of(
        [
            started(),
            evaluation(0, 200, 100),
            issued(0.0, 0),
            committed(1.0, 1, reward_mean=0.25),
            committed(2.0, 2, reward_mean=0.75),
            evaluation(2, 190, 171, failed=10),
        ]
    )
    assert (shown["reward_first"], shown["reward_last"]) == (0.25, 0.75)
    assert (shown["eval_success_first"], shown["eval_success_last"]) == (0.5, 171 / 190)
    assert shown["eval_success_curve"] == [[0, 0.5], [2, 0.9]]
    assert shown["reward_curve"] == [[1, 0.25], [2, 0.75]]
    assert [row["failed"] for row in shown["evals"]] == [0, 10]


def test_an_evaluation_that_lost_every_episode_has_no_success() -> None:
    assert eval_row(evaluation(0, 0, 0, failed=5))["success"] is None


def test_kv_hits_and_generated_tokens_are_of_training_only() -> None:
    shown = summary_of([started(), turn("train", 20, 3, 0), turn("train", 30, 4, 22), turn("eval", 1000, 500, 1000)])
    assert shown["generated_tokens"] == 3 + 4
    assert shown["kv_hit_fraction"] == 22 / (20 + 30)


def test_trainer_wait_counts_committed_updates_only() -> None:
    shown = summary_of(
        [
            *(started(), issued(0.0, 0), step(1, 1.5), committed(3.0, 1, waited_s=2.0)),
            *(step(2, 0.5), committed(4.0, 2, waited_s=0.5), step(3, 100.0)),
        ]
    )
    assert shown["twt_s"] == 2.5


def test_rollout_wait_is_a_mean_over_rollout_ranks_between_first_issue_and_last_commit() -> None:
    shown = summary_of(
        [
            started(ranks=3),
            activity(0.0, 0, "rollout", "loading"),
            activity(0.0, 1, "rollout", "idle_no_work"),
            activity(0.0, 2, "actor", "waiting_data"),
            issued(1.0, 0),
            activity(2.0, 0, "rollout", "generating"),  # rank 0 loaded for 1 s after the first issue
            activity(5.0, 1, "rollout", "idle_staleness"),
            activity(6.0, 0, "rollout", "idle_staleness"),
            committed(9.0, 1),  # rank 1 has waited 4 s, rank 0 another 3 s
            activity(20.0, 0, "rollout", "stopped"),
            RunEnded(t_s=20.0, outcome="done", updates=1),
        ]
    )
    assert shown["rwt_s"] == (1.0 + 4.0 + 3.0) / 2


def test_a_shared_rank_does_not_wait_while_it_trains() -> None:
    shown = summary_of(
        [
            started(ranks=1),
            issued(0.0, 0),
            activity(0.0, 0, "rollout", "generating"),
            activity(4.0, 0, "rollout", "idle_staleness"),
            RoleChanged(t_s=5.0, rank=0, from_role="rollout", to_role="actor"),
            RoleChanged(t_s=8.0, rank=0, from_role="actor", to_role="rollout"),
            committed(10.0, 1),
        ]
    )
    assert shown["rwt_s"] == (5.0 - 4.0) + (10.0 - 8.0)


def test_the_time_between_two_drivers_of_a_run_is_nobodys_wait() -> None:
    shown = summary_of(
        [
            started(ranks=1),
            issued(0.0, 0),
            activity(1.0, 0, "rollout", "idle_staleness"),
            RoleChanged(t_s=2.0, rank=0, from_role="rollout", to_role="actor"),
            started(ranks=1),  # resumed
            activity(5.0, 0, "rollout", "idle_staleness"),
            committed(6.0, 1),
        ]
    )
    assert shown["rwt_s"] == (2.0 - 1.0) + (6.0 - 5.0)


# ---------------------------------------------------------------- the account of trajectories (I1)


def balance(shown: dict[str, Any]) -> tuple[int, int, dict[str, int], int]:
    assert shown["issued"] == shown["trained"] + sum(shown["dropped"].values()) + shown["in_flight"]
    return shown["issued"], shown["trained"], shown["dropped"], shown["in_flight"]


def test_members_that_were_never_admitted_are_issued_and_in_flight() -> None:
    assert balance(summary_of([started(), issued(0.0, 0), admitted(0, 0, 0)])) == (2, 0, {}, 2)


def test_a_retry_keeps_its_trajectory_and_a_refill_is_issued_again() -> None:
    events: list[Event] = [started(), issued(0.0, 0), admitted(0, 0, 0), admitted(0, 1, 1)]
    events += [admitted(0, 0, 0, attempt=1)]
    assert balance(summary_of(events)) == (2, 0, {}, 2)
    events += [dropped(0, 0, 0, "environment_raised", tokens=40)]
    assert balance(summary_of(events)) == (3, 0, {"environment_raised": 1}, 2)  # the refill waits for admission
    events += [admitted(0, 0, 2, attempt=2)]
    assert balance(summary_of(events)) == (3, 0, {"environment_raised": 1}, 2)
    events += [step(1, 0.0, (0,)), committed(5.0, 1, prompt_ids=(0,))]
    assert balance(summary_of(events)) == (3, 2, {"environment_raised": 1}, 0)
    assert summary_of(events)["dropped_tokens"] == 40


def test_lengths_of_dropped_and_trained_trajectories_show_a_bias() -> None:
    """Four are trained with 120 tokens together; two are dropped at 90 and 70 tokens, one nobody knows how far."""
    events: list[Event] = [started(), issued(0.0, 0), dropped(0, 0, 9, "environment_timeout", tokens=90)]
    events += [dropped(0, 1, 10, "environment_timeout", tokens=70), dropped(0, 2, 11, "lost")]
    events += [step(1, 0.0, (0,)), committed(5.0, 1, prompt_ids=(0,), trajectories=4, tokens=120)]
    shown = summary_of(events)
    assert (shown["trained_tokens_mean"], shown["dropped_tokens_mean"]) == (30.0, 80.0)
    assert shown["dropped_tokens_mean_by_reason"] == {"environment_timeout": 80.0}
    assert shown["dropped_tokens"] == 160


def test_lengths_mean_nothing_before_something_was_trained_or_dropped() -> None:
    shown = summary_of([started(), issued(0.0, 0)])
    assert shown["trained_tokens_mean"] is None and shown["dropped_tokens_mean"] is None


def test_a_group_that_is_given_up_gets_no_refill() -> None:
    events: list[Event] = [started(), issued(0.0, 0), admitted(0, 0, 0), admitted(0, 1, 1), issued(0.0, 1)]
    events += [dropped(0, 0, 0, "environment_timeout"), dropped(0, 1, 1, "group_dropped")]
    assert balance(summary_of(events)) == (4, 0, {"environment_timeout": 1, "group_dropped": 1}, 2)
    # a refill that was never admitted goes with its group, under its own id
    events += [admitted(1, 0, 2), dropped(1, 0, 2, "rank_lost")]
    events += [dropped(1, 0, 4, "group_dropped"), dropped(1, 1, 3, "environment_timeout")]
    reasons = {"environment_timeout": 2, "group_dropped": 2, "rank_lost": 1}
    assert balance(summary_of(events)) == (5, 0, reasons, 0)


def test_evaluation_tasks_are_not_issued() -> None:
    assert summary_of([started(), admitted(0, 0, -1, split="eval")])["issued"] == 0


def test_lost_ranks_faults_and_versions_are_counted() -> None:
    shown = summary_of(
        [
            started(),
            VersionPublished(t_s=0.0, version=0, nbytes=1),
            VersionPublished(t_s=0.0, version=1, nbytes=1),
            RankLostEvent(t_s=1.0, rank=0, reason="exited", tasks=3),
            Fault(t_s=1.0, where="task", what="RankLost"),
            Fault(t_s=1.0, where="task", what="RankLost"),
        ]
    )
    assert (shown["versions_published"], shown["ranks_lost"], shown["faults"]) == (2, 1, {"RankLost": 2})


# ------------------------------------------------------------------------------ metrics.jsonl


def test_the_metrics_file_has_one_line_an_update_and_one_an_evaluation(tmp_path: Path) -> None:
    metrics = RunMetrics()
    file = MetricsFile(tmp_path / "metrics.jsonl", metrics)
    events: list[Event] = [
        started(),
        evaluation(0, 10, 5),
        issued(1.0, 0),
        step(1, 0.5, (0,)),
        committed(3.0, 1, loss_tokens=20, metrics={"tokens": 9.0, "loss": float("nan")}),
    ]
    for event in events:
        metrics.observe(event)
        file.observe(event)
    file.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["kind"] for row in rows] == ["eval", "update"]
    assert (rows[0]["version"], rows[0]["success"]) == (0, 0.5)
    assert (rows[1]["update"], rows[1]["goodput_tokens_per_s"], rows[1]["in_flight"]) == (1, 20 / 2.0, 0)
    assert rows[1]["tokens"] == 50  # of the batch; the trainer's own are apart
    assert rows[1]["trainer"] == {"loss": None, "tokens": 9.0}
