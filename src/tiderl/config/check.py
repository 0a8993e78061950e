"""What keys mean together: combinations that cannot be are refused, options without effect are said (I12).

Runs before a process, a file or an environment is touched. Knows strategies by their fields, never by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiderl.config.load import Loaded, dump, leaves
from tiderl.config.schema import Config, EnvConfig, SimWorkloadConfig
from tiderl.cost.catalog import THIS_CPU
from tiderl.engines.vllm_turns import LEAST_TEMPERATURE
from tiderl.schedule.strategy import Strategy
from tiderl.sim.faults.plan import BY_TASK as FAULTS_BY_TASK

SIM_ONLY = "sim."
NOT_IN_SIM = frozenset(
    {
        *("model.tokenizer", "warmup.demos", "warmup.updates", "warmup.lr", "env.isolation", "env.workers"),
        *("rollout.temperature", "algorithm.advantage", "train.lr", "cluster.kind", "eval.temperature", "log.trackers"),
        *("log.profile", "rollout.engine", "rollout.task_scheduler"),
    }
)
"""What virtual time does not model: a shared file may hold them, but one given by `-o` to `sim` is a mistake."""
ONLY_IN_TRAINING = ("warmup.", "algorithm.", "train.", "schedule.", "checkpoint.", "eval.every_updates", "log.", "run")
"""Keys, and sections with a final point, that an evaluation does not read."""
EVALUATED_IN = "train.dtype"
CTB_KEYS = ("rollout.growth_z", "rollout.patience_s", "rollout.priority")
RELOAD_COST = "kv_reload_token_s"
"""Of `sim.cost`: where it is more than nothing, the host's memory is another one than the engine's."""
IMAGE_KEYS = ("rollout.image_window", "rollout.image_window_drop")


@dataclass(frozen=True)
class NoEffect:
    """An option that was set, other than its default, and changes nothing in this run."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} has no effect: {self.reason}"


def check_combinations(loaded: Loaded, strategy: Strategy) -> None:
    """Raises `ConfigurationError`, one for the first combination that cannot be."""
    _check_model(loaded)
    _check_lengths(loaded)
    _check_temperatures(loaded)
    _check_window(loaded)
    _check_batch(loaded)
    _check_schedule(loaded, strategy)
    _check_ranks(loaded, strategy)
    for place, env in enumerate(loaded.config.environments.values()):
        wait = env.wait
        if wait is not None and (wait.tail_s[1] < wait.tail_s[0] or (wait.tail_fraction > 0 and wait.tail_s[1] <= 0)):
            key = f"env.{place}.wait.tail_s" if loaded.config.is_mixture else "env.wait.tail_s"
            raise loaded.refuse(key, f"must be [shortest, longest] seconds, given {list(wait.tail_s)}")


def check_first_observation(loaded: Loaded, tokens: int) -> None:
    """Refuse a context that cannot hold a first observation of `tokens` and one turn of the policy."""
    rollout = loaded.config.rollout
    if tokens + rollout.max_new_tokens_per_turn > rollout.max_context_tokens:
        raise loaded.refuse(
            "rollout.max_context_tokens",
            f"{rollout.max_context_tokens} cannot hold a first observation of {tokens} tokens and one turn of "
            f"{rollout.max_new_tokens_per_turn}",
            f"give at least {tokens + rollout.max_new_tokens_per_turn}",
        )


def without_effect(loaded: Loaded, strategy: Strategy, *, command: str) -> tuple[NoEffect, ...]:
    """The options, set and other than their default, that this run ignores, in the schema's order.

    `command`: `train`, `sim` or `eval`. A file serves all, so what only another one reads is told of `-o` alone.
    """
    ignored = [*_ignored(loaded, strategy), *_ignored_of_images(loaded.config, command)]
    if command == "sim":
        ignored += _ignored_of_faults(loaded.config, strategy)
    found = [NoEffect(key, reason) for key, reason in ignored]
    for key in (key for key, origin in loaded.origins.items() if origin == "-o"):
        if command != "sim" and key.startswith(SIM_ONLY):
            found.append(NoEffect(key, "it is read by `tiderl sim` only"))
        if command == "sim" and key in NOT_IN_SIM:
            found.append(NoEffect(key, "virtual time does not model it"))
        if command == "eval" and _within(key, ONLY_IN_TRAINING) and key != EVALUATED_IN:
            found.append(NoEffect(key, "an evaluation does not train"))
    default, given = dict(leaves(dump(Config()))), dict(leaves(dump(loaded.config)))
    changed = [item for item in found if item.key in loaded.set_keys and given[item.key] != default.get(item.key)]
    order = list(loaded.origins)
    return tuple(sorted(changed, key=lambda item: order.index(item.key)))


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or (section.endswith(".") and key.startswith(section)) for section in sections)


def _ignored(loaded: Loaded, strategy: Strategy) -> Iterator[tuple[str, str]]:
    config = loaded.config
    fixed = strategy.max_staleness
    if fixed is not None and config.schedule.max_staleness != fixed:
        yield "schedule.max_staleness", f"the strategy {strategy.name} always runs at {fixed}"
    if fixed == 0:
        yield "schedule.staleness_counts", f"the strategy {strategy.name} trains nothing stale, however it is counted"
    if strategy.all_ranks_generate and config.cluster.rollout_ranks not in ("auto", config.cluster.ranks):
        yield "cluster.rollout_ranks", f"under the strategy {strategy.name} all ranks generate"
    if config.algorithm.kl_coef == 0 and config.cluster.reference_ranks not in ("auto", 0):
        yield "cluster.reference_ranks", "algorithm.kl_coef is 0, so there is no reference"
    if config.model.path != "scratch":
        yield from (
            (f"model.{size}", "the sizes are those of model.path") for size in ("layers", "hidden", "heads", "kv_heads")
        )
    if config.warmup.demos == 0 or config.warmup.updates == 0:
        zero = "demos" if config.warmup.demos == 0 else "updates"
        yield from ((f"warmup.{key}", f"warmup.{zero} is 0") for key in ("demos", "updates", "lr") if key != zero)
    if isinstance(config.env, EnvConfig):
        yield from _ignored_of_environment(config.env, config.cluster.kind)
    yield from _ignored_of_kv(config, strategy)
    if config.eval.every_updates == 0:
        yield from ((f"eval.{key}", "eval.every_updates is 0") for key in ("prompts", "temperature"))


def _ignored_of_kv(config: Config, strategy: Strategy) -> Iterator[tuple[str, str]]:
    rollout = config.rollout
    weights = [f"rollout.priority_weights.{name}" for name in rollout.priority_weights]
    by_task = _by_task(config, strategy)
    if not by_task:
        yield from ((key, "rollout.kv_policy is lru") for key in (*CTB_KEYS, *weights))
    elif rollout.priority != "weighted":
        yield from ((key, f"rollout.priority is {rollout.priority}") for key in weights)
    if rollout.engine != "vllm":
        yield "rollout.task_scheduler", f"rollout.engine {rollout.engine} keeps tasks by itself"
    elif not by_task:
        yield "rollout.task_scheduler", "rollout.kv_policy is lru"


def _by_task(config: Config, strategy: Strategy) -> bool:
    policy = config.rollout.kv_policy
    return (strategy.kv_policy if policy == "auto" else policy) == "ctb"


def _ignored_of_faults(config: Config, strategy: Strategy) -> Iterator[tuple[str, str]]:
    faults = config.sim.faults
    if isinstance(faults, str):
        return
    if not _by_task(config, strategy):
        why = "rollout.kv_policy is lru, so no task pauses and no KV is offloaded"
        yield from ((f"sim.faults.{name}", why) for name in faults if name in FAULTS_BY_TASK)
    elif config.sim.hardware == THIS_CPU and not config.sim.cost.get(RELOAD_COST):
        yield "sim.faults.offload_lost", f"{THIS_CPU} has no host memory beside its own, so no KV is offloaded"


def _ignored_of_images(config: Config, command: str) -> Iterator[tuple[str, str]]:
    rollout, workload = config.rollout, config.sim.workload
    if command != "sim":
        yield from ((key, "image observations are not yet supported: all of them are text") for key in IMAGE_KEYS)
    elif not (isinstance(workload, SimWorkloadConfig) and workload.observation_images):
        yield from ((key, "the workload's observations are no images") for key in IMAGE_KEYS)
    elif rollout.image_window is None:
        yield from ((key, "rollout.image_window is none") for key in (IMAGE_KEYS[1], "sim.workload.observation_images"))


def _ignored_of_environment(env: EnvConfig, cluster: str) -> Iterator[tuple[str, str]]:
    yield "env.weight", "there is one environment, so nothing is mixed"
    if env.isolation != "pool":
        yield "env.workers", f"it counts for isolation pool, not {env.isolation}"
    elif cluster == "inline":
        yield "env.workers", "with cluster.kind inline everything is in one process"
    if env.wait is not None and env.wait.tail_fraction == 0 and env.wait.tail_s != (0.0, 0.0):
        yield "env.wait.tail_s", "env.wait.tail_fraction is 0"


def _check_model(loaded: Loaded) -> None:
    model = loaded.config.model
    if model.path != "scratch":
        return
    if model.tokenizer == "chat":
        raise loaded.refuse(
            "model.tokenizer",
            "a model from scratch has no chat template",
            "use words, or a model.path with a tokenizer of its own",
        )
    if model.hidden % model.heads or (model.hidden // model.heads) % 2:
        even = f"{model.hidden} over {model.heads} heads"
        raise loaded.refuse("model.hidden", f"must divide by model.heads into an even head size, given {even}")
    if model.heads % model.kv_heads:
        raise loaded.refuse("model.heads", f"must divide by model.kv_heads, given {model.heads} and {model.kv_heads}")


def _check_lengths(loaded: Loaded) -> None:
    rollout, train = loaded.config.rollout, loaded.config.train
    context = rollout.max_context_tokens
    if rollout.max_new_tokens_per_turn >= context:
        raise loaded.refuse(
            "rollout.max_new_tokens_per_turn",
            f"{rollout.max_new_tokens_per_turn} leaves no room for an observation in max_context_tokens {context}",
        )
    if rollout.kv_budget_tokens != "auto" and rollout.kv_budget_tokens < context:
        raise loaded.refuse(
            "rollout.kv_budget_tokens",
            f"{rollout.kv_budget_tokens} cannot hold one task of rollout.max_context_tokens {context}",
            "raise it, or lower rollout.max_context_tokens",
        )
    block = loaded.config.sim.kv_block_tokens
    if block != "auto" and block > context:
        raise loaded.refuse("sim.kv_block_tokens", f"no context of rollout.max_context_tokens {context} fills {block}")
    if train.micro_batch_tokens < context:
        raise loaded.refuse(
            "train.micro_batch_tokens",
            f"{train.micro_batch_tokens} cannot hold one sequence of rollout.max_context_tokens {context}",
        )


def _check_temperatures(loaded: Loaded) -> None:
    config = loaded.config
    for key, temperature in (
        ("rollout.temperature", config.rollout.temperature),
        ("eval.temperature", config.eval.temperature),
    ):
        if config.rollout.engine == "vllm" and 0 < temperature < LEAST_TEMPERATURE:
            what = f"vLLM samples at {LEAST_TEMPERATURE} instead of {temperature}, and the trainer would not"
            raise loaded.refuse(key, what, f"give at least {LEAST_TEMPERATURE}, or use rollout.engine torch")


def _check_window(loaded: Loaded) -> None:
    rollout = loaded.config.rollout
    if rollout.image_window is not None and rollout.image_window_drop > rollout.image_window:
        raise loaded.refuse(
            "rollout.image_window_drop",
            f"{rollout.image_window_drop} images cannot leave a rollout.image_window of {rollout.image_window} at once",
            f"give at most {rollout.image_window}",
        )


def _check_batch(loaded: Loaded) -> None:
    train, algorithm = loaded.config.train, loaded.config.algorithm
    if train.global_batch_groups % train.steps_per_batch:
        raise loaded.refuse(
            "train.global_batch_groups",
            f"{train.global_batch_groups} groups do not divide by train.steps_per_batch {train.steps_per_batch}",
            f"give a multiple of {train.steps_per_batch}",
        )
    if algorithm.group_size < 2:
        raise loaded.refuse(
            "algorithm.group_size",
            f"the advantage {algorithm.advantage!r} compares the members of a group, so it needs at least 2, "
            f"given {algorithm.group_size}",
        )


def _check_schedule(loaded: Loaded, strategy: Strategy) -> None:
    schedule = loaded.config.schedule
    bound = schedule.max_staleness if strategy.max_staleness is None else strategy.max_staleness
    strict = schedule.staleness_counts == "oldest_token" or strategy.max_staleness == 0
    if strict and schedule.publish_every_updates > bound + 1:
        raise loaded.refuse(
            "schedule.publish_every_updates",
            f"{schedule.publish_every_updates} is more than max_staleness + 1 = {bound + 1}: tokens would get too old",
            f"give at most {bound + 1}"
            + ("" if strategy.max_staleness is not None else ", or raise schedule.max_staleness"),
        )


def _check_ranks(loaded: Loaded, strategy: Strategy) -> None:
    cluster = loaded.config.cluster
    ranks, rollout = cluster.ranks, cluster.rollout_ranks
    if cluster.reference_ranks not in ("auto", 0) and loaded.config.algorithm.kl_coef > 0:
        what = "ranks for the reference alone are not yet supported: it sits beside the actor"
        raise loaded.refuse("cluster.reference_ranks", what, "leave it at auto")
    if rollout == "auto" or strategy.all_ranks_generate:
        return
    if rollout > ranks or (rollout == ranks and ranks > 1):
        raise loaded.refuse(
            "cluster.rollout_ranks",
            f"{rollout} of cluster.ranks {ranks} leaves no rank to train under the strategy {strategy.name}",
            f"give at most {ranks - 1}, or auto" if ranks > 1 else "give 1, or auto",
        )
