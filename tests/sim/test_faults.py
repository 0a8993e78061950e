"""Each fault strikes, is survived, and stops when calm comes; runs that could never finish are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tiderl.api import simulate
from tiderl.api.swarm import swarm
from tiderl.data.errors import ConfigurationError, DeadlockError
from tiderl.data.settings import WaitProfile, WorkloadProfile
from tiderl.envs.registry import DEFAULT_PROFILE
from tiderl.sim.faults.plan import ENDURABLE, FAULTS, NOT_APPLICABLE, Dice, FaultPlan, draw_probabilities
from tiderl.sim.feasibility import check_can_finish
from tiderl.sim.loop import run_virtual
from tiderl.sim.workload import Workload

BUILTIN = Path(__file__).parents[2] / "examples" / "builtin.yaml"
SEEDS = 12
"""Within so many instances each fault must strike when it is likely."""

# Faults that strike only where another one does.
WITH = {"power_cut": {"driver_crash": 0.03}, "notice_late": {"engine_crash": 0.03}}

# What it takes for a fault to have an opportunity: tasks wait for room only under `ctb`, and hand their KV to the host
# only on accelerators.
GIVEN = {"env_pause_fails": ["rollout.kv_policy=ctb"], "offload_lost": ["rollout.kv_policy=ctb"]}
FILES = {"offload_lost": BUILTIN.with_name("sim") / "coding.yaml"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_strikes_and_is_survived(name: str) -> None:
    plan = {name: FAULTS[name].likely[1], **WITH.get(name, {})}
    fired = 0
    for seed in range(SEEDS):
        faults = ", ".join(f"{k}: {v}" for k, v in plan.items())
        (report,) = swarm(FILES.get(name, BUILTIN), [seed], [f"sim.faults={{{faults}}}", *GIVEN.get(name, [])]).seeds
        assert report.violations == ()
        assert set(report.fired) <= set(plan)
        fired += report.fired.get(name, 0)
        if fired:
            break
    assert fired


def strikes(dice: Dice, name: str, times: int) -> list[bool]:
    async def main() -> list[bool]:
        found = []
        for _ in range(times):
            found.append(dice.strikes(name))
            await asyncio.sleep(1.0)
        return found

    return run_virtual(main)


def test_nothing_strikes_in_calm() -> None:
    found = strikes(Dice(FaultPlan(0, {"env_crash": 1.0}, calm_s=5.0)), "env_crash", 10)
    assert found == [True] * 5 + [False] * 5


def test_a_fault_that_is_switched_on_shifts_no_other() -> None:
    alone = strikes(Dice(FaultPlan(3, {"env_crash": 0.3})), "env_crash", 50)
    beside = Dice(FaultPlan(3, {"env_hang": 0.5, "env_crash": 0.3}))
    strikes(beside, "env_hang", 20)
    assert strikes(beside, "env_crash", 50) == alone
    assert 0 < sum(alone) < 50


def test_every_seed_draws_some_of_the_faults_within_their_ranges() -> None:
    drawn = [draw_probabilities(seed) for seed in range(300)]
    assert set().union(*drawn) == set(FAULTS)
    for found in drawn:
        assert all(FAULTS[name].likely[0] <= p <= FAULTS[name].likely[1] for name, p in found.items())
    assert 0.3 < sum(map(len, drawn)) / (300 * len(FAULTS)) < 0.4


def test_names_are_known_or_said_to_be_not_applicable() -> None:
    assert set(FAULTS) > ENDURABLE
    assert not set(FAULTS) & set(NOT_APPLICABLE)


def test_the_documented_faults_are_the_faults() -> None:
    text = (BUILTIN.parents[1] / "docs" / "simulation.md").read_text(encoding="utf-8")
    section = text[text.index("## Faults") : text.index("## Swarms")]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("|")]
    told = [tuple(cell.strip(" `") for cell in row) for row in rows if len(row) == 3 and "`" in row[0]]
    assert told == [(kind.name, kind.what, kind.each) for kind in FAULTS.values()]
    assert all(f"| {name} | {why} |" in section for name, why in NOT_APPLICABLE.items())


@pytest.mark.parametrize(("faults", "message"), [({"no_such": 0.1}, "unknown fault"), ({"env_crash": 1.5}, "0 to 1")])
def test_a_wrong_plan_is_refused(faults: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FaultPlan(0, faults)


def test_a_run_with_faults_is_the_same_twice_and_over_several_drivers() -> None:
    overrides = ["sim.faults={driver_crash: 0.004, engine_crash: 0.002}", "train.updates=6", "eval.every_updates=0"]
    first, again = simulate(BUILTIN, overrides), simulate(BUILTIN, overrides)
    assert first["log_sha256"] == again["log_sha256"]
    assert first["updates"] == 6
    assert first["dropped"]["lost"] > 0
    assert first["in_flight"] == 0


def test_faults_that_let_nothing_through_end_the_run() -> None:
    with pytest.raises(DeadlockError, match="drivers in a row ended without an update"):
        simulate(BUILTIN, ["sim.faults={driver_crash: 0.9}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sim.faults={env_crash: 1}"], "env_crash at every reset or step lets the run never finish"),
        (["env.wait={kind: lognormal, median_s: 40, sigma: 0}"], "a step longer than env.deadline_s = 10"),
        (["sim.faults={no_such: 0.1}"], "no fault"),
        (["sim.faults={env_crash: 2}"], "probability from 0 to 1"),
        (["sim.faults=all"], "must be none, swarm, or a mapping"),
    ],
)
def test_a_run_that_can_never_finish_is_refused_before_it_starts(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(BUILTIN, overrides)


def workload(profile: WorkloadProfile, wait: WaitProfile | None = None) -> Workload:
    return Workload(0, profile, max_turns=8, max_context_tokens=4096, max_new_tokens_per_turn=64, wait=wait)


def refused(subject: Workload, *, deadline_s: float, group_size: int = 4, groups: int = 8) -> bool:
    try:
        check_can_finish(lambda key: (subject, deadline_s), group_size=group_size, groups=groups)
    except ConfigurationError:
        return True
    return False


def test_only_what_is_certain_is_refused() -> None:
    """One group of the first eight without a step beyond the deadline is enough to start."""
    rare = workload(DEFAULT_PROFILE, WaitProfile(0.1, 0.0, tail_fraction=0.02, tail_s=(50.0, 60.0)))
    often = workload(DEFAULT_PROFILE, WaitProfile(0.1, 0.0, tail_fraction=0.9, tail_s=(50.0, 60.0)))
    assert not refused(rare, deadline_s=30.0)
    assert refused(often, deadline_s=30.0)
    assert not refused(often, deadline_s=100.0)
    assert refused(workload(replace_profile(failure_fraction=0.5, timeout_fraction=0.5)), deadline_s=30.0)
    assert not refused(workload(replace_profile(failure_fraction=0.5)), deadline_s=30.0)


def replace_profile(**changes: float) -> WorkloadProfile:
    import msgspec

    return msgspec.structs.replace(DEFAULT_PROFILE, **changes)
