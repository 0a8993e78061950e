"""A window of images in virtual time: the runtime's records, the engine's cache, the trainer's tokens, the bound."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from support.virtual_runs import VirtualRun, virtual_run

from tiderl.api.bound import planned_bound
from tiderl.api.swarm import swarm
from tiderl.api.virtual import Persisted, simulate, simulated_world
from tiderl.config.machine import prepare
from tiderl.cost import cost_model
from tiderl.data.errors import ConfigurationError
from tiderl.data.events import MicrobatchFormed, TurnFinished, UpdateCommitted
from tiderl.data.records import Prompt, TaskKey, Trajectory, WeightHandle
from tiderl.data.settings import EngineSettings, ModelSettings, WorkloadProfile
from tiderl.data.turns import Sampling, Turn
from tiderl.data.window import ImageWindow
from tiderl.runtime.buffer import Group, Member
from tiderl.sim.engine import SimEngine
from tiderl.sim.host_kv import HostKv
from tiderl.sim.kv import BlockPool, Shared
from tiderl.sim.loop import run_virtual
from tiderl.sim.ranks import SimRank
from tiderl.sim.workload import Workload
from tiderl.store.blobs import MemoryBlobs

OSWORLD = Path(__file__).parents[2] / "examples" / "sim" / "osworld-4b-32xh100.yaml"
PROMPT, IMAGE, SAID = 40, 60, 10
SCREENS = (
    "rollout.max_turns=30",
    "rollout.max_context_tokens=4096",
    "rollout.max_new_tokens_per_turn=64",
    "rollout.kv_budget_tokens=200000",
    "env.slots=12",
    "sim.kv_block_tokens=1",
    f"sim.workload={{turns_median: 9, turns_sigma: 0.6, first_observation_tokens: {PROMPT}, "
    f"observation_tokens: {IMAGE}, observation_sigma: 0, action_tokens: {SAID}, action_sigma: 0, step_s: 0.5, "
    "step_sigma: 0.5, observation_images: true}",
)
"""One rank's cache holds all tasks, block by position, so only the window and new weights cost anything."""


class Kept(MemoryBlobs):
    """Payloads that stay after the run has deleted them."""

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[TaskKey, Trajectory] = {}

    async def put(self, trajectory: Trajectory) -> str:
        self.all[trajectory.key] = trajectory
        return await super().put(trajectory)


def run(*overrides: str) -> tuple[VirtualRun, dict[TaskKey, Trajectory]]:
    blobs = Kept()
    done = virtual_run([*SCREENS, *overrides], persisted=Persisted(blobs=blobs))
    return done, blobs.all


def windowed(images: int, drop: int) -> tuple[str, str]:
    return f"rollout.image_window={images}", f"rollout.image_window_drop={drop}"


def turns_of(done: VirtualRun) -> dict[TaskKey, list[TurnFinished]]:
    found = defaultdict(list)
    for event in done.log.of(TurnFinished):
        found[TaskKey(event.split, event.prompt_id, event.member, event.attempt)].append(event)
    return found


def expected_context(turn: int, images: int, drop: int) -> tuple[int, int]:
    """(Tokens of a turn's context, how many of them the turn before's began with), counted image by image."""
    there: list[int] = []
    begins, said = 0, 0
    for number in range(turn):
        begins = PROMPT + (number + 1) * SAID + IMAGE * len(there)  # all that there is, if nothing leaves
        said = number + 1
        if len(there) == images:
            begins = PROMPT + SAID * (there[0] + 1)  # prompt and actions stand before the oldest image
            del there[:drop]
        there.append(number)
    return PROMPT + said * SAID + IMAGE * len(there), begins


@pytest.mark.parametrize(("images", "drop"), [(1, 1), (3, 1), (3, 2), (3, 3), (5, 4)])
def test_every_turn_is_asked_with_the_context_of_the_window_and_finds_what_stayed_of_it(images: int, drop: int) -> None:
    done, _ = run(*windowed(images, drop))
    found = turns_of(done)
    assert max(map(len, found.values())) > 3 * images
    for turns in found.values():
        for event in turns:
            context, same = expected_context(event.turn, images, drop)
            assert event.context_tokens == context
            if event.turn == 0 or event.recompute_s:
                continue
            # The last token of a turn has no KV yet; new weights between two turns have dropped everything.
            before = turns[event.turn - 1]
            kept = same - 1 if same == before.context_tokens + before.new_tokens else same
            if event.version == before.first_version:
                assert event.cached_tokens == kept
            else:
                assert event.cached_tokens in (kept, 0, PROMPT - 1)


def test_the_records_fork_at_each_turn_past_the_window_and_every_token_is_trained_once() -> None:
    done, records = run(*windowed(3, 1))
    committed = {row.id: row for row in done.replay.trajectories if row.status == "trained"}
    trained = [t for t in records.values() if t.id in committed]
    assert len(trained) == len(committed) > 50
    for t in trained:
        assert len(t.forks) == max(0, len(t.turns) - 1 - 3)
        assert t.loss_tokens == len(t.turns) * SAID
        group = Group(0, Prompt("p"), 0, 0, [Member(0, t.id, trajectory=t)])
        lengths = [sequence.tokens for sequence in group.sequences()]
        last_turns = [*range(3, len(t.turns) - 1), len(t.turns) - 1] if t.forks else [len(t.turns) - 1]
        assert lengths == [expected_context(turn, 3, 1)[0] + SAID for turn in last_turns]
    updates = done.log.of(UpdateCommitted)
    assert sum(event.loss_tokens for event in updates) == sum(t.loss_tokens for t in trained)
    assert sum(event.tokens for event in updates) == sum(t.trained_tokens for t in trained)
    formed = done.log.of(MicrobatchFormed)
    assert sum(event.tokens for event in formed) == sum(t.trained_tokens for t in trained)
    assert sum(event.sequences for event in formed) == sum(1 + len(t.forks) for t in trained)
    assert sum(event.metrics["loss_tokens"] for event in updates) == sum(t.loss_tokens for t in trained)


def test_a_plan_is_what_the_runtime_plays() -> None:
    done, records = run(*windowed(3, 2))
    profile = WorkloadProfile(**done.resolved.config.sim.workload.model_dump())
    workload = Workload(
        done.resolved.config.seed,
        profile,
        max_turns=30,
        max_context_tokens=4096,
        max_new_tokens_per_turn=64,
        window=ImageWindow(3, 2),
    )
    forked = 0
    for key, turns in turns_of(done).items():
        if key not in records or any(event.finish_reason == "aborted" for event in turns):
            continue
        plan = workload.plan(key)
        assert [event.context_tokens for event in turns] == [turn.context_tokens for turn in plan.turns]
        assert len(plan.turns[-1].rewrites) == len(records[key].forks)
        forked += bool(records[key].forks)
    assert forked > 20


def test_a_context_that_only_its_window_holds_is_played_to_its_end() -> None:
    longest = PROMPT + 29 * SAID + 3 * IMAGE + 64
    limits = (f"rollout.max_context_tokens={longest}", f"train.micro_batch_tokens={longest}")
    endings = [{t.ending for t in run(*limits, *more)[1].values()} for more in ((), windowed(3, 1))]
    assert "budget_tokens" in endings[0]
    assert "budget_tokens" not in endings[1]


def test_a_window_that_never_fills_changes_nothing() -> None:
    logs = [run(*more)[0].log.events for more in ((), windowed(29, 1), windowed(29, 29))]
    assert logs[0] == logs[1] == logs[2]


SMALL = ("train.updates=3", "train.global_batch_groups=4", "eval.every_updates=0", "cluster.ranks=4")


def test_dropping_several_at_once_computes_less_again_and_trains_fewer_tokens() -> None:
    results = [
        simulate(OSWORLD, [*SMALL, "cluster.rollout_ranks=2", *windowed(5, drop)]).values for drop in (1, 2, 3, 4, 5)
    ]
    hits = [result["kv_hit_fraction"] for result in results]
    assert hits == sorted(hits)
    assert hits[1] > 1.4 * hits[0]
    trained = [result["trained_tokens_mean"] for result in results]
    assert trained == sorted(trained, reverse=True)
    assert trained[1] < 0.65 * trained[0]
    for result in results:
        assert 0 < result["goodput_tokens_per_s"] <= result["bound_tokens_per_s"]
        assert result["rho"] <= result["rho_order"] * (1 + 1e-9)


def least_work(drop: int) -> tuple[int, int]:
    """(Prefilled, trained) tokens of the first update's tasks, from what each turn says and image by image."""
    resolved = prepare(OSWORLD, BOUND, command="sim")
    (workload,) = simulated_world(resolved).workloads.values()
    prefilled, trained = 999 * 2, 0  # of each group's prompt all but the last position
    for key in (TaskKey("train", prompt, member) for prompt in range(2) for member in range(4)):
        said: list[int] = []
        there: list[int] = []
        kept = 999
        for turn in range(min(workload.turns(key), 50)):
            context = 1000 + sum(said) + 920 * len(there)
            prefilled += context - kept
            said.append(min(workload.action_tokens(key, turn), 1024))
            ends = context + said[-1]
            kept = ends - 1
            if turn + 1 < min(workload.turns(key), 50):
                if len(there) == 5:
                    kept = 1000 + sum(said[: there[0] + 1])
                    del there[:drop]
                    trained += ends
                there.append(turn)
        trained += ends
    return prefilled, trained


BOUND = ("train.updates=1", "train.global_batch_groups=2", "algorithm.group_size=4", "cluster.ranks=2")
BOUND += ("cluster.rollout_ranks=1",)
FREE = ("context_token_s", "sequence_s", "prefill_token_s", "reference_token_s", "forward_token_s", "backward_token_s")


@pytest.mark.parametrize("drop", [1, 3])
def test_the_bound_counts_what_has_to_be_computed_again_and_every_sequence(drop: int) -> None:
    terms = {}
    for name, cost in (("rollout", "prefill_token_s"), ("trainer", "forward_token_s")):
        free = [f"sim.cost.{other}=0" for other in FREE]
        changes = [*BOUND, *free, *windowed(5, drop), f"sim.cost.{cost}=1000"]
        resolved = prepare(OSWORLD, changes, command="sim")
        world = simulated_world(resolved)
        bound = planned_bound(resolved, world.workload, world.cost, world.engine)
        assert bound is not None
        terms[name] = bound.terms[name] / 1000
    assert (terms["rollout"], terms["trainer"]) == pytest.approx(least_work(drop), rel=2e-4)


def test_the_same_seed_forks_the_same() -> None:
    logs = {simulate(OSWORLD, [*SMALL, "cluster.rollout_ranks=2"])["log_sha256"] for _ in range(2)}
    assert len(logs) == 1


def test_a_swarm_with_a_window_breaks_no_rule() -> None:
    report = swarm(OSWORLD, range(30), ["rollout.image_window=2"])
    assert [what for seed in report.seeds for what in seed.violations] == []
    assert sum(seed.seen.get("a context forks", 0) for seed in report.seeds) > 100


def test_a_run_whose_images_left_cannot_be_replayed(tmp_path: Path) -> None:
    from tiderl.api.trace import replay

    simulate(OSWORLD, [*SMALL, "cluster.rollout_ranks=2"], save=str(tmp_path / "run"))
    with pytest.raises(ConfigurationError, match="images left the contexts of this run") as caught:
        replay(tmp_path / "run")
    assert len(str(caught.value).splitlines()) <= 2


# ------------------------------------------------------------------------------- the engine and its cache

MODEL = ModelSettings(path="scratch", vocab_size=64, max_context_tokens=4096, pad_id=0, stop_ids=(1,))
KEY = TaskKey("train", 0, 0)


class Talk:
    """Ten tokens a turn; what tasks begin with in common is `shared`."""

    def __init__(self, shared: Shared = ()) -> None:
        self.shared = shared

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        return SAID

    def shared_prompt(self, key: TaskKey) -> Shared:
        return self.shared


def cached(
    *turns: tuple[int, tuple[int, ...]], shared: Shared = (), twice: int | None = None, offloads: bool = False
) -> list[int]:
    """Context tokens found by each turn (context, rewrites) of one task, on a replica of its own with blocks of 1.
    `twice`: this turn is aborted as soon as it is asked, and asked again. `offloads`: what waits is in host memory."""

    async def main() -> list[int]:
        settings = EngineSettings(MODEL, 4096, kv_block_tokens=1, host_kv_budget_tokens=4096 if offloads else 0)
        engine = SimEngine(0, [SimRank(0)], cost_model("this-cpu", MODEL), settings, Talk(shared), {})
        await engine.load_weights(WeightHandle(0, "", 0))
        found = []
        for number, (context, rewrites) in enumerate(turns):
            turn = Turn(KEY, number, np.zeros(context, np.int32), Sampling(1.0, 64, ()), 4096, rewrites=rewrites)
            if number == twice:
                await engine.pause("keep")
                asked = asyncio.create_task(engine.generate(turn))
                await asyncio.sleep(0.1)
                await engine.abort(KEY, number)
                assert len((await asked).ids) == 0
                await engine.resume()
            found.append((await engine.generate(turn)).cached_tokens)
            if offloads:
                engine.offload(KEY)
                assert engine.stats.offloaded_tokens == context + SAID - 1
        return found

    return run_virtual(main)


def test_a_turn_finds_its_context_only_up_to_where_it_was_rewritten() -> None:
    assert cached((100, ()), (170, ())) == [0, 109]
    assert cached((100, ()), (170, (40,))) == [0, 40]
    assert cached((100, ()), (170, (40,)), (240, (40,))) == [0, 40, 179], "the KV of a later turn went through it"
    assert cached((100, ()), (170, (40,)), (190, (40, 60))) == [0, 40, 60]


def test_kv_that_missed_several_forks_counts_up_to_the_first() -> None:
    assert cached((100, ()), (170, (60, 50))) == [0, 50]


def test_a_turn_that_was_cut_before_it_began_and_is_asked_again_finds_no_more() -> None:
    assert cached((100, ()), (170, (40,)), twice=1) == [0, 40]


def test_what_was_rewritten_of_a_shared_prompt_is_nobody_s_any_more() -> None:
    shared = (("group", 80),)
    assert cached((100, ()), (170, ()), shared=shared) == [0, 109]
    assert cached((100, ()), (170, (90,)), shared=shared) == [0, 90]
    assert cached((100, ()), (170, (40,)), shared=shared)[1] <= 40


@pytest.mark.parametrize("by_task", [False, True])
def test_cutting_a_waiting_task_gives_its_blocks_back(by_task: bool) -> None:
    pool = BlockPool(64, 4, by_task=by_task)
    pool.take(KEY, (), 40)
    pool.give_back(KEY, (), 40, pool.blocks_of(40), keep=True, priority=0.0)
    assert pool.cached == 10
    pool.cut(KEY, 27)
    assert pool.cached == 6
    pool.cut(KEY, 33)
    assert pool.cached == 6, "what is gone does not come back"
    pool.cut(KEY, 3)
    assert pool.cached == 0
    pool.cut(KEY, 0)
    pool.take(KEY, (), 256)
    assert pool.used == 64


def test_offloaded_kv_comes_back_only_up_to_where_the_context_was_rewritten() -> None:
    host = HostKv(200, 1e-3)
    assert host.put(KEY, 109)
    host.cut(KEY, 40)
    assert (host.tokens_of(KEY), host.tokens) == (40, 40)
    host.cut(KEY, 60)
    assert (host.tokens_of(KEY), host.tokens) == (40, 40), "what is gone does not come back"
    host.cut(TaskKey("train", 1, 0), 10)
    assert host.tokens == 40
    assert cached((100, ()), (170, (40,)), offloads=True) == [0, 40]
    assert cached((100, ()), (170, ()), offloads=True) == [0, 109]
