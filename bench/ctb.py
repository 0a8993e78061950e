"""Continuous task batching beside request-level LRU: one rank, a KV pool smaller than its tasks need, waiting agents.

    OMP_NUM_THREADS=1 python bench/ctb.py [--engine torch|vllm] [--model tiny|small] [--repeats 3] [--json]
    OMP_NUM_THREADS=1 python bench/ctb.py --grid      pools of 2 to 1/12 of the need, wait medians of 0.02 to 1 s
    python bench/ctb.py --short                       both policies give the same tokens; measures nothing

The real runtime plays one rollout step: all tasks of 16 groups of 8 (`ctb_workload.py`) are offered at once, `lru` and
`ctb` in turn, and the trainer takes no time. Every arm has the same weights, seeds, observations and waits, and every
turn says as many tokens, so both arms sample equally many. Seconds are from the first admission to the last task's end.

    hit         context tokens that were not computed again, of those of all turns; `best`: in a pool without end
    recomputed  positions prefilled beyond what a pool without end would prefill
    tokens/s    sampled

`--clock cpu`: the clock of `ctb_workload.CpuLoop`, which other processes do not disturb. Figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from alternatives import write_model
from ctb_workload import MAX_CONTEXT_TOKENS, Agents, CpuLoop, IdsRenderer, KeptBlobs, Workload, run_settings

from tiderl.cluster.inline import InlineCluster
from tiderl.cluster.specs import HostSpec
from tiderl.data.events import Event, TaskAdmitted, TaskFinished, TaskPaused, TurnFinished
from tiderl.data.settings import EngineSettings, ModelSettings, TrainerSettings
from tiderl.runtime.ports import Ports
from tiderl.runtime.run import Run
from tiderl.schedule.strategy import get
from tiderl.store.checkpoints import MemoryCheckpoints
from tiderl.store.memory import MemoryLedger

GROUPS = 16
POOL_FRACTION = 1 / 6
MEDIAN_S = 0.1
GRID_POOLS = (2.0, 1.0, 1 / 3, 1 / 6, 1 / 12)
GRID_MEDIANS_S = (0.02, 0.1, 0.3, 1.0)
POLICIES = ("lru", "ctb")
SHORT_GROUPS, SHORT_MEDIAN_S = 3, 0.002
BLOCK_TOKENS = 32  # the pool is whole blocks of an engine that has blocks (vLLM on a CPU: 32)
HIT_TARGET, SPEED_TARGET, WORST_SPEED = 1.6, 1.25, 0.98
ENGINES = {
    ("torch", "wall"): "tiderl.engines.torch_engine:build",
    ("torch", "cpu"): "ctb_workload:engine_by_cpu_time",
    ("vllm", "wall"): "tiderl.engines.vllm_engine:build",
}


@dataclass
class Log:
    """A recorder that keeps what the figures are made of."""

    turns: list[TurnFinished] = field(default_factory=list)
    started_s: list[float] = field(default_factory=list)  # admissions
    ended_s: list[float] = field(default_factory=list)
    pauses: int = 0

    def emit(self, event: Event) -> None:
        if isinstance(event, TurnFinished):
            self.turns.append(event)
        elif isinstance(event, TaskAdmitted):
            self.started_s.append(event.t_s)
        elif isinstance(event, TaskFinished):
            self.ended_s.append(event.t_s)
        self.pauses += isinstance(event, TaskPaused)


@dataclass(frozen=True)
class Measured:
    """One run of one policy."""

    seconds: float
    tokens_per_s: float
    hit_fraction: float
    prefilled_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    preemptions: int
    evicted_tokens: int
    pauses: int
    busy_fraction: float  # CPU seconds of this process, of the step's seconds
    tasks_mean: float  # in flight


@dataclass(frozen=True)
class Arena:
    """What all arms share."""

    engine: str
    clock: str
    model: ModelSettings
    weights: Path

    def run(self, workload: Workload, kv_policy: str, pool_fraction: float) -> tuple[Measured, KeptBlobs]:
        loop_factory = CpuLoop if self.clock == "cpu" else None
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(self._play(workload, kv_policy, pool_fraction))

    async def _play(self, workload: Workload, kv_policy: str, pool_fraction: float) -> tuple[Measured, KeptBlobs]:
        pool_tokens = max(int(pool_fraction * workload.need_tokens), 2 * MAX_CONTEXT_TOKENS)
        engine = EngineSettings(self.model, -(-pool_tokens // BLOCK_TOKENS) * BLOCK_TOKENS, kv_policy=kv_policy)
        trainer = TrainerSettings(self.model, seed=workload.seed, temperature=1.0, weights_dir=str(self.weights))
        core = ENGINES[self.engine, self.clock]
        cluster = InlineCluster([HostSpec(0, engine, core, trainer, "ctb_workload:idle_trainer")])
        log, blobs = Log(), KeptBlobs()
        ports = Ports(
            cluster=cluster,
            environments=Agents(workload),
            renderer=IdsRenderer(workload.vocab_size),
            ledger=MemoryLedger(),
            blobs=blobs,
            checkpoints=MemoryCheckpoints(),
            recorder=log,
        )
        await cluster.start()
        cpu_s = time.process_time()
        try:
            await Run(ports, run_settings(workload, kv_policy), get("sync")).run()
            cpu_s = time.process_time() - cpu_s
            stats = cluster.engines[0].stats
        finally:
            await cluster.close()
        seconds = max(log.ended_s) - min(log.started_s)
        generated = sum(turn.new_tokens for turn in log.turns)
        assert generated == workload.generated_tokens, (generated, workload.generated_tokens)
        return (
            Measured(
                seconds=seconds,
                tokens_per_s=generated / seconds,
                hit_fraction=sum(turn.cached_tokens for turn in log.turns) / workload.context_tokens,
                prefilled_tokens=stats.prefilled_tokens,
                recomputed_tokens=stats.prefilled_tokens - workload.least_prefilled_tokens,
                generated_tokens=generated,
                preemptions=stats.preemptions,
                evicted_tokens=stats.evicted_tokens,
                pauses=log.pauses,
                busy_fraction=cpu_s / seconds,
                tasks_mean=(sum(log.ended_s) - sum(log.started_s)) / seconds,
            ),
            blobs,
        )


@dataclass(frozen=True)
class Cell:
    """Medians of both policies at one pool size and wait."""

    pool_fraction: float
    median_s: float
    lru: Measured
    ctb: Measured

    @property
    def speed(self) -> float:
        return self.ctb.tokens_per_s / self.lru.tokens_per_s

    @property
    def hits(self) -> float:
        return self.ctb.hit_fraction / self.lru.hit_fraction if self.lru.hit_fraction else float("inf")


def measure(arena: Arena, workload: Workload, pool_fraction: float, repeats: int, note: Callable[[str], None]) -> Cell:
    """Both policies in turn, `repeats` times."""
    runs: dict[str, list[Measured]] = {policy: [] for policy in POLICIES}
    for _ in range(repeats):
        for policy in POLICIES:
            measured, _blobs = arena.run(workload, policy, pool_fraction)
            runs[policy].append(measured)
            note(
                f"  {policy} {measured.seconds:.2f} s, hit {measured.hit_fraction:.3f}, "
                f"{measured.tasks_mean:.0f} tasks in flight, {measured.busy_fraction:.0%} computing"
            )
    return Cell(pool_fraction, workload.median_s, medians(runs["lru"]), medians(runs["ctb"]))


def medians(runs: list[Measured]) -> Measured:
    return Measured(**{name: statistics.median(asdict(run)[name] for run in runs) for name in asdict(runs[0])})


def cells(arena: Arena, options: argparse.Namespace, note: Callable[[str], None]) -> Iterator[Cell]:
    pools = GRID_POOLS if options.grid else (POOL_FRACTION,)
    waits_s = GRID_MEDIANS_S if options.grid else (MEDIAN_S,)
    for pool_fraction in pools:
        for median_s in waits_s:
            workload = Workload(GROUPS, arena.model.vocab_size, median_s)
            note(f"pool {pool_fraction:.3f} of the need, waits of {median_s:g} s")
            yield measure(arena, workload, pool_fraction, options.repeats, note)


def row(cell: Cell, best: float) -> str:
    both = f"{cell.pool_fraction:8.3f} {cell.median_s:6.2f}"
    for measured in (cell.lru, cell.ctb):
        both += f" | {measured.hit_fraction:6.3f} {measured.tokens_per_s:9.1f} {measured.recomputed_tokens:11.0f}"
        both += f" {measured.seconds:7.2f}"
    return f"{both} | {cell.hits:6.2f} {cell.speed:6.3f}   best hit {best:.3f}"


def check_same_tokens(arena: Arena) -> bool:
    """Both policies in a small pool; every task's ids are equal."""
    workload = Workload(SHORT_GROUPS, arena.model.vocab_size, SHORT_MEDIAN_S)
    lru, ctb = (arena.run(workload, policy, POOL_FRACTION)[1].ids for policy in POLICIES)
    return len(lru) == len(workload.tasks) and lru == ctb


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--model", choices=("tiny", "small"), default="small")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if (options.engine, options.clock) not in ENGINES:
        parser.error("vLLM computes in threads of its own: --clock wall")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        model, weights = write_model("tiny" if options.short else options.model, Path(folder))
        model = msgspec.structs.replace(model, max_context_tokens=MAX_CONTEXT_TOKENS)
        arena = Arena(options.engine, options.clock, model, weights)
        if options.short:
            same = check_same_tokens(arena)
            print(json.dumps({"figures": [], "ids_equal": same}))
            return 0 if same else 1
        workload = Workload(GROUPS, model.vocab_size, MEDIAN_S)
        best = 1 - workload.least_prefilled_tokens / workload.context_tokens
        measured = list(cells(arena, options, note))
    if options.json:
        print(json.dumps(as_json(options, workload, best, measured)))
        return 0
    print(
        " of need   wait |"
        + 2 * "    hit  tokens/s  recomputed seconds |"
        + "   hits  speed   (lru, then ctb, then ctb/lru)"
    )
    for cell in measured:
        print(row(cell, best))
    return 0


def as_json(options: argparse.Namespace, workload: Workload, best: float, measured: list[Cell]) -> dict[str, Any]:
    return {
        "engine": options.engine,
        "model": options.model,
        "clock": options.clock,
        "repeats": options.repeats,
        "tasks": len(workload.tasks),
        "need_tokens": workload.need_tokens,
        "best_hit_fraction": best,
        "targets": {"hits": HIT_TARGET, "speed": SPEED_TARGET, "worst_speed": WORST_SPEED},
        "figures": [{**asdict(cell), "hits_ratio": cell.hits, "speed_ratio": cell.speed} for cell in measured],
    }


if __name__ == "__main__":
    raise SystemExit(main())
