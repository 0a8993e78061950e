"""The runtime in virtual time: schedules, staleness, failures, losses of ranks. Exact figures, no clock of ours."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.virtual_runs import HEAVY_TAIL, books_balance, virtual_run

from tiderl.api.virtual import Persisted
from tiderl.data.errors import (
    ConfigurationError,
    DeadlockError,
    EnvironmentRaised,
    EnvironmentTimeout,
    HopelessEnvironment,
    InfrastructureFault,
    VerifierFault,
)
from tiderl.data.events import (
    Dropped,
    EvalFinished,
    PromptIssued,
    RankLostEvent,
    RoleChanged,
    StepStarted,
    TaskAdmitted,
    TurnFinished,
    UpdateCommitted,
    VersionLoaded,
    VersionPublished,
)
from tiderl.runtime.training import combined_metrics


@pytest.mark.parametrize("strategy", ["sync", "areal"])
def test_every_group_is_trained_once_and_nothing_is_left_over(strategy) -> None:
    run = virtual_run([f"schedule.strategy={strategy}"])
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []
    assert [row.status for row in run.replay.trajectories] == ["trained"] * 6 * 3 * 4
    assert len(run.replay.updates) == 6


@pytest.mark.parametrize("eta", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_token_is_older_than_the_bound_under_heavy_tails(eta, seed) -> None:
    run = virtual_run(
        [f"schedule.max_staleness={eta}", f"seed={seed}", "train.updates=12", "cluster.ranks=4", HEAVY_TAIL]
    )
    updates = run.log.of(UpdateCommitted)
    assert len(updates) == 12
    assert max(u.staleness_max for u in updates) <= eta
    if eta == 1:
        assert max(u.staleness_max for u in updates) == 1, "the bound is used, not only kept"


def test_sync_waits_for_the_new_version_before_it_starts_anything() -> None:
    run = virtual_run(["schedule.strategy=sync"])
    version = -1
    for event in run.log.events:
        if isinstance(event, VersionLoaded):
            version = event.version
        if isinstance(event, PromptIssued):
            assert event.start_version == version == event.prompt_id // 3
    assert all(u.staleness_max == 0 for u in run.log.of(UpdateCommitted))


def test_areal_overlaps_rollout_and_training() -> None:
    """Virtual seconds are exact: with equal ranks and work, overlap is faster, and the trainer's waits are shorter."""
    overrides = ["train.updates=20", HEAVY_TAIL]
    overlapped = virtual_run([*overrides, "schedule.max_staleness=2"])
    barrier = virtual_run([*overrides, "schedule.strategy=sync"])

    def end(run) -> float:
        return run.log.of(UpdateCommitted)[-1].t_s

    assert end(overlapped) < 0.8 * end(barrier)


def test_a_version_is_published_only_after_its_update_is_committed() -> None:
    run = virtual_run([])
    committed = 0
    for event in run.log.events:
        if isinstance(event, UpdateCommitted):
            committed = event.update
        if isinstance(event, VersionPublished):
            assert event.version == committed


def test_published_versions_are_every_kth_and_the_last() -> None:
    run = virtual_run(["schedule.publish_every_updates=2", "train.updates=7"])
    assert [e.version for e in run.log.of(VersionPublished)] == [0, 2, 4, 6, 7]
    assert max(u.staleness_max for u in run.log.of(UpdateCommitted)) <= 1


def test_evaluation_is_pinned_to_one_version_and_holds_its_replica() -> None:
    run = virtual_run([HEAVY_TAIL, "eval.prompts=20", "cluster.ranks=4"])
    assert [e.version for e in run.log.of(EvalFinished)] == [0, 3, 6]
    assert all(e.prompts == 20 and e.failed == 0 for e in run.log.of(EvalFinished))
    turns: dict[tuple[int, int], set[int]] = {}
    round_of = {0: 0}
    for event in run.log.events:
        if isinstance(event, TurnFinished) and event.split == "eval":
            turns.setdefault((len(round_of), event.prompt_id), set()).add(event.version)
        if isinstance(event, EvalFinished):
            round_of[len(round_of)] = event.version
    assert {frozenset(versions) for versions in turns.values()} <= {frozenset({v}) for v in (0, 3, 6)}


def test_no_evaluation_when_it_is_switched_off() -> None:
    assert virtual_run(["eval.every_updates=0"]).log.of(EvalFinished) == []


def test_one_rank_takes_turns_between_rollout_and_training() -> None:
    run = virtual_run(["cluster.ranks=1"])
    roles = [(e.from_role, e.to_role) for e in run.log.of(RoleChanged)]
    assert roles == [("rollout", "actor"), ("actor", "rollout")] * 6
    assert books_balance(run.replay) == []


def test_several_optimizer_steps_consume_the_batch_in_parts() -> None:
    run = virtual_run(["train.steps_per_batch=3"])
    assert run.outcome.updates == 6
    assert books_balance(run.replay) == []


def test_fewer_slots_than_a_group_has_members_only_slow_the_run_down() -> None:
    run = virtual_run(["env.slots=2"])
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []


# --- failures (architecture §8)


def test_an_environment_fault_is_retried_once_under_the_same_id() -> None:
    run = virtual_run(
        [],
        fault=lambda key, turn: (
            EnvironmentRaised("boom") if (key.prompt_id, key.member, key.attempt, turn) == (1, 2, 0, 1) else None
        ),
    )
    assert books_balance(run.replay) == []
    assert run.log.of(Dropped) == []
    starts = [e for e in run.log.of(TaskAdmitted) if (e.split, e.prompt_id, e.member) == ("train", 1, 2)]
    assert [e.attempt for e in starts] == [0, 1]
    assert starts[0].trajectory_id == starts[1].trajectory_id


def test_a_second_environment_fault_drops_and_refills() -> None:
    run = virtual_run(
        [],
        fault=lambda key, turn: (
            EnvironmentTimeout("slow")
            if (key.prompt_id, key.member) == (1, 2) and key.attempt < 2 and turn == 0
            else None
        ),
    )
    assert books_balance(run.replay) == []
    assert [(e.prompt_id, e.member, e.reason) for e in run.log.of(Dropped)] == [(1, 2, "environment_timeout")]
    starts = [e for e in run.log.of(TaskAdmitted) if (e.split, e.prompt_id, e.member) == ("train", 1, 2)]
    assert [e.attempt for e in starts] == [0, 1, 2]
    assert starts[1].trajectory_id != starts[2].trajectory_id
    assert len(run.replay.trajectories) == 6 * 3 * 4 + 1


def test_after_three_refills_the_group_is_dropped_and_another_prompt_takes_its_place() -> None:
    run = virtual_run(
        [],
        fault=lambda key, turn: (
            EnvironmentRaised("always") if (key.split, key.prompt_id, key.member) == ("train", 2, 0) else None
        ),
    )
    assert books_balance(run.replay) == []
    assert run.outcome.updates == 6
    of_group = [row for row in run.replay.trajectories if row.prompt_id == 2]
    assert all(row.status == "dropped" for row in of_group)
    reasons = sorted(str(row.reason) for row in of_group)
    assert reasons == ["environment_raised"] * 4 + ["group_dropped"] * 3
    assert len(run.replay.prompts) == 6 * 3 + 1


def test_an_infrastructure_fault_is_refilled_without_limit_and_never_trained() -> None:
    run = virtual_run(
        [],
        fault=lambda key, turn: (
            InfrastructureFault("worker died")
            if (key.prompt_id, key.member) == (0, 0) and key.attempt < 8 and turn == 0 and key.split == "train"
            else None
        ),
    )
    assert books_balance(run.replay) == []
    assert [e.reason for e in run.log.of(Dropped)] == ["infrastructure"] * 8


def test_a_verifier_is_asked_three_times_before_the_trajectory_is_dropped() -> None:
    asked: list[int] = []

    def score(key):
        if (key.split, key.prompt_id, key.member) == ("train", 3, 1):
            asked.append(key.attempt)
            return VerifierFault("judge is down") if key.attempt == 0 else 0.25
        return None

    run = virtual_run([], score=score)
    assert asked == [0, 0, 0, 1]
    assert [e.reason for e in run.log.of(Dropped)] == ["verifier_fault"]
    assert books_balance(run.replay) == []


def test_a_verifiers_score_replaces_the_sum_of_step_rewards() -> None:
    run = virtual_run([], score=lambda key: 0.25)
    assert {u.reward_mean for u in run.log.of(UpdateCommitted)} == {0.25}


def test_a_failing_evaluation_task_is_counted_not_hidden() -> None:
    run = virtual_run(
        [], fault=lambda key, turn: EnvironmentRaised("boom") if key.split == "eval" and key.prompt_id == 4 else None
    )
    assert [(e.prompts, e.failed) for e in run.log.of(EvalFinished)] == [(4, 1)] * 3


def test_a_run_that_can_make_no_progress_says_who_waits() -> None:
    """Weights that never finish loading: nothing can start, and the message names the loop that waits for them."""

    def never_load(ports) -> None:
        for engine in ports.cluster.engines.values():
            engine.load_weights = lambda handle: asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match="pull"):
        virtual_run([], change=never_load)


def test_a_schedule_that_starves_itself_is_a_deadlock_error_in_both_clocks() -> None:
    """Publishing every third update under a bound of one: refused by the configuration, and by the runtime itself."""

    def starve(settings):
        return msgspec.structs.replace(settings, publish_every_updates=3)

    with pytest.raises(DeadlockError, match=r"waits for update 3 .* blocked by staleness; versions loaded: \{0: 0\}"):
        virtual_run([], settings=starve)


# --- ranks lost and back


def lose_at(seconds: float, rank: int, away_s: float = 2.0):
    async def beside(run, ports) -> None:
        await asyncio.sleep(seconds)
        ports.cluster.lose(rank)
        await asyncio.sleep(away_s)
        ports.cluster.restore(rank)

    return beside


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.0, 2.0])
def test_a_lost_rollout_rank_costs_its_tasks_only(seconds) -> None:
    run = virtual_run([HEAVY_TAIL, "cluster.ranks=4"], beside=lose_at(seconds, rank=0))
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []
    assert [e.rank for e in run.log.of(RankLostEvent)] == [0]
    assert {e.reason for e in run.log.of(Dropped)} <= {"rank_lost"}


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1.0, 2.0, 3.0])
def test_a_lost_trainer_rank_is_restored_and_no_update_is_made_twice(seconds) -> None:
    run = virtual_run([HEAVY_TAIL, "checkpoint.every_updates=2"], beside=lose_at(seconds, rank=1))
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []
    assert [u.update for u in run.log.of(UpdateCommitted)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("version", [1, 2, 5])
def test_a_trainer_rank_lost_while_its_version_is_loaded_costs_no_more_than_its_time(version) -> None:
    """The replica loads from what was published before, and the old versions are deleted when the rank is back."""

    async def beside(run, ports) -> None:
        while not any(e.version == version for e in ports.recorder.events if isinstance(e, VersionPublished)):
            await asyncio.sleep(0.0005)
        ports.cluster.lose(1)
        await asyncio.sleep(2.0)
        ports.cluster.restore(1)

    run = virtual_run([HEAVY_TAIL], beside=beside)
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []
    assert [e.rank for e in run.log.of(RankLostEvent)] == [1]
    assert [u.update for u in run.log.of(UpdateCommitted)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("strategy", ["sync", "areal"])
def test_a_trainer_rank_that_died_while_it_waited_is_restored_before_it_trains(strategy) -> None:
    """It is back before anybody calls it again: nothing failed, and still its model is not the one that was trained."""

    async def beside(run, ports) -> None:
        while not (
            ports.recorder.events and run._training and run._training.waiting and run._training.buffer.updates_done
        ):
            await asyncio.sleep(0.001)
        ports.cluster.lose(1)
        await asyncio.sleep(0.001)
        ports.cluster.restore(1)
        assert run._training.waiting

    slow = "env.wait={kind: lognormal, median_s: 2.0, sigma: 0.2}"
    run = virtual_run([slow, f"schedule.strategy={strategy}"], beside=beside)  # raises where an empty rank trains
    assert [e.rank for e in run.log.of(RankLostEvent)] == [1]
    assert [u.update for u in run.log.of(UpdateCommitted)] == [1, 2, 3, 4, 5, 6]
    assert books_balance(run.replay) == []


def test_a_trainer_rank_lost_in_the_middle_of_a_streamed_update_computes_its_groups_again() -> None:
    lost_at: list[int] = []

    async def beside(run, ports) -> None:
        while not (run._training and len(run._training.buffer.taken) == 2):
            await asyncio.sleep(0.001)
        lost_at.append(run._training.buffer.updates_done)
        ports.cluster.lose(1)
        await asyncio.sleep(0.01)
        ports.cluster.restore(1)

    run = virtual_run([HEAVY_TAIL, "schedule.max_staleness=2"], beside=beside)
    assert lost_at, "the trainer held two groups of three"
    assert [u.update for u in run.log.of(UpdateCommitted)] == [1, 2, 3, 4, 5, 6]
    for update in run.log.of(UpdateCommitted):  # every token of the batch is in the gradient exactly once
        assert update.metrics["tokens"] == update.tokens
    assert books_balance(run.replay) == []


# --- the trainer takes groups as they come


def test_the_trainer_starts_before_its_batch_is_complete_and_ends_sooner() -> None:
    overrides = ["train.updates=12", "train.global_batch_groups=4", "schedule.max_staleness=2", HEAVY_TAIL]
    streamed = virtual_run(overrides)
    started = {e.update: e for e in streamed.log.of(StepStarted)}
    early = [u for u in streamed.log.of(UpdateCommitted) if len(started[u.update].prompt_ids) < u.groups]
    assert early, "no update began before its batch was complete"
    for update in early:
        assert update.waited_s > started[update.update].waited_s
        assert update.prompt_ids[: len(started[update.update].prompt_ids)] == started[update.update].prompt_ids
    several_steps = virtual_run([*overrides, "train.steps_per_batch=2"])  # must wait for the whole batch
    assert all(len(e.prompt_ids) == 4 for e in several_steps.log.of(StepStarted))


def test_a_run_that_is_stopped_in_the_middle_of_an_update_leaves_its_groups_ready() -> None:
    async def beside(run, ports) -> None:
        while not (run._training and run._training.buffer.taken and run._training.waiting):
            await asyncio.sleep(0.001)
        run.request_stop()

    persisted = Persisted()
    stopped = virtual_run([HEAVY_TAIL, "seed=3"], beside=beside, persisted=persisted)
    assert stopped.outcome.outcome == "stopped"
    assert books_balance(stopped.replay) == []
    assert sum(row.status == "ready" for row in stopped.replay.trajectories) > 0
    rest = virtual_run([HEAVY_TAIL, "seed=3"], persisted=persisted)
    assert rest.outcome.outcome == "done"
    assert books_balance(rest.replay) == []


# --- staleness by window


@pytest.mark.parametrize("eta", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_under_window_no_group_waits_longer_than_the_bound_and_versions_mix(eta, seed) -> None:
    window = ["schedule.staleness_counts=window", f"schedule.max_staleness={eta}", f"seed={seed}"]
    run = virtual_run([*window, "train.updates=15", "cluster.ranks=4", HEAVY_TAIL])
    updates = run.log.of(UpdateCommitted)
    assert len(updates) == 15
    assert max(u.window_staleness_max for u in updates) <= eta
    assert max(u.staleness_max for u in updates) > eta, "trajectories go on over new weights"
    assert books_balance(run.replay) == []
    in_flight = most = 0
    for event in run.log.events:
        in_flight += isinstance(event, PromptIssued) - (event.groups if isinstance(event, UpdateCommitted) else 0)
        most = max(most, in_flight)
    assert most == (eta + 1) * 3


def test_window_is_faster_than_oldest_token_at_the_same_bound_under_heavy_tails() -> None:
    overrides = ["train.updates=20", "schedule.max_staleness=1", HEAVY_TAIL]
    strict = virtual_run(overrides).log.of(UpdateCommitted)[-1].t_s
    window = virtual_run([*overrides, "schedule.staleness_counts=window"]).log.of(UpdateCommitted)[-1].t_s
    assert window < 0.9 * strict


def test_sync_is_strict_however_staleness_counts() -> None:
    run = virtual_run(["schedule.strategy=sync", "schedule.staleness_counts=window", HEAVY_TAIL])
    assert {u.staleness_max for u in run.log.of(UpdateCommitted)} == {0}
    assert [item.key for item in run.resolved.no_effect] == ["schedule.staleness_counts"]


def test_a_trainer_rank_lost_in_the_warm_start_makes_it_again() -> None:
    warmed: list[int] = []

    def count(ports) -> None:
        warm_up = ports.cluster.update.warm_up

        async def counted(*arguments):
            warmed.append(1)
            if len(warmed) == 1:
                ports.cluster.lose(1)
                asyncio.get_running_loop().call_later(1.0, ports.cluster.restore, 1)
            return await warm_up(*arguments)

        ports.cluster.update.warm_up = counted

    run = virtual_run([], change=count)
    assert len(warmed) == 2
    assert run.outcome.outcome == "done"
    assert run.replay.checkpoints[0].update_no == 0
    assert books_balance(run.replay) == []


def test_the_only_rank_lost_in_the_middle_is_survived() -> None:
    run = virtual_run(["cluster.ranks=1", HEAVY_TAIL], beside=lose_at(1.0, rank=0))
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []


# --- stopping


def test_a_stop_finishes_the_update_and_keeps_the_books() -> None:
    async def beside(run, ports) -> None:
        await asyncio.sleep(40.0)
        run.request_stop()

    run = virtual_run([HEAVY_TAIL, "train.updates=50"], beside=beside)
    assert run.outcome.outcome == "stopped"
    assert 0 < run.outcome.updates < 50
    assert books_balance(run.replay) == []
    assert run.replay.checkpoints[-1].update_no == run.outcome.updates


def test_bad_expert_is_a_configuration_error() -> None:
    """A warm start needs an expert: simulated environments have none, and say so."""
    from dataclasses import replace

    from support.virtual_runs import Log, resolved_example

    from tiderl.api.virtual import Persisted, build_ports
    from tiderl.data.settings import WarmupSettings
    from tiderl.runtime.run import Run
    from tiderl.sim.loop import run_virtual

    resolved = resolved_example()
    resolved = replace(resolved, settings=msgspec.structs.replace(resolved.settings, warmup=WarmupSettings(5, 5, 1e-3)))

    async def main() -> None:
        await Run(build_ports(resolved, Persisted(), Log()), resolved.settings, resolved.strategy).run()

    with pytest.raises(ConfigurationError, match="no expert"):
        run_virtual(main)


def test_steps_report_their_wait_and_readiness() -> None:
    steps = virtual_run([HEAVY_TAIL]).log.of(StepStarted)
    assert [s.update for s in steps] == [1, 2, 3, 4, 5, 6]
    assert all(s.ready_groups >= len(s.prompt_ids) >= 1 and s.waited_s >= 0 and s.oldest_ready_s >= 0 for s in steps)


def test_nothing_is_started_again_and_again_on_a_rank_whose_loss_is_not_known_yet() -> None:
    """The calls fail at once, the report of the loss comes a second later: each task is dropped once, not a thousand
    times."""

    def slow_reports(ports) -> None:
        fast = ports.cluster.next_change

        async def next_change():
            change = await fast()
            await asyncio.sleep(1.0)
            return change

        ports.cluster.next_change = next_change

    run = virtual_run(["cluster.ranks=2", HEAVY_TAIL], beside=lose_at(1.0, rank=0, away_s=3.0), change=slow_reports)
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []
    per_member = [(e.prompt_id, e.member) for e in run.log.of(Dropped)]
    assert per_member
    assert len(per_member) == len(set(per_member))


# --- found by newcomers


def test_an_environment_that_only_fails_ends_the_run_with_its_reason() -> None:
    """Refills have no end of their own: after two failures in a row for every slot the run says what fails."""
    with pytest.raises(
        HopelessEnvironment, match=r"50 episodes in a row failed, the last with EnvironmentRaised: boom"
    ):
        virtual_run(
            ["env.slots=4"], fault=lambda key, turn: EnvironmentRaised("boom") if key.split == "train" else None
        )


def test_an_environment_that_lets_no_group_finish_ends_the_run() -> None:
    """Most episodes succeed, but one member of every group never does: without a limit prompts would go by for ever."""

    def fault(key, turn):
        return EnvironmentRaised("boom") if (key.split, key.member, turn) == ("train", 1, 1) else None

    with pytest.raises(HopelessEnvironment, match=r"12 groups in a row were given up, the last for EnvironmentRaised"):
        virtual_run([], fault=fault)


def test_one_success_between_failures_goes_on() -> None:
    def fault(key, turn):
        flaky = key.split == "train" and key.member == 0 and key.attempt < 2 and turn == 0
        return EnvironmentRaised("boom") if flaky else None

    run = virtual_run(["env.slots=4", "train.updates=40"], fault=fault)
    assert len(run.log.of(Dropped)) == 40 * 3
    assert run.outcome.outcome == "done"
    assert books_balance(run.replay) == []


def test_what_running_members_had_sampled_counts_when_their_group_is_dropped() -> None:
    """Member 0 fails for good at its third turn while the others are still in a long wait of theirs."""

    def fault(key, turn):
        return EnvironmentRaised("late") if (key.split, key.prompt_id, key.member, turn) == ("train", 0, 0, 2) else None

    run = virtual_run(["env.wait={kind: lognormal, median_s: 5.0, sigma: 0.0}"], fault=fault)
    dropped = [e for e in run.log.of(Dropped) if e.reason == "group_dropped"]
    assert len(dropped) == 3
    assert all(e.tokens > 0 for e in dropped)


def test_metrics_of_several_steps_are_combined_by_their_meaning() -> None:
    first = {
        "loss": 1.0,
        "tokens": 100.0,
        "logprob_gap_mean": 4e-8,
        "logprob_gap_max": 9e-8,
        "logprob_gap_tokens": 10.0,
    }
    later = {"loss": 3.0, "tokens": 60.0, "logprob_gap_mean": 0.0, "logprob_gap_max": 0.0, "logprob_gap_tokens": 0.0}
    assert combined_metrics([first, later]) == {
        "loss": 2.0,
        "tokens": 160.0,
        "logprob_gap_mean": 4e-8,
        "logprob_gap_max": 9e-8,
        "logprob_gap_tokens": 10.0,
    }
