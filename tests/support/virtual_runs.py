"""Runs of the real runtime in virtual time, with faults injected from outside and a journal that can crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from tiderl.api.virtual import Persisted, build_ports
from tiderl.config.load import load_config
from tiderl.config.resolve import Resolved, resolve
from tiderl.data.events import Event
from tiderl.data.records import Action, Observation, Prompt, Step, TaskKey, Trajectory
from tiderl.data.settings import RunSettings, WarmupSettings
from tiderl.runtime.ports import Ports, Replay
from tiderl.runtime.run import Outcome, Run
from tiderl.sim.loop import run_virtual

EXAMPLE = Path(__file__).parents[2] / "examples" / "builtin.yaml"

SMALL = (
    "train.updates=6",
    "train.global_batch_groups=3",
    "algorithm.group_size=4",
    "eval.prompts=5",
    "eval.every_updates=3",
    "env.deadline_s=300",
)
"""A run of a few virtual seconds: 6 updates of 3 groups of 4."""

HEAVY_TAIL = "env.wait={kind: lognormal, median_s: 0.2, sigma: 1.2, tail_fraction: 0.05, tail_s: [3, 8]}"


@dataclass
class Log:
    """A recorder that keeps everything."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, *kinds: type[Event]) -> list:
        return [event for event in self.events if isinstance(event, kinds)]


Fault = Callable[[TaskKey, int], Exception | None]
"""(task, turn) -> what the environment raises there; turn -1 is the reset."""


class FaultyEnvironments:
    """An Environments port whose handles fail by a plan; everything else is the inner one's."""

    def __init__(self, inner: object, fault: Fault, score: Callable[[TaskKey], float | Exception | None]) -> None:
        self._inner, self._fault, self._score = inner, fault, score

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def open(self, key: TaskKey, prompt: Prompt) -> FaultyHandle:
        return FaultyHandle(await self._inner.open(key, prompt), key, self._fault, self._score)  # type: ignore[attr-defined]


class FaultyHandle:
    def __init__(self, inner, key, fault, score) -> None:
        self._inner, self._key, self._fault, self._score = inner, key, fault, score
        self._turn = 0

    async def reset(self) -> Observation:
        self._raise(-1)
        return await self._inner.reset()

    async def step(self, action: Action) -> Step:
        self._raise(self._turn)
        self._turn += 1
        return await self._inner.step(action)

    async def score(self, trajectory: Trajectory) -> float | None:
        answer = self._score(self._key)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause(self) -> None:
        await self._inner.pause()

    async def resume(self) -> None:
        await self._inner.resume()

    async def close(self) -> None:
        await self._inner.close()

    def _raise(self, turn: int) -> None:
        error = self._fault(self._key, turn)
        if error is not None:
            raise error


@dataclass
class VirtualRun:
    """What a run left behind."""

    resolved: Resolved
    ports: Ports
    log: Log
    outcome: Outcome
    replay: Replay


def resolved_example(*overrides: str) -> Resolved:
    resolved = resolve(load_config(EXAMPLE, [*SMALL, *overrides]), command="sim")
    return replace(resolved, settings=msgspec.structs.replace(resolved.settings, warmup=WarmupSettings(0, 0, 0.0)))


def virtual_run(
    overrides: Sequence[str] = (),
    *,
    fault: Fault = lambda key, turn: None,
    score: Callable[[TaskKey], float | Exception | None] = lambda key: None,
    beside: Callable[[Run, Ports], object] | None = None,
    persisted: Persisted | None = None,
    change: Callable[[Ports], None] = lambda ports: None,
    settings: Callable[[RunSettings], RunSettings] = lambda settings: settings,
) -> VirtualRun:
    """One run to its end. `beside(run, ports)` makes a coroutine that goes on next to it; `change` edits the ports."""
    import asyncio

    resolved = resolved_example(*overrides)
    log, persisted = Log(), persisted or Persisted()

    async def main() -> tuple[Ports, Outcome, Replay]:
        ports = build_ports(resolved, persisted, log)
        ports.environments = FaultyEnvironments(ports.environments, fault, score)
        change(ports)
        run = Run(ports, settings(resolved.settings), resolved.strategy)
        other = asyncio.create_task(beside(run, ports)) if beside else None  # type: ignore[arg-type]
        try:
            outcome = await run.run()
        finally:
            if other is not None:
                other.cancel()
        return ports, outcome, await persisted.ledger.replay()

    ports, outcome, replay = run_virtual(main)
    return VirtualRun(resolved, ports, log, outcome, replay)


def books_balance(replay: Replay) -> list[str]:
    """I1 and I2 over a journal in memory, independently of the code that wrote it: what is wrong, in words."""
    wrong = []
    updates = dict(replay.updates)
    rows = {row.id: row for row in replay.trajectories}
    if [p.prompt_id for p in replay.prompts] != list(range(len(replay.prompts))):
        wrong.append("prompt ids have a hole")
    trained = [i for ids in updates.values() for i in ids]
    if len(trained) != len(set(trained)):
        wrong.append("an id is in two updates")
    for number, ids in updates.items():
        wrong += [
            f"{i} not trained at {number}" for i in ids if rows[i].status != "trained" or rows[i].update_no != number
        ]
    wrong += [
        f"{r.id} trained in no update" for r in rows.values() if r.status == "trained" and r.id not in set(trained)
    ]
    wrong += [f"{r.id} dropped without a reason" for r in rows.values() if r.status == "dropped" and not r.reason]
    members = [(r.prompt_id, r.member) for r in rows.values() if r.status in ("trained", "ready", "running")]
    if len(members) != len(set(members)):
        wrong.append("a member of a group lives twice")
    return wrong
