"""Replays: a run takes as long again under its own schedule, and costs of one schedule foretell another.

The recorded runs are simulations, whose costs are known; live ones are measured in docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tiderl.api.trace import recorded, replay
from tiderl.api.virtual import simulate
from tiderl.config.render import derived_keys
from tiderl.cost.calibrate import Calibration
from tiderl.cost.recorded import RESET, read_recording
from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Action, TaskKey
from tiderl.sim.environments import SimEnvironments
from tiderl.sim.loop import run_virtual
from tiderl.sim.replay import TracedWorkload, groups_of_file, groups_of_run
from tiderl.sim.traces import TracedTrajectory, TracedTurn, read_trace

ROOT = Path(__file__).parents[2]
BUILTIN = ROOT / "examples" / "builtin.yaml"
TAU = ROOT / "examples" / "sim" / "traces" / "tau_airline_gpt4o.csv"
SMALL = ("train.updates=6", "train.global_batch_groups=4", "eval.every_updates=0", "seed=3")
PROFILE = (
    "sim.workload={turns_median: 2, turns_sigma: 0, first_observation_tokens: 9, observation_tokens: 2, "
    "observation_sigma: 0, action_tokens: 2, action_sigma: 0, step_s: 1}"
)
WAIT = "env.wait={kind: lognormal, median_s: 0.2, sigma: 1.0}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: `sync`, `areal`, and `waits`, in which the world is slow."""
    root = tmp_path_factory.mktemp("runs")
    for name, overrides in {
        "sync": ["schedule.strategy=sync"],
        "areal": ["schedule.strategy=areal"],
        "waits": ["schedule.strategy=areal", WAIT],
    }.items():
        simulate(BUILTIN, [*SMALL, *overrides], save=str(root / name))
    return root


def replayed(run: Path, overrides: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    return replay(run, overrides, **options).to_json()


@pytest.mark.parametrize("name", ["sync", "areal", "waits"])
def test_a_run_takes_as_long_again(folder: Path, name: str) -> None:
    result = replayed(folder / name)
    assert result["error_fraction"] < 2e-3
    assert result["goodput_error_fraction"] < 2e-3
    assert result["staleness_error_fraction"] < 2e-3
    assert result["trained_loss_tokens"] == recorded(folder / name).metrics.loss_tokens
    assert result["recycled_groups"] == 0


def test_waits_for_kv_room_are_no_part_of_what_is_replayed(tmp_path: Path) -> None:
    scarce = ["rollout.max_context_tokens=128", "rollout.kv_budget_tokens=250", "env.deadline_s=300", WAIT]
    runs = {
        policy: simulate(BUILTIN, [*SMALL, *scarce, f"rollout.kv_policy={policy}"], save=str(tmp_path / policy))
        for policy in ("lru", "ctb")
    }
    assert runs["ctb"]["tasks_paused"] > 0
    calls = {
        policy: {(call.key, call.turn): call.seconds for call in recorded(tmp_path / policy).recording.env_calls}
        for policy in runs
    }
    common = calls["lru"].keys() & calls["ctb"].keys()
    assert len(common) > 500
    for call in common:
        assert calls["ctb"][call] == pytest.approx(calls["lru"][call], abs=1e-9)
    result = replayed(tmp_path / "ctb")
    assert result["kv_policy"] == recorded(tmp_path / "ctb").metrics.figures()["kv_policy"] == "ctb"
    assert result["trained_loss_tokens"] == runs["ctb"]["trained_loss_tokens"]
    assert result["measured_step_s"] is not None and result["recycled_groups"] == 0
    other = replayed(tmp_path / "ctb", ["rollout.kv_policy=lru"])
    assert (other["kv_policy"], other["measured_step_s"], other["no_effect"]) == ("lru", None, [])


@pytest.mark.parametrize(("run", "costs"), [("areal", "sync"), ("sync", "areal"), ("waits", "sync")])
def test_costs_of_one_schedule_foretell_another(folder: Path, run: str, costs: str) -> None:
    result = replayed(folder / run, calibrated_by=str(folder / costs))
    assert result["error_fraction"] < 5e-3 and result["goodput_error_fraction"] < 5e-3
    assert result["calibration"]["run"] == str(folder / costs)


def test_another_schedule_of_a_recorded_workload_is_predicted_and_compared_with_nothing(folder: Path) -> None:
    """What `sync` recorded, played as `areal`, takes what `areal` really takes: the tasks are the same."""
    result = replayed(folder / "sync", ["schedule.strategy=areal"])
    measured = recorded(folder / "areal").metrics.figures()
    assert result["strategy"] == "areal"
    assert result["measured_step_s"] is None and result["error_fraction"] is None
    assert result["predicted_goodput_tokens_per_s"] == pytest.approx(measured["goodput_tokens_per_s"], rel=5e-3)
    assert result["predicted_staleness_mean_tokens"] == pytest.approx(measured["staleness_mean_tokens"], rel=5e-3)


def test_prompts_beyond_the_recorded_ones_play_recorded_groups_again(folder: Path) -> None:
    result = replayed(folder / "sync", ["train.updates=9"])
    assert result["updates"] == 9
    assert result["recycled_groups"] == 3 * 4


def test_another_number_of_updates_is_compared_with_nothing(folder: Path) -> None:
    result = replayed(folder / "sync", ["train.updates=5"])
    assert result["measured_step_s"] is None and result["error_fraction"] is None
    assert replayed(folder / "sync", ["train.updates=6"])["measured_step_s"] is not None


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sim.cost.iteration_s=1", "sim.cost.iteration_s"),
        ("sim.cost={iteration_s: 1}", "sim.cost.iteration_s"),
        ("sim.workload_seed=9", "sim.workload_seed"),
        (PROFILE, "sim.workload"),
        (WAIT, "env.wait"),
        ("env.workers=3", "env.workers"),
        ("rollout.image_window=5", "rollout.image_window"),
    ],
)
def test_what_a_replay_ignores_is_said_and_keeps_the_measured_figures(folder: Path, override: str, key: str) -> None:
    plain, told = replayed(folder / "sync"), replayed(folder / "sync", [override])
    assert [line.split(" has ")[0] for line in told["no_effect"]] == [key]
    assert told["log_sha256"] == plain["log_sha256"] and told["measured_step_s"] == plain["measured_step_s"]


def test_hardware_still_sets_the_engines_limits_and_is_not_called_ignored(folder: Path) -> None:
    plain, told = replayed(folder / "sync"), replayed(folder / "sync", ["sim.hardware=H100"])
    assert told["no_effect"] == [] and told["log_sha256"] != plain["log_sha256"]


def test_a_cost_that_the_run_says_nothing_about_counts_and_is_not_called_ignored(folder: Path) -> None:
    plain, told = (replayed(folder / "sync", [*more]) for more in ([], ["sim.cost.max_batch=2"]))
    assert told["no_effect"] == [] and told["predicted_step_s"] > 1.1 * plain["predicted_step_s"]


def test_a_replayed_file_ignores_the_profile_but_not_the_costs() -> None:
    few = ["train.updates=1", "train.global_batch_groups=2", "algorithm.group_size=4"]
    told = replayed(TAU, [*few, "sim.workload_seed=9", "sim.cost.iteration_s=1"])
    assert [line.split(" has ")[0] for line in told["no_effect"]] == ["sim.workload_seed"]


def test_a_replay_is_the_same_every_time(folder: Path) -> None:
    assert replayed(folder / "waits")["log_sha256"] == replayed(folder / "waits")["log_sha256"]


def test_the_replayed_tasks_are_the_recorded_ones(folder: Path) -> None:
    """Turn by turn: tokens, context and environment seconds of the replay's own record."""
    replayed(folder / "waits", save=str(folder / "again"))
    before, after = (
        {(turn.key.prompt_id, turn.key.member, turn.turn): turn for turn in recorded(folder / name).recording.turns}
        for name in ("waits", "again")
    )
    assert before.keys() == after.keys()
    assert all(before[at].new_tokens == after[at].new_tokens for at in before)
    assert all(before[at].context_tokens == after[at].context_tokens for at in before)
    seconds = [
        {
            (call.key.prompt_id, call.key.member, call.turn): call.seconds
            for call in recorded(folder / name).recording.env_calls
        }
        for name in ("waits", "again")
    ]
    assert seconds[1] == pytest.approx(seconds[0], abs=1e-6)


def test_costs_of_a_run_count_for_another_configuration(folder: Path) -> None:
    plain = simulate(BUILTIN, [*SMALL, "schedule.strategy=sync"]).to_json()
    slow = simulate(BUILTIN, [*SMALL, "schedule.strategy=sync", "sim.cost={iteration_s: 1.0}"]).to_json()
    fitted = simulate(
        BUILTIN,
        [*SMALL, "schedule.strategy=sync", "sim.cost={iteration_s: 1.0}"],
        calibrated_by=str(folder / "areal"),
    ).to_json()
    assert slow["goodput_tokens_per_s"] < 0.5 * plain["goodput_tokens_per_s"]
    assert fitted["goodput_tokens_per_s"] == pytest.approx(plain["goodput_tokens_per_s"], rel=5e-3)
    assert "calibration" not in plain and fitted["calibration"]["residuals"]["trainer passes"]["rms"] < 1e-6


def test_a_file_of_turns_is_played_under_budgets_that_hold_it() -> None:
    result = replayed(TAU, ["train.updates=1", "train.global_batch_groups=2", "algorithm.group_size=4"])
    first = read_trace(TAU)[:8]
    assert result["trained_loss_tokens"] == sum(max(1, turn.sampled_tokens) for one in first for turn in one.turns)
    assert result["measured_step_s"] is None and result["calibration"] is None


def test_what_auto_and_the_strategy_decided_is_decided_anew(folder: Path) -> None:
    decided = derived_keys(folder / "sync" / "config.yaml")
    assert {"schedule.max_staleness", "cluster.rollout_ranks", "algorithm.loss", "env.slots"} <= set(decided)
    assert "train.updates" not in decided and "seed" not in decided


# ------------------------------------------------------------------------------------------ bad input


def test_a_run_without_a_finished_group_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="no group of trajectories was recorded to its end"):
        TracedWorkload({}, {}, where="runs/r1", max_turns=1, max_context_tokens=9, max_new_tokens_per_turn=1)


def test_a_context_that_holds_no_recorded_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="a recorded first observation has") as caught:
        replayed(folder / "sync", ["rollout.max_context_tokens=6", "rollout.max_new_tokens_per_turn=2"])
    assert caught.value.where == "rollout.max_context_tokens"


def test_a_recorded_workload_that_can_never_finish_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="no group can ever finish"):
        replayed(folder / "waits", ["env.deadline_s=0.01"])


def test_a_configuration_beside_a_recorded_run_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="brings its own configuration"):
        replayed(folder / "sync", config=BUILTIN)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "the trace is empty"),
        ("traj,turn,output_tokens,obs_tokens\n", "the trace has no turns"),
        ("traj,turn,output_tokens\n0,0,3\n", "no column observed"),
        ("traj,turn,output_tokens,obs_tokens,step_s\n0,0,3,4,-1\n", "step_s must be a number of at least 0"),
        ("traj,turn,output_tokens,obs_tokens,step_s\n0,0,3,4,nan\n", "step_s must be a number of at least 0"),
        ("traj,turn,output_tokens,obs_tokens\n0,1,3,4\n", "turn 1 of trajectory 0 comes where 0 belongs"),
    ],
)
def test_a_bad_file_is_refused_before_the_run(tmp_path: Path, text: str, refusal: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=refusal.replace("observed", "(obs|observed)")) as caught:
        replay(file)
    assert str(file) in str(caught.value)


# ------------------------------------------------------------------------------------------ the parts


def trajectory(*turns: tuple[int, int, float], prompt: int = 20) -> TracedTrajectory:
    return TracedTrajectory(tuple(TracedTurn(said, seen, prompt, step_s) for said, seen, step_s in turns), 0.5, 1.0)


def test_a_file_is_cut_into_groups_in_its_order_and_around() -> None:
    trace = [trajectory((n, 1, 0.0)) for n in range(1, 6)]
    said = {at: [one.turns[0].sampled_tokens for one in group] for at, group in groups_of_file(trace, 2).items()}
    assert said == {0: [1, 2], 1: [3, 4], 2: [5, 1]}


def test_groups_that_lost_a_member_are_left_out(folder: Path) -> None:
    events = list(recorded(folder / "sync").run.events())
    gone = next(event for event in events if type(event).__name__ == "TaskFinished" and event.prompt_id == 2)
    whole = read_recording(events, where="a run")
    less = read_recording([event for event in events if event is not gone], where="a run")
    none = Calibration({"turn_s": 0.0}, 0.0, 0.0, 0.0, {}, ())
    assert set(groups_of_run(whole, none, group_size=8)["train"]) == set(range(24))
    assert set(groups_of_run(less, none, group_size=8)["train"]) == set(range(24)) - {2}


def test_a_worker_serves_one_call_at_a_time_and_waits_of_the_world_run_at_once() -> None:
    """Four resets of 0.5 s at once, each then served for 2 s: by one worker they end after 2.5, 4.5, 6.5, 8.5 s."""
    one = TracedTrajectory((TracedTurn(1, 1, 20, 0.0),), 0.5, 1.0, reset_served_s=2.0)
    workload = TracedWorkload(
        {0: (one,)}, {}, where="a run", max_turns=1, max_context_tokens=99, max_new_tokens_per_turn=9
    )
    assert workload.served_s(TaskKey("train", 0, 0), RESET) == 2.0

    def ends(workers: int) -> list[float]:
        import asyncio

        async def main() -> list[float]:
            environments = SimEnvironments(workload, slots=9, deadline_s=60, eval_prompts=1, workers=workers)
            prompt = (await environments.prompts("train"))[0]

            async def play(member: int) -> float:
                handle = await environments.open(TaskKey("train", 0, member), prompt)
                await handle.reset()
                ended = asyncio.get_running_loop().time()
                await handle.step(Action(text=""))
                return ended

            return list(await asyncio.gather(*(play(member) for member in range(4))))

        return run_virtual(main)

    assert ends(1) == pytest.approx([2.5, 4.5, 6.5, 8.5])
    assert ends(4) == pytest.approx([2.5] * 4)
