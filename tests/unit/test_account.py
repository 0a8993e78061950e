"""The account against values by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tiderl.data.events import (
    Dropped,
    Event,
    PromptIssued,
    RankState,
    RunStarted,
    TaskAdmitted,
    TaskFinished,
    TaskMigrated,
    TaskPaused,
    TaskResumed,
    TurnFinished,
    UpdateCommitted,
)
from tiderl.observe.account import Account
from tiderl.observe.shares import Shares, intervals


def started(ranks: int = 2) -> RunStarted:
    return RunStarted(
        t_s=0.0, strategy="areal", seed=0, ranks=ranks, replicas=1, updates=1, global_batch_groups=1, group_size=1,
        max_staleness=1, staleness_counts="oldest_token", engine_ranks=((0,),),
        actor_ranks=tuple(range(1, ranks)) or (0,),
    )  # fmt: skip


def state(t_s: float, rank: int, role: str, activity: str) -> RankState:
    return RankState(t_s=t_s, rank=rank, role=role, activity=activity)


def turn(
    t_s: float, prompt_id: int, number: int, *, split: str = "train", attempt: int = 0, **values: Any
) -> TurnFinished:
    defaults = {"context_tokens": 10, "new_tokens": 5, "cached_tokens": 0, "version": 0, "queued_s": 0.0}
    return TurnFinished(
        t_s=t_s, split=split, prompt_id=prompt_id, member=0, attempt=attempt, turn=number, replica=0,
        finish_reason="stop", **{**defaults, **values},
    )  # fmt: skip


def admitted(t_s: float, prompt_id: int, *, split: str = "train", attempt: int = 0) -> TaskAdmitted:
    return TaskAdmitted(
        t_s=t_s, split=split, trajectory_id=prompt_id, prompt_id=prompt_id, member=0, attempt=attempt, replica=0
    )


def finished(t_s: float, prompt_id: int) -> TaskFinished:
    return TaskFinished(
        t_s=t_s, split="train", trajectory_id=prompt_id, prompt_id=prompt_id, member=0, attempt=0, ending="terminated",
        reward=1.0, success=True, turns=1, tokens=15, loss_tokens=5, oldest_version=0,
    )  # fmt: skip


def committed(t_s: float, *prompt_ids: int) -> UpdateCommitted:
    return UpdateCommitted(
        t_s=t_s, update=1, prompt_ids=prompt_ids, groups=1, trajectories=1, loss_tokens=5, tokens=15, reward_mean=1.0,
        success_fraction=1.0, staleness_max=0, staleness_mean_tokens=0.0, window_staleness_max=0, seconds=1.0,
        metrics={},
    )  # fmt: skip


def paused(t_s: float, prompt_id: int, *, replica: int = 0) -> TaskPaused:
    return TaskPaused(t_s=t_s, split="train", prompt_id=prompt_id, member=0, replica=replica, reason="no_room")


def resumed(t_s: float, prompt_id: int) -> TaskResumed:
    return TaskResumed(t_s=t_s, split="train", prompt_id=prompt_id, member=0, replica=0)


def issued(t_s: float, prompt_id: int) -> PromptIssued:
    return PromptIssued(t_s=t_s, prompt_id=prompt_id, task_id="x", start_version=0, replica=0)


def spent(*events: Event) -> dict[str, float]:
    account = Account()
    for event in events:
        account.observe(event)
    found = account.summary()
    assert found is not None
    return {category: round(seconds, 9) for category, seconds in found.items() if round(seconds, 9)}


def test_a_run_by_hand() -> None:
    # Rank 0 generates from 1 s: two turns overlap in [3, 4). Rank 1 trains from 8 s.
    found = spent(
        started(),
        state(0.0, 0, "rollout", "idle_no_work"),
        state(0.0, 1, "actor", "waiting_data"),
        issued(1.0, 0),
        admitted(1.0, 0),
        admitted(1.0, 1),
        state(1.0, 0, "rollout", "generating"),
        turn(4.0, 0, 0, prefill_s=1.0, decode_s=1.0),  # prefill [2, 3), decode [3, 4)
        turn(5.0, 1, 0, prefill_s=0.5, decode_s=1.5),  # prefill [3, 3.5), decode [3.5, 5)
        finished(7.0, 0),
        state(7.0, 0, "rollout", "idle_staleness"),
        state(8.0, 1, "actor", "training"),
        committed(10.0, 0),
    )
    assert found == {
        "useful_prefill": 1.0,
        "useful_decode": 0.5,  # half of [3, 4)
        "in_flight": 1.5,  # the other half, and [4, 5) alone
        "env_wait": 1.0 + 2.0,  # [1, 2) and [5, 7)
        "staleness_wait": 3.0,
        "starve_wait": 7.0,
        "useful_train": 2.0,
    }
    assert sum(found.values()) == 2 * 9.0


def test_what_was_computed_before_and_why_it_is_again() -> None:
    def run(**second: Any) -> dict[str, float]:
        # First turn 10 + 5 tokens; the second has 20: 14 were computed before (not the last sampled one), 6 are new.
        return spent(
            started(1),
            state(0.0, 0, "rollout", "generating"),
            admitted(0.0, 0),
            turn(2.0, 0, 0, prefill_s=1.0, decode_s=1.0),
            turn(6.0, 0, 1, context_tokens=20, prefill_s=2.0, decode_s=2.0, **second),
            finished(6.0, 0),
            committed(6.0, 0),
        )

    assert run(cached_tokens=14) == {"useful_prefill": 3.0, "useful_decode": 3.0}
    assert run(cached_tokens=0) == {"useful_prefill": 1.6, "recompute_evicted": 1.4, "useful_decode": 3.0}
    assert run(cached_tokens=10) == {"useful_prefill": 2.2, "recompute_evicted": 0.8, "useful_decode": 3.0}
    assert run(cached_tokens=0, version=1) == {"useful_prefill": 1.6, "recompute_version": 1.4, "useful_decode": 3.0}


def test_context_that_new_weights_made_void_within_a_turn_is_no_useful_decoding() -> None:
    found = spent(
        started(1),
        state(0.0, 0, "rollout", "generating"),
        admitted(0.0, 0),
        turn(4.0, 0, 0, prefill_s=1.0, decode_s=3.0, recompute_s=0.75, first_version=0, version=1),
        turn(6.0, 0, 1, context_tokens=15, cached_tokens=14, prefill_s=0.0, decode_s=2.0, recompute_s=0.5,
             first_version=1, version=1),
        finished(6.0, 0),
        committed(6.0, 0),
    )  # fmt: skip
    assert found == {"useful_prefill": 1.0, "useful_decode": 3.75, "recompute_version": 0.75, "recompute_evicted": 0.5}


def test_given_up_evaluated_and_retried_work_is_no_useful_work() -> None:
    found = spent(
        started(1),
        state(0.0, 0, "rollout", "generating"),
        *(admitted(0.0, 0), admitted(0.0, 1), admitted(0.0, 0, split="eval")),
        turn(1.0, 0, 0, prefill_s=0.0, decode_s=1.0),  # retried below
        turn(3.0, 1, 0, prefill_s=0.0, decode_s=2.0),  # dropped
        turn(6.0, 0, 0, split="eval", prefill_s=0.0, decode_s=3.0),
        Dropped(t_s=6.0, trajectory_id=1, prompt_id=1, member=0, reason="environment_raised", tokens=5),
        admitted(6.0, 0, attempt=1),
        turn(10.0, 0, 0, attempt=1, prefill_s=0.0, decode_s=4.0),
        committed(10.0, 0),
    )
    assert found == {"discarded": 3.0, "eval": 3.0, "useful_decode": 4.0}


def test_no_turn_is_computed_while_weights_are_loaded_or_the_rank_trains() -> None:
    found = spent(
        started(1),
        state(0.0, 0, "rollout", "generating"),
        admitted(0.0, 0),
        state(2.0, 0, "rollout", "loading"),
        state(3.0, 0, "rollout", "generating"),
        state(4.0, 0, "actor", "training"),
        state(6.0, 0, "actor", "waiting_data"),
        turn(8.0, 0, 0, prefill_s=0.0, decode_s=8.0),
        committed(8.0, 0),
    )
    assert found == {"useful_decode": 5.0, "sync": 1.0, "useful_train": 2.0}


def test_turns_that_queue_while_none_runs_are_short_of_memory() -> None:
    found = spent(
        started(1),
        state(0.0, 0, "rollout", "generating"),
        admitted(0.0, 0),
        turn(5.0, 0, 0, queued_s=2.0, prefill_s=0.0, decode_s=2.0),
        committed(5.0, 0),
    )
    assert found == {"env_wait": 1.0, "kv_stall": 2.0, "useful_decode": 2.0}


def test_a_turn_that_ends_the_smallest_possible_moment_before_the_commit() -> None:
    before = math.nextafter(8.0, 0.0)
    found = spent(
        started(1),
        state(0.0, 0, "rollout", "generating"),
        admitted(0.0, 0),
        turn(before, 0, 0, queued_s=0.0, prefill_s=0.0, decode_s=2.0),
        committed(8.0, 0),
    )
    assert found == {"env_wait": 6.0, "useful_decode": 2.0}


def test_ranks_of_one_trainer_are_charged_alike() -> None:
    found = spent(
        started(4),  # rank 0 generates, three ranks train
        state(0.0, 0, "rollout", "idle_no_work"),
        issued(0.0, 0),
        state(0.0, 1, "actor", "waiting_data"),
        state(1.0, 1, "actor", "training"),
        committed(3.0, 0),
    )
    assert found == {"no_work": 3.0, "starve_wait": 3.0, "useful_train": 6.0}


def test_shares_add_up_to_the_time_in_which_any_is_open() -> None:
    starts, ends = np.array([0.0, 1.0, 1.0, 6.0]), np.array([3.0, 2.0, 5.0, 7.0])
    shares = Shares(starts, ends, [(4.0, 4.5)], (0.0, 8.0))
    #  [0,1) one, [1,2) three, [2,3) two, [3,4) and [4.5,5) one, [6,7) one
    assert shares.of(starts, ends).tolist() == pytest.approx([1 + 1 / 3 + 1 / 2, 1 / 3, 1 / 3 + 1 / 2 + 1.5, 1.0])
    assert shares.of(starts, ends).sum() == pytest.approx(5.5)
    assert shares.count_at(np.array([0.5, 1.5, 4.2, 5.5])).tolist() == [1, 3, 0, 0]


def test_intervals_are_cut_to_the_span() -> None:
    changes = [(1.0, "a"), (3.0, "b"), (3.0, "c"), (9.0, "d")]
    assert intervals(changes, 2.0, 5.0) == [(2.0, 3.0, "a"), (3.0, 5.0, "c")]
    assert intervals([], 0.0, 1.0) == []


def test_an_engine_that_stands_still_while_a_task_is_paused_lacks_memory() -> None:
    def run(*pauses: Event) -> dict[str, float]:
        return spent(
            started(1),
            state(0.0, 0, "rollout", "generating"),
            admitted(0.0, 0),
            admitted(0.0, 1),
            turn(2.0, 0, 0, prefill_s=1.0, decode_s=1.0),
            *pauses,
            turn(8.0, 1, 0, prefill_s=1.0, decode_s=1.0),
            finished(8.0, 0),
            finished(8.0, 1),
            committed(10.0, 0, 1),
        )

    useful = {"useful_prefill": 2.0, "useful_decode": 2.0}
    assert run() == {**useful, "env_wait": 6.0}  # [2, 6) and [8, 10)
    assert run(paused(3.0, 1), resumed(6.0, 1)) == {**useful, "kv_stall": 3.0, "env_wait": 3.0}
    # Two at once are one standstill; what overlaps with a turn is none.
    assert run(paused(1.0, 0), paused(3.0, 1), resumed(5.0, 0), resumed(7.0, 1)) == {
        **useful,
        "kv_stall": 4.0,
        "env_wait": 2.0,
    }
    assert run(paused(3.0, 1)) == {**useful, "kv_stall": 3.0, "env_wait": 3.0}  # until its attempt ends, at 8
    assert run(paused(3.0, 1, replica=1)) == run()
    moved = TaskMigrated(t_s=4.0, split="train", prompt_id=1, member=0, from_replica=1, to_replica=0, reason="no_room")
    assert run(paused(3.0, 1, replica=1), moved, resumed(6.0, 1)) == {**useful, "kv_stall": 2.0, "env_wait": 4.0}
