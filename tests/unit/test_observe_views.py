"""What people see: the live view, the summary, transcripts, the doctor."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from tiderl.data.events import (
    Dropped,
    EvalFinished,
    Event,
    Fault,
    PromptIssued,
    RankLostEvent,
    RunEnded,
    RunStarted,
    TaskPaused,
    TaskResumed,
    UpdateCommitted,
)
from tiderl.data.records import TaskKey, Trajectory, TurnSpan
from tiderl.observe.comparison import comparison_table
from tiderl.observe.doctor import EXTRAS, VLLM_STEPS, examine
from tiderl.observe.live import LINE_S, LiveView
from tiderl.observe.metrics import RunMetrics
from tiderl.observe.summary import render_summary, warnings
from tiderl.observe.transcripts import transcript
from tiderl.observe.virtual import EVENTS_A_LOOK, VirtualProgress, stopped
from tiderl.observe.words import duration, fraction, number


def started(updates: int = 4) -> RunStarted:
    return RunStarted(
        t_s=0.0,
        strategy="areal",
        seed=0,
        ranks=2,
        replicas=1,
        updates=updates,
        global_batch_groups=1,
        group_size=2,
        max_staleness=1,
        staleness_counts="oldest_token",
    )


def issued(t_s: float) -> PromptIssued:
    return PromptIssued(t_s=t_s, prompt_id=0, task_id="a", start_version=0, replica=0)


def committed(t_s: float, update: int, reward: float = 0.5) -> UpdateCommitted:
    return UpdateCommitted(
        t_s=t_s,
        update=update,
        groups=1,
        trajectories=2,
        loss_tokens=100,
        tokens=300,
        reward_mean=reward,
        success_fraction=reward,
        staleness_max=1,
        staleness_mean_tokens=0.5,
        window_staleness_max=0,
        seconds=1.0,
        metrics={},
    )


def evaluated(version: int) -> EvalFinished:
    return EvalFinished(
        t_s=1.0, version=version, prompts=8, successes=6, failed=0, reward_mean=0.75, turns_mean=4.0, seconds=1.0
    )


def shown_by(view_events: list[tuple[float, Event]], *, terminal: bool) -> str:
    """What a view writes for events at these wall seconds."""
    output = io.StringIO()
    now = [0.0]
    view = LiveView(Console(file=output, force_terminal=terminal, width=110, highlight=False), clock=lambda: now[0])
    try:
        for wall_s, event in view_events:
            now[0] = wall_s
            view.observe(event)
    finally:
        view.close()
    return output.getvalue()


def test_where_stderr_is_no_terminal_a_line_comes_now_and_then() -> None:
    events: list[tuple[float, Event]] = [
        (0.0, started()),
        (0.0, evaluated(0)),
        (1.0, issued(1.0)),
        (1.0, committed(3.0, 1)),
        (1.5, committed(5.0, 2)),  # too soon for another line
        (1.0 + LINE_S, committed(7.0, 3)),
        (2.0 + LINE_S, committed(9.0, 4)),  # the last always
    ]
    lines = shown_by(events, terminal=False).splitlines()
    assert lines[0] == "held-out success of version 0: 0.750 over 8 prompts"
    assert [line.split("  ")[0] for line in lines[1:]] == ["update 1/4", "update 3/4", "update 4/4"]
    assert "held-out 0.750" in lines[1] and "50.00 tok/s" in lines[1]
    assert "left 6.0 s" in lines[1]  # one update took 2 s, three are left
    assert "\x1b" not in "".join(lines)


def test_a_simulation_says_how_far_it_is_every_few_seconds() -> None:
    now, said, metrics = [0.0], list[str](), RunMetrics()
    view = VirtualProgress(metrics, said.append, clock=lambda: now[0])

    def events(number: int) -> None:
        for _ in range(number):
            view.observe(issued(1.0))

    metrics.observe(started())
    events(EVENTS_A_LOOK)  # at 0 s: nothing to say yet
    now[0] = LINE_S + 1.0
    events(EVENTS_A_LOOK - 1)  # the clock is not looked at
    assert said == []
    events(1)
    assert said == ["update 0/4  0.0 s of virtual time  2,000 events"]
    metrics.observe(committed(3.0, 1))
    now[0] = 2 * LINE_S + 2.0
    events(EVENTS_A_LOOK)
    assert said[1:] == ["update 1/4  3.0 s of virtual time  3,000 events  left 36.0 s"]  # 12 s an update, three left
    events(EVENTS_A_LOOK)
    assert len(said) == 2
    assert stopped(metrics) == "stopped after 1 of 4 updates simulated"


def test_a_terminal_shows_one_screen_with_everything_asked_for() -> None:
    events: list[tuple[float, Event]] = [
        (0.0, started()),
        (1.0, evaluated(0)),
        (2.0, issued(1.0)),
        (3.0, committed(3.0, 1, reward=0.25)),
        (9.0, RunEnded(t_s=4.0, outcome="stopped", updates=1)),
    ]
    screen = shown_by(events, terminal=True)
    for part in (
        "areal",
        "warming up",
        "update 1/4",
        "reward",
        "held-out success",
        "goodput",
        "staleness",
        "trainer waited",
    ):
        assert part in screen
    for part in ("rollout waited", "in flight", "dropped, faults", "0.25 (first 0.25)", "0.750 (first 0.750)"):
        assert part in screen


def test_a_lost_rank_is_said_at_once() -> None:
    lost = RankLostEvent(t_s=1.0, rank=0, reason="exited with code -9", tasks=1)
    text = shown_by([(0.0, started()), (0.1, lost)], terminal=False)
    assert text == "rank 0 was lost with 1 task: exited with code -9\n"


def test_an_unusable_or_unwritten_checkpoint_is_said_at_once() -> None:
    torn = Fault(t_s=1.0, where="restore u000004", what="CheckpointError")
    full = Fault(t_s=9.0, where="checkpoint u000005", what="CheckpointError")
    text = shown_by([(0.0, started()), (1.0, torn), (9.0, full), (9.1, full)], terminal=False)
    assert text == (
        "checkpoint u000004 is missing or damaged: the one before it is used, what came after is redone\n"
        "checkpoint u000005 could not be written: the run goes on, and the last good one is kept\n"
    )


def result(**changes: Any) -> dict[str, Any]:
    metrics = RunMetrics()
    for event in [
        started(),
        evaluated(0),
        issued(1.0),
        committed(3.0, 1),
        RunEnded(t_s=4.0, outcome="done", updates=1),
    ]:
        metrics.observe(event)
    return {"run_dir": "runs/x-1", "wall_s": 90.0, "driver_load_fraction": None, **metrics.summary(), **changes}


def printed(renderable: Any) -> str:
    output = io.StringIO()
    Console(file=output, width=120, highlight=False).print(renderable)
    return output.getvalue()


def test_the_summary_says_what_was_reached_dropped_and_comes_next() -> None:
    text = printed(
        render_summary(
            result(dropped={"environment_timeout": 3}, issued=5, faults={"RankLost": 1}),
            no_effect=["sim.workload_seed has no effect: it is read by `tiderl sim` only"],
            next_commands=["tiderl show runs/x-1 --last 3"],
        )
    )
    for part in ("done after 1 update", "3 environment timeout", "1 RankLost", "runs/x-1", "1:30 in all"):
        assert part in text
    assert "5 issued = 2 trained + 3 dropped + 0 in flight" in text
    assert "note: sim.workload_seed has no effect" in text and "next: tiderl show runs/x-1 --last 3" in text


def test_the_summary_draws_curves_of_three_points_and_more() -> None:
    curves = {"eval_success_curve": [[0, 0.5], [10, None], [20, 0.75], [30, 1.0]], "reward_curve": [[1, 0.1], [2, 0.2]]}
    text = printed(render_summary(result(**curves)))
    assert "  ▅▇█" in text and text.count("█") == 1


def test_the_summary_warns_when_long_trajectories_were_the_ones_dropped() -> None:
    lengths = {
        "dropped": {"environment_timeout": 3},
        "issued": 100,
        "trained_tokens_mean": 88.0,
        "dropped_tokens_mean": 142.0,
        "dropped_tokens_mean_by_reason": {"environment_timeout": 142.0},
    }
    text = printed(render_summary(result(**lengths)))
    assert "trained 88 tokens mean, dropped 142 when they were dropped (environment timeout 142)" in text
    assert "what was dropped was longer than what was trained" in text
    few = printed(render_summary(result(**{**lengths, "issued": 1000})))
    assert "what was dropped was longer" not in few
    shorter = printed(render_summary(result(**{**lengths, "dropped_tokens_mean": 60.0})))
    assert "what was dropped was longer" not in shorter


def test_what_an_interruption_cost_is_no_reason_to_doubt_the_figures() -> None:
    stopped_often = {"issued": 150, "dropped": {"lost": 65, "environment_raised": 17}}
    assert "were dropped" not in printed(render_summary(result(**stopped_often)))  # 17 of 85 is 20 %, the limit
    text = printed(render_summary(result(**{**stopped_often, "dropped": {"lost": 65, "environment_raised": 34}})))
    assert "40% of the issued trajectories were dropped: look at what fails" in text
    assert "65 lost" in text
    long = {"trained_tokens_mean": 88.0, "dropped_tokens_mean": 142.0, "issued": 150, "dropped": {"lost": 65}}
    assert "what was dropped was longer" not in printed(render_summary(result(**long)))


def test_the_summary_leaves_out_what_has_no_meaning() -> None:
    metrics = RunMetrics()
    metrics.observe(started())
    metrics.observe(RunEnded(t_s=2.0, outcome="stopped", updates=0))
    text = printed(render_summary(metrics.summary()))
    assert text.startswith("stopped on request after 0 updates")
    assert "goodput" not in text and "None" not in text


BY_TASK = {
    "kv_policy": "ctb",
    "kv_hit_fraction": 0.6249,
    "tasks_paused": 1300,
    "paused_s": 90.0,
    "tasks_migrated": 2,
    "kv_retention_ratio": 1.2345,
    "kv_priority": "tiers",
    "kv_priority_weights": None,
}


def kv_lines(**changes: Any) -> list[str]:
    return [line for line in printed(render_summary(result(**changes))).splitlines() if line.startswith("KV by task")]


def test_the_summary_has_one_line_of_kv_under_ctb_and_none_under_lru() -> None:
    text = "0.625 of context tokens hit, 1,300 paused (1:30), 2 migrated"
    assert kv_lines(**BY_TASK) == [f"{'KV by task':18}{text}, waits cost 1.23 x a clairvoyant's"]
    assert kv_lines(**{**BY_TASK, "kv_retention_ratio": None}) == [f"{'KV by task':18}{text}"]
    weights = {"evaluation": 8.0, "group": 0.5}
    (weighing,) = kv_lines(**{**BY_TASK, "kv_retention_ratio": None, "kv_priority_weights": weights})
    assert weighing == f"{'KV by task':18}{text}, weights: evaluation 8, group 0.5"
    assert kv_lines(kv_policy="lru", kv_hit_fraction=0.5) == []


@pytest.mark.parametrize(("kv_policy", "shown"), [("ctb", True), ("lru", False)])
def test_the_live_view_says_how_many_tasks_are_paused_now(kv_policy: str, shown: bool) -> None:
    pauses = [
        TaskPaused(t_s=1.0, split="train", prompt_id=0, member=member, replica=0, reason="no_room") for member in (0, 1)
    ]
    resumed = TaskResumed(t_s=2.0, split="train", prompt_id=0, member=0, replica=0)
    begun = [msgspec.structs.replace(started(), kv_policy=kv_policy), issued(1.0), *pauses, resumed]
    events: list[tuple[float, Event]] = [(0.0, event) for event in begun]
    events.append((1.0, committed(3.0, 1)))
    assert ("in flight 0, 1 paused  left" in shown_by(events, terminal=False)) is shown
    assert ("2 issued, 1 paused" in shown_by(events, terminal=True)) is shown


def side_by_side(**strategies: dict[str, Any]) -> dict[str, list[str]]:
    workload = {
        "config": "a.yaml",
        "clock": "virtual",
        "ranks": 2,
        "updates": 1,
        "groups": 1,
        "group_size": 2,
        "seed": 0,
    }
    output = io.StringIO()
    Console(file=output, width=200, highlight=False).print(comparison_table(workload, strategies))
    rows = (re.split(r"  +", line.strip()) for line in output.getvalue().splitlines()[2:])
    return {label: cells for label, *cells in rows}


def test_kv_figures_that_differ_between_strategies_are_in_the_table() -> None:
    lru = {**dict.fromkeys(BY_TASK), "kv_policy": "lru", "kv_hit_fraction": 0.25, "kv_reprefilled_tokens": 12345}
    ctb = {**BY_TASK, "kv_reprefilled_tokens": 678}
    assert side_by_side(lru=lru, ctb=ctb) == {
        "KV policy": ["lru", "ctb"],
        "KV hits": ["0.250", "0.625"],
        "re-prefilled tokens": ["12,345", "678"],
        "tasks paused": ["–", "1,300"],
        "tasks migrated": ["–", "2"],
        "retention ratio": ["–", "1.23 x"],
    }
    assert side_by_side(one=ctb, two=ctb) == {"KV hits": ["0.625", "0.625"]}
    without_pressure = side_by_side(lru=lru, ctb={**ctb, "kv_retention_ratio": None})
    assert without_pressure["tasks paused"] == ["–", "1,300"] and "retention ratio" not in without_pressure


@pytest.mark.parametrize(("load", "warned"), [(None, False), (0.5, False), (0.51, True)])
def test_a_driver_that_would_be_the_bottleneck_is_said(load: float | None, warned: bool) -> None:
    assert bool(warnings(result(driver_load_fraction=load))) is warned


def test_a_simulation_shows_its_hash() -> None:
    assert "12 events, log SHA-256 abc" in printed(render_summary(result(events=12, log_sha256="abc", run_dir=None)))


def trajectory() -> Trajectory:
    mask = np.array([0, 0, 1, 1, 0, 1], bool)
    return Trajectory(
        id=41,
        key=TaskKey("train", 5, 3, 1),
        ids=np.arange(6, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.array([0, 0, -0.5, -1.5, 0, -0.25], np.float32),
        versions=np.array([-1, -1, 6, 6, -1, 7], np.int32),
        turns=(TurnSpan(2, 4, 0.0, "forward", "stop"), TurnSpan(5, 6, 1.0, "", "length")),
        reward=1.0,
        success=True,
        ending="budget_turns",
        text=("go to the red ball\nyou see a wall", "you see a red ball"),
    )


def test_a_transcript_reads_in_the_order_in_which_it_happened() -> None:
    lines = transcript(trajectory(), status="trained at update 8").splitlines()
    head = " ".join(lines[:2])
    for part in (
        "trajectory 41",
        "prompt 5, member 3, attempt 1",
        "reward 1.00, success",
        "out of turns after 2 turns",
    ):
        assert part in head
    assert "6 tokens, 3 sampled" in head and "versions 6 to 7" in head and "trained at update 8" in head
    assert [line.strip() for line in lines[2:]] == [
        "env     go to the red ball",
        "you see a wall",
        "policy  forward",
        "(reward 0.00, log-prob -1.00 a token)",
        "env     you see a red ball",
        "policy  (nothing)",
        "(reward 1.00, log-prob -0.25 a token, ended by length)",
    ]


def test_figures_read_as_people_write_them() -> None:
    assert [number(None), number(0.123), number(1234.5)] == ["–", "0.12", "1,234"]
    assert [fraction(None), fraction(0.875)] == ["–", "0.875"]
    assert [duration(None), duration(5.04), duration(90), duration(3725)] == ["–", "5.0 s", "1:30", "1:02:05"]


def test_the_doctor_finds_this_machine_fit_and_names_what_to_install() -> None:
    findings = {finding.name: finding for finding in examine(quick=True)}
    assert {"python", "system", "cores", "memory", "shared memory", "base packages", "model hub"} <= findings.keys()
    assert findings["base packages"].status == "ok"
    for extra in EXTRAS:
        finding = findings[f"extra {extra}"]
        assert finding.status == "ok" or f"tiderl[{extra}]" in finding.hint
    vllm = findings["extra vllm"]
    steps = [f"  {step}" for step in VLLM_STEPS]
    assert vllm.status == "ok" or (vllm.hint.splitlines()[1:4] == steps and "docs/vllm.md" in vllm.hint)


@pytest.mark.parametrize("page", ["vllm.md", "install.md"])
def test_the_doctor_and_the_docs_have_the_same_steps_to_vllm(page: str) -> None:
    root = Path(__file__).parents[2]
    lines = (root / "docs" / page).read_text(encoding="utf-8").splitlines()
    first = lines.index(VLLM_STEPS[0])
    assert tuple(lines[first : first + len(VLLM_STEPS)]) == VLLM_STEPS
    assert VLLM_STEPS[0].split()[-1] in (root / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_failures_are_shown_also_while_nothing_is_committed() -> None:
    failed = Fault(t_s=9.5, where="task", what="EnvironmentRaised")
    dropped = Dropped(t_s=9.4, trajectory_id=0, prompt_id=0, member=0, reason="environment_raised", tokens=3)
    text = shown_by([(0.0, started()), (9.4, dropped), (9.5, failed), (9.6, failed)], terminal=False)
    assert len(text.splitlines()) == 1
    assert text.rstrip() == "update 0/4  in flight 2  dropped 1"  # what only updates tell is left out
