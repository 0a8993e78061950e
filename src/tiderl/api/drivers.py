"""One run in virtual time over as many drivers as it takes: one that dies or is stopped is followed by another over
what it left, on the same clock, until the run is done.

Puts faults and checks around the simulated ports. Knows neither what the faults do nor what the checks ask.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from tiderl.api.virtual import Persisted, World, build_ports, simulated_world
from tiderl.config.resolve import Resolved
from tiderl.data.errors import CheckpointError, DeadlockError, HopelessEnvironment, RankLost, TideError
from tiderl.data.events import Event, UpdateCommitted
from tiderl.data.settings import RunSettings, WarmupSettings
from tiderl.runtime.ports import Recorder
from tiderl.runtime.run import Run
from tiderl.sim.checks.watch import Checks
from tiderl.sim.crashes import DriverKilled
from tiderl.sim.engine import Talk
from tiderl.sim.faults.cluster import with_faults
from tiderl.sim.faults.plan import FAULTS, Dice, FaultPlan, draw_probabilities
from tiderl.sim.faults.store import DriverLife
from tiderl.sim.faults.talk import FaultyTalk
from tiderl.sim.faults.trainer import Damage
from tiderl.store.memory import MemoryLedger

TAIL_ROWS = 12
"""A power cut loses at most so many rows of the journal's tail."""
MAX_IDLE_DRIVERS = 100
"""Drivers in a row without an update, after which nothing will come of the run."""
OPERATOR_HELPS: Mapping[type[TideError], tuple[str, ...]] = {
    CheckpointError: ("write_fails",),
    HopelessEnvironment: tuple(name for name in FAULTS if name.startswith(("env_", "verifier_"))),
    RankLost: ("trainer_crash", "crash_before_publish", "crash_after_publish", "engine_crash", "crash_at_pause"),
}
"""What may end a driver, and the faults that explain it: the disk is full, the environment only fails, a rank dies in
one step again and again. Where one of them struck, somebody resumes the run, and it must end as if it had not been."""


@dataclass
class Reported:
    """Passes events on, and notes which updates they told of: what a resumed driver asks."""

    inner: Recorder
    updates: int = 0

    def emit(self, event: Event) -> None:
        if isinstance(event, UpdateCommitted):
            self.updates = event.update
        self.inner.emit(event)


@dataclass
class VirtualRun:
    """One run in virtual time, over as many drivers as it takes."""

    resolved: Resolved
    recorder: Recorder
    dice: Dice | None = None
    checks: Checks | None = None
    make_run: Callable[..., Run] = Run
    persisted: Persisted = field(default_factory=Persisted)
    damage: Damage = field(default_factory=Damage)
    world: World | None = None
    """Made from the configuration where it is not given."""
    drivers: int = 0

    def __post_init__(self) -> None:
        self.settings = virtual_settings(self.resolved)
        self.world = self.world or simulated_world(self.resolved)

    async def to_its_end(self) -> None:
        """Raises what ended a driver and is no fault of the plan."""
        reported = Reported(self.recorder)
        updates = idle = 0
        while True:
            self.drivers += 1
            life = DriverLife(self.dice)
            done = await self._drive(life, reported)
            if self.checks is not None:
                self.checks.driver_over(finished=done, killed=not life.alive)
            if done:
                return
            assert self.dice is not None
            if self.checks is not None:
                self.checks.findings.saw("a driver resumed")
            self._reopen(killed=not life.alive)
            before, updates = updates, len((await self.persisted.ledger.replay()).updates)
            idle = 0 if updates > before else idle + 1
            if idle >= MAX_IDLE_DRIVERS:
                raise DeadlockError(f"{idle} drivers in a row ended without an update: faults let nothing through")
            reported.updates = min(reported.updates, updates)
            await asyncio.sleep(self.dice.plan.delay_s)

    async def _drive(self, life: DriverLife, reported: Reported) -> bool:
        """One driver; True when the run is done, False when another one has to go on."""
        ports = build_ports(self.resolved, self.persisted, reported, self.world, talk=self._talk)
        if self.checks is not None:
            self.checks.journal.begin(await self.persisted.ledger.replay())
            ports = self.checks.below(ports)
        if self.dice is not None:
            keep = self.settings.checkpoint_keep
            ports = with_faults(ports, self.dice, self.damage, life, checkpoints_kept=keep)
        if self.checks is not None:
            ports = self.checks.above(ports)
        run = self.make_run(ports, self.settings, self.resolved.strategy, reported_updates=reported.updates)
        if self.checks is not None:
            self.checks.look_into(run.kv_books, lambda: life.alive)
        fired = Counter(self.dice.fired) if self.dice is not None else Counter()
        running = asyncio.get_running_loop().create_task(run.run(), name="run")
        life.stop, life.cancel = run.request_stop, running.cancel
        try:
            return (await running).outcome == "done"
        except DriverKilled:
            return False
        except asyncio.CancelledError:
            if not life.cancelled:
                raise
            return False
        except TideError as error:
            if not life.alive or self._forgivable(error, fired):
                return False
            raise
        finally:
            await ports.environments.close()
            await ports.cluster.close()

    def _talk(self, talk: Talk) -> Talk:
        return talk if self.dice is None else FaultyTalk(talk, self.dice)

    def _forgivable(self, error: TideError, before: Counter[str]) -> bool:
        """A fault that struck this driver explains the error. `before`: what had struck until it began."""
        explained = OPERATOR_HELPS.get(type(error), ())
        return self.dice is not None and any(self.dice.fired[name] > before[name] for name in explained)

    def _reopen(self, *, killed: bool) -> None:
        """What is left of the journal."""
        assert self.dice is not None
        ledger = self.persisted.ledger
        if killed and self.dice.strikes("power_cut"):
            rows = int(TAIL_ROWS * self.dice.chance("power_cut"))
            self.persisted.ledger = ledger.reopen(lose_tail_rows=rows, tear=self.dice.chance("power_cut") < 0.5)
        else:
            self.persisted.ledger = MemoryLedger(ledger.snapshot())


def dice_of(resolved: Resolved) -> Dice | None:
    """What `sim.faults` asks for, for the whole run."""
    faults = resolved.config.sim.faults
    if faults == "none":
        return None
    seed = resolved.settings.seed
    probabilities = draw_probabilities(seed) if isinstance(faults, str) else dict(faults)
    deadline_s = max(env.deadline_s for env in resolved.config.environments.values())
    return Dice(FaultPlan(seed, probabilities, hang_s=deadline_s))


def virtual_settings(resolved: Resolved) -> RunSettings:
    """Start-up and warm start are not in the run's clock, and simulated environments have no expert."""
    return msgspec.structs.replace(resolved.settings, warmup=WarmupSettings(demos=0, updates=0, lr=0.0))
