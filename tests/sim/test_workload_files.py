"""The workload files: they resolve, say where each constant is from, and in each family its own resource binds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiderl.api.bound import planned_bound
from tiderl.api.virtual import simulate, simulated_world
from tiderl.config.machine import prepare
from tiderl.config.render import render_dry_run
from tiderl.cost.bound import Bound
from tiderl.data.errors import ConfigurationError
from tiderl.sim.traces import fitted_profile, read_trace

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "sim"
FILES = sorted(FOLDER.glob("*.yaml"))
FAMILIES = {
    "rollout": "rollout",
    "kv": "kv",
    "trainer": "trainer",
    "critical-path": "critical_path",
    "environment": "environment",
    "sync": "sync",
}
MARK = re.compile(r"\((measured|published|derived|assumed)\)")


def bound_of(file: Path, *overrides: str) -> Bound:
    resolved = prepare(file, overrides, command="sim")
    world = simulated_world(resolved)
    bound = planned_bound(resolved, world.workload, world.cost, world.engine)
    assert bound is not None
    return bound


def test_the_promised_files_are_there() -> None:
    names = {file.stem for file in FILES}
    promised = {"webshop-7b-32xh100", "osworld-4b-32xh100", "tool-agent", "browser", "coding", "family-balanced"}
    assert promised | {f"family-{name}" for name in FAMILIES} == names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workload_file_resolves_and_everything_in_it_has_effect(file: Path) -> None:
    resolved = prepare(file, command="sim")
    assert resolved.no_effect == ()
    world = simulated_world(resolved)
    assert world.engine.kv_budget_tokens <= world.cost.kv_capacity_tokens
    assert world.engine.kv_budget_tokens >= resolved.config.rollout.max_context_tokens


def test_what_a_dry_run_prints_is_the_same_run(tmp_path: Path) -> None:
    resolved = prepare(FOLDER / "tool-agent.yaml", command="sim")
    again = tmp_path / "again.yaml"
    again.write_text(render_dry_run(resolved), encoding="utf-8")
    assert prepare(again, command="sim").config == resolved.config


@pytest.mark.parametrize("file", [file for file in FILES if "family" not in file.stem], ids=lambda file: file.stem)
def test_every_constant_says_where_it_is_from(file: Path) -> None:
    workload = False
    for line in file.read_text(encoding="utf-8").splitlines():
        workload = (workload or line.startswith("  workload:")) and not line.startswith("  cost:")
        if workload and re.match(r"    \w+: ", line) and "env.wait" not in line:
            assert MARK.search(line), line


@pytest.mark.parametrize("name", FAMILIES)
def test_in_each_family_its_own_resource_binds(name: str) -> None:
    assert bound_of(FOLDER / f"family-{name}.yaml").binding == FAMILIES[name]


def test_the_balanced_family_has_no_resource_far_above_the_others() -> None:
    terms = sorted(bound_of(FOLDER / "family-balanced.yaml").terms.values())
    assert terms[-1] < 1.5 * terms[-2]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_simulated_run_is_never_above_the_bound_of_its_own_work(name: str) -> None:
    small = ("train.updates=3", "train.global_batch_groups=2", "algorithm.group_size=4")
    result = simulate(FOLDER / f"family-{name}.yaml", small)
    assert 0 < result["goodput_tokens_per_s"] <= result["bound_tokens_per_s"] * (1 + 1e-9)
    assert result["rho"] == pytest.approx(result["goodput_tokens_per_s"] / result["bound_tokens_per_s"])
    assert result["rho"] <= result["rho_order"] * (1 + 1e-9)
    assert result["binding"]


def test_window_staleness_has_no_bound() -> None:
    small = ("train.updates=2", "train.global_batch_groups=2", "schedule.staleness_counts=window")
    result = simulate(FOLDER / "family-trainer.yaml", small)
    assert [result[key] for key in ("bound_tokens_per_s", "rho", "rho_order", "binding")] == [None] * 4


@pytest.mark.parametrize(
    ("file", "trace"),
    [("tool-agent", "tau_airline_gpt4o"), ("browser", "web_miniwob_measured")],
)
def test_a_workload_from_a_trace_is_its_fit(file: str, trace: str) -> None:
    workload = prepare(FOLDER / f"{file}.yaml", command="sim").config.sim.workload
    assert workload != "auto"
    fit = fitted_profile(read_trace(FOLDER / "traces" / f"{trace}.csv"))
    measured = ["turns_median", "turns_sigma", "first_observation_tokens", "observation_tokens", "observation_sigma"]
    measured += ["action_tokens", "action_sigma", "success_fraction"]
    if fit.step_s:  # the other trace has no times
        measured += ["step_s", "step_sigma", "reset_s"]
    for name in measured:
        assert getattr(workload, name) == pytest.approx(getattr(fit, name), rel=0.005), name


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("sim.workload.turn_median=3", "did you mean sim.workload.turns_median"),
        ("sim.workload={turns_median: 3}", "sim.workload.turns_sigma is required"),
        ("sim.workload=fast", "sim.workload must be auto, or a mapping"),
        ("sim.workload.turns_sigma=-1", "sim.workload.turns_sigma must be at least 0"),
        ("sim.hardware=B200", "unknown hardware 'B200'"),
        ("sim.model=Qwen9", "unknown model 'Qwen9'"),
        ("sim.model=Qwen2.5-32B", "no room"),
        ("sim.cost.a0=1.0", "unknown constant 'a0'"),
        ("sim.efficiency.mfu=0.5", "unknown efficiency factor 'mfu'"),
        ("rollout.kv_budget_tokens=2000000", "do not fit"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(override: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        simulate(FOLDER / "family-rollout.yaml", (override, "train.updates=1"))
