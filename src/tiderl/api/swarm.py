"""`swarm`: many small instances of a file in virtual time, each undisturbed and then under its own faults, all rules
checked while they run.

The same seed is the same instance, the same faults and the same events. Knows what no rule and no fault does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from tiderl.api.drivers import VirtualRun, virtual_settings
from tiderl.api.virtual import World, check_finishes, simulated_world
from tiderl.config.load import dump
from tiderl.config.machine import prepare
from tiderl.config.resolve import Resolved
from tiderl.data.errors import DeadlockError, RunStopped
from tiderl.data.events import Event, PromptIssued, RunStarted, TaskAdmitted, UpdateCommitted
from tiderl.observe.account import Account
from tiderl.observe.words import count
from tiderl.runtime.run import Run
from tiderl.sim.batch import host_budget_tokens
from tiderl.sim.checks.watch import Checks
from tiderl.sim.faults.plan import Dice
from tiderl.sim.instances import LARGE_PROMPT, FileSize, draw_instance
from tiderl.sim.loop import run_virtual
from tiderl.sim.swarm import SeedReport, SwarmReport, draw_plan, may_take_s, out_of_reach
from tiderl.sim.waiting import describe_waits
from tiderl.store.recorder import HashRecorder

ACCOUNT_ROUNDING = 1e-6
"""Of a run's rank-seconds: what sums of floats may differ by."""


def swarm(
    config: str | Path,
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    *,
    on_seed: Callable[[SeedReport], None] = lambda report: None,
    make_run: Callable[..., Run] = Run,
) -> SwarmReport:
    """Runs one small instance of the file for each seed. `on_seed` gets each report as it comes; `make_run` builds the
    runtime. Raises `ConfigurationError` for a file that is wrong by itself, or can never finish; `RunStopped` when
    interrupted."""
    resolved = prepare(config, overrides, command="sim")
    check_finishes(resolved, simulated_world(resolved), calm=True)
    size = _file_size(resolved)
    report = SwarmReport(str(config), out_of_reach=out_of_reach(size), given=frozenset(given_faults(resolved) or ()))
    for seed in seeds:
        try:
            found = run_seed(config, seed, size, overrides, make_run=make_run)
        except KeyboardInterrupt:
            made = f"stopped after {len(report.seeds):,} of {count(len(seeds), 'seed')}, {len(report.failed)} failed"
            raise RunStopped(made, hint=f"the next one is --seed {seed}") from None
        report.seeds.append(found)
        on_seed(found)
    return report


def run_seed(
    config: str | Path,
    seed: int,
    size: FileSize,
    overrides: Sequence[str] = (),
    *,
    make_run: Callable[..., Run] = Run,
) -> SeedReport:
    """The seed's instance, undisturbed and then under its faults; what both broke."""
    instance = draw_instance(seed, size)
    resolved = prepare(config, [*overrides, *instance], command="sim")
    world = _world(resolved, size)
    calm_log, log = AccountedLog(), AccountedLog()
    first = VirtualRun(resolved, calm_log, checks=_checks(resolved, world), make_run=make_run, world=world)
    undisturbed_s, failure = _run(first, None)
    deadline_s = max(env.deadline_s for env in resolved.config.environments.values())
    plan = draw_plan(seed, undisturbed_s=undisturbed_s, deadline_s=deadline_s, given=given_faults(resolved))
    limit_s = may_take_s(plan, undisturbed_s)
    second = VirtualRun(resolved, log, Dice(plan), _checks(resolved, world), make_run=make_run, world=world)
    done_s = undisturbed_s
    violations = [f"undisturbed: {what}" for what in (*_violations(first, failure), *calm_log.wrong())]
    if not violations:
        done_s, failure = _run(second, limit_s)
        violations = [*_violations(second, failure), *log.wrong()]
    assert second.dice is not None and second.checks is not None
    return SeedReport(
        seed=seed,
        overrides=instance,
        probabilities=dict(plan.probabilities),
        violations=tuple(violations),
        fired={name: count for name, count in sorted(second.dice.fired.items()) if count},
        seen=dict(sorted(second.checks.findings.seen.items())),
        drivers=second.drivers,
        undisturbed_s=undisturbed_s,
        calm_s=plan.calm_s,
        done_s=done_s,
        limit_s=limit_s,
        events=log.hash.events,
        log_sha256=log.hash.sha256,
    )


def _checks(resolved: Resolved, world: World) -> Checks:
    common_tokens = max(workload.system_tokens for workload in world.workloads.values())
    return Checks(virtual_settings(resolved), common_tokens=common_tokens)


class AccountedLog:
    """A run's events: their hash, and whether its account of rank-seconds adds up (I11)."""

    def __init__(self) -> None:
        self.hash, self.account = HashRecorder(), Account()
        self.ranks = 0
        self.first_s: float | None = None
        self.last_s: float | None = None

    def emit(self, event: Event) -> None:
        self.hash.emit(event)
        self.account.observe(event)
        if isinstance(event, RunStarted):
            self.ranks = event.ranks
        elif isinstance(event, PromptIssued | TaskAdmitted) and self.first_s is None:
            self.first_s = event.t_s
        elif isinstance(event, UpdateCommitted):
            self.last_s = event.t_s

    def wrong(self) -> list[str]:
        """Useful time and every loss add up to ranks × (first task to last commit); none is negative or unnamed."""
        account = self.account.summary()
        if account is None or self.first_s is None or self.last_s is None:
            return []
        time_s = self.ranks * (self.last_s - self.first_s)
        room_s = ACCOUNT_ROUNDING * max(time_s, 1.0)
        found = []
        if abs(sum(account.values()) - time_s) > room_s:
            found.append(f"I11: the account has {sum(account.values()):.9g} rank-seconds of {time_s:.9g}")
        found += [f"I11: {name} is {seconds:.9g} s" for name, seconds in account.items() if seconds < -room_s]
        if account["other"] > room_s:
            found.append(f"I11: {account['other']:.9g} of {time_s:.9g} rank-seconds have no name")
        return found


def given_faults(resolved: Resolved) -> dict[str, float] | None:
    """The faults that the configuration names itself; None where it leaves them to the seed."""
    faults = resolved.config.sim.faults
    return None if isinstance(faults, str) else dict(faults)


def _run(run: VirtualRun, limit_s: float | None) -> tuple[float, str | None]:
    """Virtual seconds, and what ended it early."""
    clock: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock.append(loop)
        if limit_s is not None:
            loop.call_later(limit_s, _too_late, loop, limit_s)
        await run.to_its_end()

    reorder = run.dice.reorder if run.dice is not None and run.dice.enabled("reorder") else None
    failure = None
    try:
        run_virtual(main, reorder=reorder)
    except Exception as error:  # noqa: BLE001  whatever ends a run is found out about its seed, and the others go on
        failure = f"{type(error).__name__}: {error}"
    return clock[0].time(), failure


def _too_late(loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    """A timer that raises stops a virtual loop."""
    raise DeadlockError(f"liveness: not done at {limit_s:.6g} s; {describe_waits(loop)}")


def _violations(run: VirtualRun, failure: str | None) -> list[str]:
    assert run.checks is not None
    return ([failure] if failure is not None else []) + run.checks.findings.violations


def _file_size(resolved: Resolved) -> FileSize:
    config, world = resolved.config, simulated_world(resolved)
    profiles = [behaviour.profile for behaviour in world.workloads.values()]
    return FileSize(
        ranks=config.cluster.ranks,
        global_batch_groups=config.train.global_batch_groups,
        group_size=config.algorithm.group_size,
        updates=config.train.updates,
        max_turns=config.rollout.max_turns,
        max_context_tokens=config.rollout.max_context_tokens,
        max_new_tokens_per_turn=config.rollout.max_new_tokens_per_turn,
        environment=None if config.is_mixture else dump(resolved.loaded.config)["env"],
        first_tokens=max(math.ceil(profile.first_observation_tokens) for profile in profiles),
        turn_tokens=max(math.ceil(profile.observation_tokens + profile.action_tokens) for profile in profiles),
        kv_capacity_tokens=world.cost.kv_capacity_tokens,
        kv_policy=resolved.loaded.config.rollout.kv_policy,
        images=config.sim.workload != "auto",
        offloads=host_budget_tokens(world.engine, world.cost) > 0,
    )


def _world(resolved: Resolved, size: FileSize) -> World:
    """Where an instance has two kinds of tasks of a file that has one, the second is the one with the large prompts."""
    if size.environment is None or not resolved.config.is_mixture:
        return simulated_world(resolved)
    _, large = resolved.config.environments
    return simulated_world(resolved, prompts={large: float(LARGE_PROMPT)})
