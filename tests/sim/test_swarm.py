"""The swarm: 200 small instances under faults break no rule, exercise every rule, and would find a broken runtime."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import pytest

from tiderl.api.swarm import swarm
from tiderl.runtime.buffer import Buffer, Group
from tiderl.runtime.recovery import Recovered
from tiderl.runtime.run import Loops, Run
from tiderl.schedule.priority import WEIGHTS, PriorityName
from tiderl.sim.instances import LARGE_PROMPT, FileSize, draw_instance
from tiderl.sim.swarm import SeedReport, SwarmReport, draw_plan, out_of_reach

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "sim" / "webshop-7b-32xh100.yaml"
BUILTIN = ROOT / "examples" / "builtin.yaml"
CORPUS = Path(__file__).with_name("corpus.txt")
PARTS, SEEDS_A_PART = 8, 25


@functools.cache
def part(number: int) -> tuple[SeedReport, ...]:
    first = number * SEEDS_A_PART
    return tuple(swarm(FILE, range(first, first + SEEDS_A_PART)).seeds)


def told(reports: Sequence[SeedReport]) -> str:
    return "\n".join(f"seed {r.seed}: {what}" for r in reports for what in r.violations)


@pytest.mark.parametrize("number", range(PARTS))
def test_no_seed_breaks_a_rule(number: int) -> None:
    assert told(part(number)) == ""


def test_every_fault_and_every_situation_occurs_in_200_seeds() -> None:
    report = SwarmReport(str(FILE), [seed for number in range(PARTS) for seed in part(number)])
    assert len(report.seeds) == 200
    print(*sorted((report.fired + report.seen).items()), sep="\n")  # `pytest -rP` shows how often each occurred
    assert report.never() == []


def corpus() -> list[tuple[str, int, list[str], str]]:
    """(file, seed, overrides, what it found) of each line."""
    lines = [line for line in CORPUS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    parts = [line.split(maxsplit=3) for line in lines]
    return [(file, int(seed), [] if given == "-" else given.split(";"), found) for file, seed, given, found in parts]


@pytest.mark.parametrize(("file", "seed", "given", "found"), corpus())
def test_a_seed_that_once_failed_fails_no_more(file: str, seed: int, given: list[str], found: str) -> None:
    assert told(swarm(ROOT / file, [seed], given).seeds) == "", found


def test_a_seed_is_the_same_run_in_another_process() -> None:
    seeds = [3, 11, 17]
    command = (
        "from tiderl.api.swarm import swarm; import sys; "
        f"print(*[r.log_sha256 for r in swarm(sys.argv[1], {seeds}).seeds])"
    )
    other = subprocess.run([sys.executable, "-c", command, str(FILE)], capture_output=True, text=True, check=True)
    here = [report.log_sha256 for report in swarm(FILE, seeds).seeds]
    assert other.stdout.split() == here == [r.log_sha256 for r in swarm(FILE, seeds).seeds]
    assert len(set(here)) == len(seeds)


def test_a_swarm_passes_the_file_and_overrides_on_to_its_replay_command() -> None:
    report = swarm(BUILTIN, [5], ["eval.prompts=3"], make_run=EarlyPublisher)
    failed = report.to_json(overrides=["eval.prompts=3"])["violations"]
    assert [found["seed"] for found in failed] == [5]
    assert failed[0]["replay"] == f"tiderl sim {BUILTIN} -o eval.prompts=3 --swarm 1 --seed 5"
    assert swarm(BUILTIN, [5], ["eval.prompts=3"], make_run=EarlyPublisher).failed[0].violations == tuple(
        failed[0]["what"]
    )


# --- broken runtimes, each of which the swarm must find within some seeds


def found_by(mutant: Callable[..., Run], words: str, *, within: int, file: Path, faults: str) -> int | None:
    """The first seed that tells of it in these words."""
    for seed in range(within):
        (report,) = swarm(file, [seed], [f"sim.faults={faults}"], make_run=mutant).seeds
        if any(words in what for what in report.violations):
            return seed
    return None


class EarlyPublisher(Run):
    """Publishes a version before its update is in the journal."""

    def _build(self, *arguments: object) -> Loops:
        loops = super()._build(*arguments)  # type: ignore[arg-type]
        journal, commit = loops.journal, loops.journal.commit

        class Early:
            def __getattr__(self, name: str) -> object:
                return getattr(journal, name)

            async def commit(self, update: int, batch: Sequence[Group]) -> None:
                journal.published(update)
                await commit(update, batch)

        loops.training.journal = Early()  # type: ignore[assignment]
        return loops


class TwiceRedone(Run):
    """Redoes, after a restore, also the update that the checkpoint holds: it is trained twice."""

    def _build(self, *arguments: object) -> Loops:
        loops = super()._build(*arguments)  # type: ignore[arg-type]
        restorer = loops.restorer
        newest = restorer._restore_newest

        async def one_less(recovered: Recovered) -> int:
            return await newest(recovered) - 1

        restorer._restore_newest = one_less  # type: ignore[method-assign]
        return loops


class Greedy(Buffer):
    """Consumes what is ready, oldest first, without asking whether a younger group takes an older one's slot."""

    def choose(self) -> list[Group]:
        return self._oldest(self.batch_groups)

    def more(self) -> list[Group]:
        return self._oldest(self.batch_groups - len(self.taken))

    def _oldest(self, count: int) -> list[Group]:
        ready = sorted((g.ready_s, g.prompt_id) for g in self.ready_groups if g.prompt_id not in self.taken)
        found = [self.groups[prompt_id] for _, prompt_id in ready]
        return found[:count] if len(found) >= count else []


class WithoutFeasibility(Run):
    """Consumes oldest ready first, and does not look at the bound."""

    def _build(self, *arguments: object) -> Loops:
        loops = super()._build(*arguments)  # type: ignore[arg-type]
        greedy = Greedy(**vars(loops.buffer))
        greedy._check_bound = lambda: None  # type: ignore[method-assign]
        loops.training._check_staleness = lambda update, batch: None  # type: ignore[method-assign]
        loops.buffer = loops.rollout.buffer = loops.training.buffer = greedy
        return loops


class ForgetsRole(Run):
    """Trains on a rank that goes on generating."""

    def _build(self, *arguments: object) -> Loops:
        loops = super()._build(*arguments)  # type: ignore[arg-type]
        loops.training.shared_replicas = []
        return loops


class KeepsLost(Run):
    """Goes on as if a replica that came back still had its weights."""

    def _build(self, *arguments: object) -> Loops:
        loops = super()._build(*arguments)  # type: ignore[arg-type]
        publisher, lost = loops.publisher, loops.publisher.lost

        def keep(replica: int) -> None:
            version = publisher.loaded[replica]
            lost(replica)
            publisher.loaded[replica] = version

        publisher.lost = keep  # type: ignore[method-assign]
        return loops


CRASHES = "{engine_crash: 0.03}"
MUTANTS = [
    (EarlyPublisher, "published before its update is committed", 3, BUILTIN, "none"),
    (TwiceRedone, "holds the updates", 60, BUILTIN, "none"),
    (WithoutFeasibility, "I3", 60, FILE, "none"),
    (ForgetsRole, "I5", 10, BUILTIN, "none"),
    (KeepsLost, "liveness", 20, FILE, CRASHES),
]
"""Runtime, what tells of it, within how many seeds, in which file, under which faults (none: each seed draws them)."""


@pytest.mark.parametrize(("mutant", "words", "within", "file", "faults"), MUTANTS, ids=[m[0].__name__ for m in MUTANTS])
def test_a_broken_runtime_is_found(
    mutant: Callable[..., Run], words: str, within: int, file: Path, faults: str
) -> None:
    assert found_by(mutant, words, within=within, file=file, faults=faults) is not None


# --- what a seed means


def test_an_instance_is_never_larger_than_its_file() -> None:
    small = FileSize(2, 1, 2, 2, 3, 128, 16, {"name": "builtin"}, 20, 10, 10_000)
    for seed in range(200):
        chosen = drawn(seed, small)
        assert int(chosen["cluster.ranks"]) <= 2
        assert int(chosen["train.updates"]) <= 2
        assert int(chosen["algorithm.group_size"]) == 2
        assert int(chosen["rollout.max_turns"]) <= 3
        assert int(chosen["train.global_batch_groups"]) % int(chosen["train.steps_per_batch"]) == 0


def drawn(seed: int, file: FileSize) -> dict[str, str]:
    return dict(override.split("=", 1) for override in draw_instance(seed, file))


WIDE = FileSize(32, 64, 8, 100, 20, 8192, 512, {"name": "builtin", "deadline_s": 30}, 500, 300, 900_000, images=True)


def test_task_batching_is_drawn_with_every_rule_and_small_pools() -> None:
    found = [chosen for seed in range(400) if (chosen := drawn(seed, WIDE))["rollout.kv_policy"] == "ctb"]
    assert 200 < len(found) < 320
    assert {chosen["rollout.priority"] for chosen in found} == set(get_args(PriorityName))
    weighed = [json.loads(chosen["rollout.priority_weights"]) for chosen in found if "weighted" in chosen.values()]
    assert all(tuple(weights) == WEIGHTS for weights in weighed)
    assert any(0.0 in weights.values() for weights in weighed)
    assert sum("rollout.image_window" in chosen for chosen in found) > 50
    assert sum("env" in chosen for chosen in found) > 50
    small = 0
    for chosen in found:
        context, budget = int(chosen["rollout.max_context_tokens"]), chosen["rollout.kv_budget_tokens"]
        first = 500 * (LARGE_PROMPT if "env" in chosen else 1)
        assert context > first + 300 - 1
        assert context > 512  # what a turn may say leaves room for an observation
        assert int(chosen["train.micro_batch_tokens"]) >= context
        assert budget == "auto" or context <= int(budget) <= 900_000
        ranks, alone = int(chosen["cluster.ranks"]), chosen["schedule.strategy"] == "sync"
        replicas = ranks if alone or ranks == 1 else ranks // 2
        sizes = (int(chosen[key]) for key in ("train.global_batch_groups", "algorithm.group_size"))
        tasks = math.prod(sizes) * (1 + int(chosen["schedule.max_staleness"]))
        need = min(context, first + 300 * int(chosen["rollout.max_turns"]))
        small += budget != "auto" and int(budget) * replicas < tasks * need
    assert 0.4 < small / len(found) < 0.75


def test_two_kinds_of_tasks_are_the_file_s_own_and_one_with_large_prompts() -> None:
    mixed = next(chosen for seed in range(100) if "env" in (chosen := drawn(seed, WIDE)))
    small, large = json.loads(mixed["env"])
    assert small == WIDE.environment
    assert {**large, "weight": None} == {**small, "weight": None}


def test_what_a_file_or_command_asks_for_is_not_drawn() -> None:
    for policy in ("lru", "ctb"):
        fixed = dataclasses.replace(WIDE, kv_policy=policy)
        assert all(drawn(seed, fixed)["rollout.kv_policy"] == policy for seed in range(50))


def test_what_a_file_cannot_have_is_not_asked_for() -> None:
    one = dataclasses.replace(WIDE, ranks=2, images=False, kv_policy="lru")
    assert {"a task paused", "offload_lost", "a context forks", "a task migrated: lost"} <= out_of_reach(one)
    assert out_of_reach(dataclasses.replace(WIDE, offloads=True)) == frozenset()


def test_calm_comes_in_every_seed_and_faults_differ() -> None:
    plans = [draw_plan(seed, undisturbed_s=10.0, deadline_s=30.0) for seed in range(50)]
    assert all(3.0 <= plan.calm_s <= 15.0 for plan in plans)
    assert len({tuple(sorted(plan.probabilities)) for plan in plans}) == 50


def test_too_few_seeds_are_not_asked_for_rare_situations() -> None:
    assert SwarmReport("x").never() == []
