"""The configuration: what is refused and how it is said, what `auto` becomes, and that nothing is ignored silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiderl.config.check import IMAGE_KEYS, NOT_IN_SIM, check_first_observation
from tiderl.config.document import parse
from tiderl.config.load import Loaded, dump, load_config
from tiderl.config.render import flow, render_dry_run
from tiderl.config.resolve import Resolved, resolve
from tiderl.config.schema import known_keys
from tiderl.data.errors import ConfigurationError
from tiderl.data.window import ImageWindow

FILE = """\
seed: 3
model: {layers: 2, hidden: 64, heads: 4, kv_heads: 2}
train:
  updates: 20
  lr: 1e-3
env: {name: builtin}
"""


def write(folder: Path, text: str = FILE) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, *overrides: str, text: str = FILE) -> Loaded:
    return load_config(write(folder, text), overrides)


def resolved(folder: Path, *overrides: str, command: Any = "train", **options: Any) -> Resolved:
    return resolve(load(folder, *overrides), command=command, **options)


def refusal(folder: Path, *overrides: str, text: str = FILE, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve(load(folder, *overrides, text=text), command="train", **options)
    message = str(caught.value)
    assert len(message.splitlines()) <= 2
    return message


# ------------------------------------------------------------------------------------ the file


def test_values_of_the_file_and_defaults_come_with_their_origin(tmp_path: Path) -> None:
    loaded = load(tmp_path, "train.updates=5")
    assert (loaded.config.seed, loaded.config.train.updates, loaded.config.train.lr) == (3, 5, 1e-3)
    assert loaded.config.algorithm.group_size == 8
    assert loaded.origins["seed"] == "file"
    assert loaded.origins["train.updates"] == "-o"
    assert loaded.origins["algorithm.group_size"] == "default"
    assert loaded.where("train.lr") == f"{tmp_path / 'run.yaml'}:5"
    assert loaded.where("train.updates") == "-o train.updates=5"


@pytest.mark.parametrize("written", ["1e-3", "1.0e-3", "0.001", "1E-3", ".001", "+1e-03"])
def test_every_way_to_write_a_float_is_a_float(tmp_path: Path, written: str) -> None:
    assert load(tmp_path, f"train.lr={written}").config.train.lr == 0.001


def test_words_that_yaml_1_1_would_change_stay_text(tmp_path: Path) -> None:
    options = load(tmp_path, "env.options={a: no, b: on, c: 12:30, d: 2024-01-01, e: 0o17}").config.env.options
    assert options == {"a": "no", "b": "on", "c": "12:30", "d": "2024-01-01", "e": "0o17"}


def test_an_empty_file_and_an_empty_section_mean_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, text="").config == load(tmp_path, text="train:\n  # nothing\n").config


def test_an_override_inside_a_value_that_was_no_mapping_makes_the_mapping(tmp_path: Path) -> None:
    wait = load(tmp_path, "env.wait=none", "env.wait.median_s=1", "env.wait.sigma=2").config.env.wait
    assert wait is not None and (wait.median_s, wait.sigma) == (1.0, 2.0)


PROFILE = (
    "{turns_median: 2, turns_sigma: %s, first_observation_tokens: 9, observation_tokens: 2, observation_sigma: 0, "
    "action_tokens: %s, action_sigma: 0, step_s: 1}"
)
CTB_OPTIONS = [
    "rollout.growth_z=2",
    "rollout.patience_s=5",
    "rollout.priority=weighted",
    "rollout.priority_weights={group: 9, context: 0}",
]
WITHOUT_CTB = [
    *("rollout.growth_z", "rollout.patience_s", "rollout.priority"),
    *("rollout.priority_weights.group", "rollout.priority_weights.context"),
]
FAULTS_BY_TASK = ["crash_at_pause", "env_pause_fails", "offload_lost"]
PAUSE_FAULTS = "{crash_at_pause: 0.1, engine_crash: 0.1, env_pause_fails: 0.1, offload_lost: 0.1}"
SCREENS = PROFILE.replace("step_s: 1", "step_s: 1, observation_images: true") % (0, 9)
FILE_MISTAKES = [
    ("a: [1", ":1", "not valid YAML"),
    ("seed: 1\n\ttrain: 2", ":2", "not valid YAML"),
    ("seed: 1\nseed: 2", ":2", "the key seed is given twice", "line 1"),
    ("train: {lr: 1.0}\ntrain: {lr: 2.0}", ":2", "given twice"),
    ("env:\n  options: {a: 1, a: 2}", ":2", "env.options.a is given twice"),
    ("- 1", ":1", "must be a mapping"),
    ("seed: !!python/name:os.system x", ":1", "not supported"),
    ("? [a]\n: 1", ":1", "a key must be one word"),
    ("env:\n  options: &a {b: *a}", ":2", "contains itself"),
    ("train:\n  updates: 3\n  lrr: 1", ":3", "unknown key train.lrr", "did you mean train.lr?"),
    ("updates: 3", ":1", "unknown key updates", "did you mean warmup.updates or train.updates?"),
    ("trian: {updates: 3}", ":1", "unknown key trian", "did you mean train?"),
    ("train: {xyzzy: 3}", ":1", "unknown key train.xyzzy", "known keys of train: updates"),
    ("train:\n  updates: 3\n  lr: fast", ":3", "train.lr must be a number, given the text 'fast'"),
    ("train: {updates: 2.5}", ":1", "train.updates must be a whole number, given 2.5"),
    ("train: {updates: true}", ":1", "whole number, given true"),
    ("train: {updates: '3'}", ":1", "whole number, given the text '3'"),
    ("train: {updates: 0}", ":1", "train.updates must be at least 1, given 0"),
    ("train: {lr: .inf}", ":1", "train.lr must be a finite number"),
    ("train: {lr: -1}", ":1", "train.lr must be more than 0, given -1"),
    ("train: 3", ":1", "train must be a mapping of keys, given 3"),
    ("rollout: {temperature: 0}", ":1", "rollout.temperature must be more than 0", "greedy"),
    ("rollout: {top_p: 0.9}", ":1", "rollout.top_p", "log-probs"),
    ("rollout: {top_k: 50}", ":1", "rollout.top_k", "log-probs"),
    ("algorithm: {loss: gropo}", ":1", "algorithm.loss must be", "did you mean 'grpo'?"),
    ("algorithm: {advantage: mean}", ":1", "algorithm.advantage must be 'group' or 'leave_one_out'"),
    ("env: {slots: many}", ":1", "env.slots must be a whole number of at least 1, or auto"),
    ("env: {wait: long}", ":1", "env.wait must be none, or a mapping"),
    ("rollout: {image_window: 0}", ":1", "rollout.image_window must be a whole number of at least 1, or none, given 0"),
    ("rollout: {image_window: all}", ":1", "rollout.image_window must be", "or none, given the text 'all'"),
    ("rollout: {image_window: true}", ":1", "rollout.image_window must be", "or none, given true"),
    ("rollout: {image_window_drop: 0}", ":1", "rollout.image_window_drop must be at least 1, given 0"),
    ("rollout: {kv_policy: ctp}", ":1", "rollout.kv_policy must be", "did you mean 'ctb'?"),
    ("rollout: {growth_z: -1}", ":1", "rollout.growth_z must be at least 0, given -1"),
    ("rollout: {growth_z: 1e+308}", ":1", "rollout.growth_z must be at most 100, given 1e+308"),
    ("rollout: {patience_s: 0}", ":1", "rollout.patience_s must be more than 0, given 0"),
    ("rollout: {priority: tier}", ":1", "rollout.priority must be", "did you mean 'tiers'?"),
    ("rollout:\n  priority_weights: {group: -1}", ":2", "rollout.priority_weights.group must be at least 0, given -1"),
    ("rollout: {priority_weights: {group: .nan}}", ":1", "rollout.priority_weights.group must be a finite number"),
    ("rollout: {priority_weights: {group: nan}}", ":1", "rollout.priority_weights.group must be a number"),
    ("rollout: {priority_weights: {grop: 1}}", ":1", "rollout.priority_weights holds 'grop'", "mean 'group'?"),
    ("rollout: {priority_weights: {xyzzy: 1}}", ":1", "which has no weight", "known: evaluation, group, active, con"),
    ("rollout: {priority_weights: 3}", ":1", "rollout.priority_weights must be a mapping"),
    ("env: {wait: {median_s: 1}}", ":1", "env.wait.sigma is required"),
    ("env: {wait: {median_s: 1, sgima: 1}}", ":1", "unknown key env.wait.sgima", "did you mean env.wait.sigma?"),
    ("env: []", ":1", "env", "at least 1 item"),
    ("env: [{name: builtin, weight: 0}]", ":1", "env.0.weight", "must be more than 0, given 0"),
    ("env:\n - {name: builtin}\n - {name: babyai, weight: -2}", ":3", "env.1.weight", "must be more than 0, given -2"),
    ("env: [{name: builtin, wieght: 2}]", ":1", "unknown key env.0.wieght", "did you mean env.weight?"),
    ("env: [builtin]", ":1", "env.0", "must be a mapping of keys"),
    ("train: {lora: {rank: 8}}", ":1", "train.lora", "not yet supported"),
    ("gateway: {}", ":1", "gateway", "not yet supported"),
    ("rollout: {engine: vlm}", ":1", "rollout.engine", "did you mean 'vllm'?"),
    ("rollout: {engine: vllm-cpu}", ":1", "rollout.engine", "torch"),
    ("rollout: {task_scheduler: own}", ":1", "rollout.task_scheduler", "none"),
    ("rollout: {ranks_per_engine: 2}", ":1", "rollout.ranks_per_engine", "not yet supported"),
    ("cluster: {kind: ray}", ":1", "cluster.kind", "'ray' is not yet supported; use inline or process"),
    ("schedule: {staleness_counts: oldest}", ":1", "schedule.staleness_counts", "oldest_token"),
    ("train: {sharding: fsdp}", ":1", "'fsdp' is not yet supported"),
    ("model: {tokenizer: chat}", ":1", "a model from scratch has no chat template"),
    ("log: {trackers: [tensorbord]}", ":1", "log.trackers", "did you mean 'tensorboard'?"),
    ("sim: {faults: {engine_crsh: 0.1}}", ":1", "sim.faults", "no fault\n  did you mean 'engine_crash'?"),
    ("sim: {faults: {nope: 1}}", ":1", "sim.faults holds 'nope', which is no fault\n  known: engine_crash, slow_rep"),
    ("sim: {faults: {engine_crash: 2}}", ":1", "sim.faults", "a probability from 0 to 1 for engine_crash, given 2"),
    ("sim: {faults: all}", ":1", "sim.faults", "must be none, swarm, or a mapping"),
    ("schedule: {strategy: laminar}", ":1", "'laminar' is not yet supported", "sync, areal"),
    ("schedule: {strategy: aeral}", ":1", "unknown strategy 'aeral', did you mean 'areal'?"),
]


@pytest.mark.parametrize(("text", "where", "expected"), [(m[0], m[1], m[2:]) for m in FILE_MISTAKES])
def test_a_mistake_in_the_file_names_line_key_and_remedy(
    tmp_path: Path, text: str, where: str, expected: tuple[str, ...]
) -> None:
    message = refusal(tmp_path, text=text)
    assert message.startswith(f"{tmp_path / 'run.yaml'}{where}: "), message
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lrr=1", "unknown key train.lrr"),
        ("train.lr=fast", "train.lr must be a number"),
        ("train.updates", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("train..lr=1", "KEY=VALUE"),
        ("env.name=[", "not valid YAML"),
        ("env.wait={median_s: 1, sigma: 400}", "env.wait.sigma must be at most 10, given 400"),
        (f"sim.workload={PROFILE % (400, 9)}", "sim.workload.turns_sigma must be at most 10, given 400"),
        (f"sim.workload={PROFILE % (0, '1e+300')}", "sim.workload.action_tokens must be at most 1e+09"),
        ("env.wait.median_s=1", "env.wait.sigma is required"),
        ("seed.x=1", "seed must be a whole number, given a mapping"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(tmp_path: Path, override: str, expected: str) -> None:
    message = refusal(tmp_path, override)
    assert message.startswith(f"-o {override}: ") and expected in message


def test_a_missing_file_names_the_similar_one(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no such configuration file\n.*run\.yaml\?"):
        load_config(tmp_path / "rum.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        load_config(tmp_path / "binary.yaml")


# ------------------------------------------------------------------------------ combinations


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["train.steps_per_batch=3"], "train.global_batch_groups", "8 groups do not divide"),
        (["rollout.max_new_tokens_per_turn=600"], "rollout.max_new_tokens_per_turn", "no room"),
        (["rollout.kv_budget_tokens=100"], "rollout.kv_budget_tokens", "cannot hold one task"),
        (["sim.kv_block_tokens=100000"], "sim.kv_block_tokens", "no context of rollout.max_context_tokens"),
        (["train.micro_batch_tokens=100"], "train.micro_batch_tokens", "cannot hold one sequence"),
        (["schedule.publish_every_updates=3"], "schedule.publish_every_updates", "max_staleness + 1 = 2"),
        (
            ["schedule.strategy=sync", "schedule.max_staleness=4", "schedule.publish_every_updates=2"],
            "schedule.publish_every_updates",
            "max_staleness + 1 = 1",
        ),
        (
            ["schedule.strategy=sync", "schedule.staleness_counts=window", "schedule.publish_every_updates=2"],
            "schedule.publish_every_updates",
            "max_staleness + 1 = 1",
        ),
        (["algorithm.group_size=1"], "algorithm.group_size", "at least 2"),
        (["model.hidden=66"], "model.hidden", "66 over 4 heads"),
        (["model.hidden=12"], "model.hidden", "even head size"),
        (["model.kv_heads=3"], "model.heads", "divide by model.kv_heads"),
        (["cluster.rollout_ranks=2"], "cluster.rollout_ranks", "leaves no rank to train"),
        (["cluster.ranks=4", "cluster.rollout_ranks=2"], "cluster.rollout_ranks", "not yet supported"),
        (["cluster.reference_ranks=1"], "cluster.reference_ranks", "not yet supported"),
        (["env.wait={median_s: 1, sigma: 1, tail_fraction: 0.1}"], "env.wait.tail_s", "[shortest, longest]"),
        (
            ["rollout.image_window=5", "rollout.image_window_drop=6"],
            "rollout.image_window_drop",
            "6 images cannot leave a rollout.image_window of 5 at once",
        ),
    ],
)
def test_an_impossible_combination_names_its_key(tmp_path: Path, overrides: list[str], key: str, expected: str) -> None:
    message = refusal(tmp_path, *overrides)
    assert f"{key}: " in message and expected in message


def test_the_context_must_hold_the_first_observation_and_one_turn(tmp_path: Path) -> None:
    loaded = load(tmp_path, "rollout.max_context_tokens=64", "rollout.max_new_tokens_per_turn=4")
    check_first_observation(loaded, 60)
    with pytest.raises(ConfigurationError, match=r"rollout\.max_context_tokens=64: .*61 tokens[\s\S]*at least 65"):
        check_first_observation(loaded, 61)


# ----------------------------------------------------------------------------- auto and strategy


def test_slots_are_what_staleness_lets_be_in_flight(tmp_path: Path) -> None:
    assert resolved(tmp_path, "schedule.max_staleness=2").slots == 3 * 8 * 8
    assert resolved(tmp_path, "schedule.strategy=sync", "schedule.max_staleness=2").slots == 1 * 8 * 8


def test_a_strategy_decides_what_is_auto_and_says_so(tmp_path: Path) -> None:
    run = resolved(tmp_path, "schedule.strategy=sync", "schedule.max_staleness=2")
    assert (run.config.algorithm.loss, run.config.rollout.kv_policy) == ("grpo", "lru")
    assert run.settings.max_staleness == 0
    assert run.origins["algorithm.loss"] == run.origins["schedule.max_staleness"] == "strategy"
    assert [item.key for item in run.no_effect] == ["schedule.max_staleness"]


def test_a_set_value_wins_over_the_strategy(tmp_path: Path) -> None:
    run = resolved(tmp_path, "schedule.strategy=sync", "algorithm.loss=decoupled_ppo")
    assert run.config.algorithm.loss == "decoupled_ppo" and run.origins["algorithm.loss"] == "-o"


@pytest.mark.parametrize(
    ("overrides", "command", "engine_ranks", "actor_ranks"),
    [
        (["cluster.ranks=1"], "train", [0], (0,)),
        (["cluster.ranks=4"], "train", [0, 1, 2], (3,)),
        (["cluster.ranks=4", "schedule.strategy=sync"], "train", [0, 1, 2, 3], (3,)),
        (["cluster.ranks=4", "cluster.rollout_ranks=3"], "train", [0, 1, 2], (3,)),
        (["cluster.ranks=4"], "sim", [0, 1], (2, 3)),
        (["cluster.ranks=1"], "sim", [0], (0,)),
    ],
)
def test_ranks_are_laid_out_by_strategy_and_command(
    tmp_path: Path, overrides: list[str], command: str, engine_ranks: list[int], actor_ranks: tuple[int, ...]
) -> None:
    layout = resolved(tmp_path, *overrides, command=command).layout
    assert layout.engine_ranks == {rank: (rank,) for rank in engine_ranks}
    assert layout.actor_ranks == actor_ranks


def test_the_kv_budget_is_the_smaller_of_need_and_room(tmp_path: Path) -> None:
    need = 2 * 8 * 8 * 512  # slots x context, one replica
    assert resolved(tmp_path).kv_budget_tokens == need
    assert resolved(tmp_path, "cluster.ranks=5").kv_budget_tokens == need // 4
    assert resolved(tmp_path, memory_bytes=64 * 2**30).kv_budget_tokens == need
    # hidden 64, 2 layers, 4 heads and 2 kv heads of 16, feed-forward 192, 512 words:
    parameters = 2 * (64 * 16 * 2 * (4 + 2) + 3 * 64 * 192) + 512 * 64
    kv_bytes = 2 * 2 * 2 * 16 * 4
    # two ranks share 20 MB, 80 % usable; the rollout rank holds the weights in float32
    room = int((0.8 * 10_000_000 - 4 * parameters) // kv_bytes)
    assert resolved(tmp_path, memory_bytes=20_000_000).kv_budget_tokens == room < need
    assert "memory holds" in refusal(tmp_path, memory_bytes=1_000_000)


def test_precision_and_its_alarm_follow_the_device(tmp_path: Path) -> None:
    on_cpu, on_gpu = resolved(tmp_path), resolved(tmp_path, device="cuda")
    assert (on_cpu.config.train.dtype, on_cpu.settings.logprob_gap_alarm) == ("float32", 1e-4)
    assert (on_gpu.config.train.dtype, on_gpu.settings.logprob_gap_alarm) == ("bfloat16", 2e-2)


# -------------------------------------------------------------------- options without effect (I12)


@pytest.mark.parametrize(
    ("overrides", "command", "keys"),
    [
        ([], "train", []),
        (["schedule.strategy=sync", "schedule.max_staleness=0"], "train", []),
        (["schedule.strategy=sync", "cluster.ranks=4", "cluster.rollout_ranks=2"], "train", ["cluster.rollout_ranks"]),
        (["algorithm.kl_coef=0", "cluster.reference_ranks=1"], "train", ["cluster.reference_ranks"]),
        (["warmup.demos=0", "warmup.updates=10"], "train", ["warmup.updates"]),
        (["warmup.updates=0", "warmup.demos=10"], "train", ["warmup.demos"]),
        (["env.isolation=async", "env.workers=2"], "train", ["env.workers"]),
        (["cluster.kind=inline", "env.workers=2"], "train", ["env.workers"]),
        (["env.wait={median_s: 1, sigma: 1, tail_s: [1, 2]}"], "train", ["env.wait.tail_s"]),
        (["eval.every_updates=0", "eval.temperature=0.5"], "train", ["eval.temperature"]),
        (["sim.workload_seed=4"], "train", ["sim.workload_seed"]),
        (["sim.workload_seed=4"], "sim", []),
        (["train.lr=1e-4"], "sim", ["train.lr"]),
        ([f"sim.faults={PAUSE_FAULTS}"], "sim", [f"sim.faults.{name}" for name in FAULTS_BY_TASK]),
        ([f"sim.faults={PAUSE_FAULTS}", "rollout.kv_policy=ctb", "sim.hardware=H100"], "sim", []),
        ([f"sim.faults={PAUSE_FAULTS}", "rollout.kv_policy=ctb"], "sim", ["sim.faults.offload_lost"]),
        (
            ["sim.faults={offload_lost: 0.1}", "rollout.kv_policy=ctb", "sim.cost={kv_reload_token_s: 1e-6}"],
            "sim",
            [],
        ),
        (["sim.faults={crash_at_pause: 0.1}"], "train", ["sim.faults.crash_at_pause"]),
        (["log.profile=true"], "train", []),
        (["log.profile=true"], "sim", ["log.profile"]),
        (["log.profile=true"], "eval", ["log.profile"]),
        (CTB_OPTIONS, "train", WITHOUT_CTB),
        ([*CTB_OPTIONS, "rollout.kv_policy=lru"], "sim", WITHOUT_CTB),
        (CTB_OPTIONS, "eval", WITHOUT_CTB),
        ([*CTB_OPTIONS, "rollout.kv_policy=ctb"], "train", []),
        ([*CTB_OPTIONS, "rollout.kv_policy=ctb"], "sim", []),
        ([*CTB_OPTIONS, "rollout.kv_policy=ctb"], "eval", []),
        (["rollout.kv_policy=ctb", "rollout.priority_weights.group=9"], "sim", ["rollout.priority_weights.group"]),
        (["rollout.growth_z=1", "rollout.patience_s=30.0", "rollout.priority=tiers"], "train", []),
        (["rollout.image_window=5"], "train", ["rollout.image_window"]),
        (["rollout.image_window=5"], "eval", ["rollout.image_window"]),
        (["rollout.image_window=5", "rollout.image_window_drop=2"], "sim", list(IMAGE_KEYS)),
        (["rollout.image_window=5", "rollout.image_window_drop=2", f"sim.workload={SCREENS}"], "sim", []),
        (
            ["rollout.image_window_drop=2", f"sim.workload={SCREENS}"],
            "sim",
            ["rollout.image_window_drop", "sim.workload.observation_images"],
        ),
        (["rollout.image_window=5", f"sim.workload={PROFILE % (0, 9)}"], "sim", ["rollout.image_window"]),
    ],
)
def test_an_option_that_changes_nothing_is_said(
    tmp_path: Path, overrides: list[str], command: str, keys: list[str]
) -> None:
    assert [item.key for item in resolved(tmp_path, *overrides, command=command).no_effect] == keys


def test_the_keys_that_virtual_time_ignores_are_keys() -> None:
    assert set(known_keys()) >= NOT_IN_SIM | {*IMAGE_KEYS}


def test_without_a_window_all_images_stay_and_a_dry_run_says_none(tmp_path: Path) -> None:
    assert resolved(tmp_path).settings.image_window is None
    assert "  image_window: none " in render_dry_run(resolved(tmp_path))
    assert load(tmp_path, "rollout.image_window=none").config == load(tmp_path).config
    assert resolved(tmp_path, "rollout.image_window=5").settings.image_window == ImageWindow(5, 1)
    assert resolved(
        tmp_path, "rollout.image_window=5", "rollout.image_window_drop=5"
    ).settings.image_window == ImageWindow(5, 5)


def test_the_shared_file_may_hold_what_a_simulation_ignores(tmp_path: Path) -> None:
    assert resolved(tmp_path, command="sim").no_effect == ()


# -------------------------------------------------------------------------------- dry run


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**40),
        "run": st.text(min_size=1, max_size=8),
        "train.lr": st.floats(1e-8, 1.0),
        "train.updates": st.integers(1, 10_000),
        "env.name": st.text(min_size=1, max_size=8),
        "env.options": st.dictionaries(
            st.text(max_size=6),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                max_leaves=5,
            ),
            max_size=3,
        ),
        "env.slots": st.integers(1, 999),
        "env.wait": st.just("none")
        | st.fixed_dictionaries(
            {"median_s": st.floats(1e-3, 9.0), "sigma": st.floats(0, 2), "tail_s": st.just([1, 2])}
        ),
        "schedule.strategy": st.sampled_from(["sync", "areal"]),
        "schedule.max_staleness": st.integers(0, 5),
        "algorithm.kl_coef": st.sampled_from([0.0, 0.01]),
        "cluster.ranks": st.integers(1, 9),
        "eval.every_updates": st.integers(0, 30),
    },
)


@given(changes=CHANGES, command=st.sampled_from(["train", "sim"]))
def test_the_dry_run_is_a_file_that_gives_the_same_run(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], command: Any
) -> None:
    folder = tmp_path_factory.mktemp("dry")
    first = resolve(
        load_config(write(folder), [f"{key}={flow(value)}" for key, value in changes.items()]), command=command
    )
    again = resolve(load_config(write(folder, render_dry_run(first))), command=command)
    assert again.config == first.config
    assert again.settings == first.settings and again.layout == first.layout
    assert set(again.no_effect) <= set(first.no_effect)


def test_the_dry_run_gives_every_key_with_its_origin(tmp_path: Path) -> None:
    text = render_dry_run(resolved(tmp_path, "train.updates=7", "schedule.strategy=sync"))
    origins = {line.split("#")[0].strip(): line.split("#")[1].strip() for line in text.splitlines() if "  # " in line}
    assert origins["updates: 7"] == "-o"
    assert origins["hidden: 64"] == "file"
    assert origins["loss: grpo"] == "strategy"
    assert origins["slots: 64"] == "default (auto)"
    assert origins["group_size: 8"] == "default"


def test_all_priority_weights_that_count_are_told_with_their_origin(tmp_path: Path) -> None:
    run = resolved(tmp_path, *CTB_OPTIONS, "rollout.kv_policy=ctb")
    assert run.settings.priority_weights == {"evaluation": 8.0, "group": 9.0, "active": 2.0, "context": 0.0}
    text = render_dry_run(run)
    shown = {line.split("#")[0].strip(): line.split("#")[1].strip() for line in text.splitlines() if "  # " in line}
    assert [shown[line] for line in ("kv_policy: ctb", "growth_z: 2.0", "priority: weighted")] == ["-o", "-o", "-o"]
    weights = ("evaluation: 8.0", "group: 9.0", "active: 2.0", "context: 0.0")
    assert [shown[line] for line in weights] == ["default", "-o", "default", "-o"]
    assert resolve(load(tmp_path, text=text), command="train").settings == run.settings
    for other in (["rollout.priority=tiers"], ["rollout.kv_policy=lru"]):
        assert list(resolved(tmp_path, *CTB_OPTIONS, *other).settings.priority_weights) == ["group", "context"]


@given(st.text(max_size=12))
@example(".0")
@example(".5e3")
@example("./data")
@example(".inf")
def test_any_text_is_written_so_that_it_reads_back_as_that_text(text: str) -> None:
    assert parse(flow(text), where="text").values == text
    assert parse(flow({text: [text, None]}), where="text").values == {text: [text, None]}


def test_dump_is_plain_data_that_validates_again(tmp_path: Path) -> None:
    loaded = load(tmp_path, "env.wait={median_s: 1, sigma: 1, tail_fraction: 0.5, tail_s: [1, 2]}")
    text = json.dumps(dump(loaded.config))
    assert load(tmp_path, text=text).config == loaded.config


@pytest.mark.parametrize("name", ["builtin", "babyai"])
@pytest.mark.parametrize("command", ["train", "sim"])
def test_the_examples_resolve_without_a_word_of_complaint(name: str, command: Any) -> None:
    path = Path(__file__).parents[2] / "examples" / f"{name}.yaml"
    run = resolve(load_config(path), command=command, memory_bytes=8 * 2**30)
    assert run.no_effect == ()
    assert (run.config.env.name, run.settings.evaluation.prompts >= 100) == (name, True)


def test_what_a_strategy_does_with_the_ranks_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("schedule: {strategy: sync}\ncluster: {ranks: 3}\n")
    said = resolve(load_config(file), command="train").remarks
    assert said == (
        "sync runs at a staleness of 0",
        "all 3 ranks generate, then rank 2 alone trains: data-parallel training is not built yet",
    )
    assert resolve(load_config(file, ["schedule.strategy=areal", "cluster.ranks=2"]), command="train").remarks == ()
