"""Published behaviour of asynchronous and synchronous training, next to what the simulation makes of it.

    python bench/published.py [CLAIM …] [--short] [--json]     # the claims of bench/published.yaml; all: about an hour
    python bench/published.py --floors [NAME …] [--json]       # rho of the families under a simple schedule
    python bench/published.py --candidates [NAME …] [--json]   # another simulator's figures for the two large files

Tolerances and sources are in the table, which was written before the first measurement. All figures are of virtual
time: another machine prints the same. Rates are those of the steady updates, start and end of a short run left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tiderl.api.bound import planned_bound
from tiderl.api.drivers import VirtualRun
from tiderl.api.result import Fanout
from tiderl.api.virtual import simulate, simulated_world
from tiderl.config.machine import prepare
from tiderl.data.events import Event, UpdateCommitted
from tiderl.observe.metrics import RunMetrics
from tiderl.sim.loop import run_virtual

ROOT = Path(__file__).parents[1]
TABLE: dict[str, Any] = yaml.safe_load((ROOT / "bench" / "published.yaml").read_text(encoding="utf-8"))
SIZES = ("short", "full")
FRACTIONS = {
    "ALL": 1.0,
    "EIGHTH": 1 / 8,
    "QUARTER": 1 / 4,
    "THREE_EIGHTHS": 3 / 8,
    "HALF": 1 / 2,
    "FIVE_EIGHTHS": 5 / 8,
    "THREE_QUARTERS": 3 / 4,
}
"""Words of the table for numbers of ranks: parts of a claim's `cluster.ranks`."""

FLUID_UPDATES = 200
"""Nothing runs for the fluid optimum, the work of these updates is only added up."""


@dataclass(frozen=True)
class Steady:
    """One run between two of its commits. Seconds are those of one step: an update, or `updates_per_step` of them."""

    goodput: float
    """Loss tokens per second."""
    update_s: float
    generation_s: float
    """In which the trainer waited for data."""

    @property
    def rollout_share(self) -> float:
        return self.generation_s / self.update_s


@dataclass(frozen=True)
class Figure:
    """One comparison of a claim."""

    claim: str
    name: str
    published: tuple[float, ...]
    measured: float
    low: float
    high: float
    reported: bool
    """Never held to its tolerance: it says what the model cannot know."""
    outside: str
    """Why it came out of its tolerance; empty for one that did not."""

    @property
    def within(self) -> bool:
        return self.low <= self.measured <= self.high


class Commits:
    """The committed updates of a run, in order."""

    def __init__(self) -> None:
        self.updates: list[UpdateCommitted] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, UpdateCommitted):
            self.updates.append(event)


def claims() -> list[str]:
    return list(TABLE["claims"])


def overrides(claim: Mapping[str, Any], size: str, arm: str) -> tuple[str, ...]:
    """What is set for one arm, in order: later ones win."""
    common = [line for name in claim["use"] for line in {**TABLE["costs"], **TABLE["lengths"]}[name]]
    sized = [*common, *claim["set"], *claim[size]]
    given = [line for line in sized if line.startswith("cluster.ranks=")]
    if given:
        ranks = int(given[-1].partition("=")[2])
    else:
        ranks = prepare(ROOT / claim["file"], sized, command="sim").config.cluster.ranks
    return tuple(_in_numbers(line, ranks) for line in [*sized, *claim["arms"][arm]])


def _in_numbers(line: str, ranks: int) -> str:
    key, _, value = line.partition("=")
    return f"{key}={round(ranks * FRACTIONS[value])}" if value in FRACTIONS else line


@cache
def run(file: str, changes: tuple[str, ...]) -> tuple[float, tuple[UpdateCommitted, ...]]:
    """When the first task was issued, and the commits."""
    resolved = prepare(ROOT / file, changes, command="sim")
    commits, metrics = Commits(), RunMetrics()
    run_virtual(VirtualRun(resolved, Fanout([], metrics, [commits])).to_its_end)
    assert metrics.first_issue_s is not None
    return metrics.first_issue_s, tuple(commits.updates)


def steady(file: str, changes: tuple[str, ...], *, skip: int, leave: int = 0, updates_per_step: int = 1) -> Steady:
    """Between the commit of update `skip` (0: the first issued task) and that of the last but `leave`."""
    first_issue_s, updates = run(file, changes)
    chosen = updates[skip : len(updates) - leave]
    seconds = chosen[-1].t_s - (updates[skip - 1].t_s if skip else first_issue_s)
    steps = len(chosen) / updates_per_step
    return Steady(
        goodput=sum(update.loss_tokens for update in chosen) / seconds,
        update_s=seconds / steps,
        generation_s=sum(update.waited_s for update in chosen) / steps,
    )


def fluid_fraction(file: str, changes: Sequence[str]) -> float:
    """The rollout fraction at which both sides take equally long when nothing ever waits: least work of rollout over
    least work of both."""
    # Under `window` there is no bound, but the work is the same. Over many updates the wait for the first is nothing.
    lasting = (*changes, "schedule.staleness_counts=oldest_token", f"train.updates={FLUID_UPDATES}")
    resolved = prepare(ROOT / file, lasting, command="sim")
    world = simulated_world(resolved)
    bound = planned_bound(resolved, world.workload, world.cost, world.engine)
    assert bound is not None
    rollout_s = max(bound.terms["rollout"], bound.terms["kv"]) * len(resolved.layout.engine_ranks)
    trainer_s = bound.terms["trainer"] * len(resolved.layout.actor_ranks)
    return rollout_s / (rollout_s + trainer_s)


def figures(name: str, size: str) -> list[Figure]:
    """All comparisons of one claim."""
    claim = TABLE["claims"][name]

    def of(arm: str) -> Steady:
        skip, leave = claim["steady"][arm]
        changes = overrides(claim, size, arm)
        per_step = claim.get("updates_per_step", 1)
        return steady(claim["file"], changes, skip=skip, leave=leave, updates_per_step=per_step)

    def measured(figure: Mapping[str, Any]) -> float:
        arms = figure["arms"]
        if figure.get("fluid_fraction"):
            return fluid_fraction(claim["file"], overrides(claim, size, arms[0]))
        if figure.get("best_fraction"):
            best = max(arms, key=lambda arm: of(arm).goodput)
            part, _, whole = best.partition("/")
            return int(part) / int(whole)
        if "value" in figure:
            return float(getattr(of(arms[0]), figure["value"]))
        over, under = (float(getattr(of(arm), figure["ratio"])) for arm in arms)
        return over / under

    return [
        Figure(
            claim=name,
            name=key,
            published=tuple(figure["published"]),
            measured=measured(figure),
            low=figure["within"][0],
            high=figure["within"][1],
            reported=figure.get("reported", False),
            outside=_reason(figure.get("outside", ""), size),
        )
        for key, figure in claim["figures"].items()
        if size == "full" or not figure.get("full_only")
    ]


def _reason(outside: str | Mapping[str, str], size: str) -> str:
    return outside if isinstance(outside, str) else outside.get(size, "")


def arms(name: str, size: str) -> dict[str, Steady]:
    """All runs of one claim."""
    claim = TABLE["claims"][name]
    per_step = claim.get("updates_per_step", 1)
    return {
        arm: steady(claim["file"], overrides(claim, size, arm), skip=skip, leave=leave, updates_per_step=per_step)
        for arm, (skip, leave) in claim["steady"].items()
    }


def floor(name: str, size: str, *, capped: bool = True) -> dict[str, Any]:
    """A family's file under a simple schedule, next to its floor. `capped`: with the cap on tasks, where it has one."""
    wanted = TABLE["floors"][name]
    result = simulate(ROOT / wanted["file"], [*(wanted["set"] if capped else []), *wanted.get(size, [])])
    return {
        "family": name,
        "set": " ".join(wanted["set"]) if capped else "",
        "binding": result["binding"],
        "rho": result["rho"],
        "rho_order": result["rho_order"],
        "figure": wanted["figure"],
        "measured": result[wanted["figure"]],
        "floor": wanted["floor"],
    }


def candidate(name: str, label: str) -> dict[str, Any]:
    """One row at its best split, next to the other simulator's."""
    wanted = TABLE["candidates"][name]
    row = wanted["rows"][label]
    sweep: dict[str, float] = {}
    for split in ["all"] if label == "sync" else wanted["splits"]:
        changes = [*wanted["set"], *row["set"], *([] if split == "all" else [f"cluster.rollout_ranks={split}"])]
        sweep[str(split)] = steady(
            wanted["file"], tuple(changes), skip=wanted["skip"], leave=row.get("leave", 0)
        ).goodput
    best = max(sweep, key=lambda split: sweep[split])
    ratio = sweep[best] / row["other"]
    return {"row": label, "other": row["other"], "measured": sweep[best], "ratio": ratio, "best": best, "sweep": sweep}


def _print_claim(name: str, size: str) -> list[Figure]:
    claim = TABLE["claims"][name]
    print(f"\n{name}: {claim['says']}\n  {claim['source']}")
    for arm, values in arms(name, size).items():
        print(
            f"  {arm:18} update_s {values.update_s:8.1f}  generation_s {values.generation_s:8.1f}  "
            f"rollout_share {values.rollout_share:5.3f}  goodput {values.goodput:11,.0f} tokens/s"
        )
    found = figures(name, size)
    for figure in found:
        verdict = "ok" if figure.within else f"outside: {figure.outside or 'NOT EXPECTED'}"
        if figure.reported:
            verdict = "reported"
        published = " ".join(f"{value:g}" for value in figure.published) or "-"
        print(
            f"  {figure.name:18} published {published:12} measured {figure.measured:7.3f}  "
            f"within {figure.low:g} … {figure.high:g}  {verdict}"
        )
    sys.stdout.flush()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--short", action="store_true", help="the sizes of the tests")
    parser.add_argument("--floors", action="store_true")
    parser.add_argument("--candidates", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    part = "floors" if args.floors else "candidates" if args.candidates else "claims"
    unknown = [name for name in args.names if name not in TABLE[part]]
    if unknown:
        parser.error(f"{unknown[0]} is not one of {', '.join(TABLE[part])}")
    size = "short" if args.short else "full"
    for name in args.names or TABLE[part]:
        if args.floors:
            _say(floor(name, size), args.json)
            if any(change.startswith("env.slots=") for change in TABLE[part][name]["set"]):  # a cap on tasks
                _say(floor(name, size, capped=False), args.json)
        elif args.candidates:
            for label in TABLE[part][name]["rows"]:
                _say({"file": name, **candidate(name, label)}, args.json)
        elif args.json:
            for figure in figures(name, size):
                print(json.dumps({**vars(figure), "within": figure.within}), flush=True)
        else:
            _print_claim(name, size)


def _say(row: Mapping[str, Any], as_json: bool) -> None:
    def short(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"

    if as_json:
        print(json.dumps(row), flush=True)
        return
    cells = []
    for key, value in row.items():
        if isinstance(value, dict):
            cells.append(f"{key} " + ", ".join(f"{name}: {short(number)}" for name, number in value.items()))
        else:
            cells.append(f"{key} {short(value) if isinstance(value, (int, float)) else value}")
    print("  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
