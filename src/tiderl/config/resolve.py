"""Every `auto` to a number, the strategy's say included, and the frozen settings that the parts are built from.

The only place where a default depends on another key (architecture §10). Asks no machine: memory comes in as a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tiderl.config.check import NoEffect, check_combinations, without_effect
from tiderl.config.load import Loaded
from tiderl.config.memory import kv_tokens_in_memory, model_shape
from tiderl.config.schema import Config, EnvConfig
from tiderl.cost.models import ModelShape
from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import (
    EngineSettings,
    EvalSettings,
    ModelSettings,
    RunSettings,
    StalenessCounts,
    TrainerSettings,
    WaitProfile,
    WarmupSettings,
)
from tiderl.data.window import ImageWindow
from tiderl.engines.vllm_setup import CPU_HEAD_SIZES
from tiderl.schedule.priority import STANDARD
from tiderl.schedule.strategy import Strategy, get

Command = Literal["train", "sim", "eval"]

LOGPROB_GAP_ALARM: Mapping[str, float] = {"float32": 1.0e-4, "bfloat16": 2.0e-2}
"""Mean gap between engine and trainer at equal version that rounding does not explain."""


@dataclass(frozen=True)
class Layout:
    """Which rank does what. Rollout ranks come first, then those that only train."""

    engine_ranks: Mapping[int, tuple[int, ...]]
    """Replica to its ranks."""
    actor_ranks: tuple[int, ...]

    @property
    def shared_ranks(self) -> tuple[int, ...]:
        """Ranks that hold an engine and an actor and take turns."""
        engines = {rank for ranks in self.engine_ranks.values() for rank in ranks}
        return tuple(rank for rank in self.actor_ranks if rank in engines)


@dataclass(frozen=True)
class Resolved:
    """A run that can be built: no `auto` is left where a number is needed."""

    loaded: Loaded
    config: Config
    """The same keys with every `auto` replaced (except those that `sim` and the checkpoint writer decide)."""
    strategy: Strategy
    origins: Mapping[str, str]
    """Dotted leaf key to `default`, `strategy`, `file` or `-o`."""
    settings: RunSettings
    layout: Layout
    shape: ModelShape
    device: str
    model_folder: Path | None
    """Where the model is on this machine; None for `scratch`."""
    no_effect: tuple[NoEffect, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What this strategy does with these ranks that its name does not tell."""
        ranks, found = self.config.cluster.ranks, []
        if self.strategy.max_staleness is not None:
            found.append(f"{self.strategy.name} runs at a staleness of {self.strategy.max_staleness}")
        if self.layout.shared_ranks:
            trains = self.layout.actor_ranks
            if ranks == 1:
                found.append("one rank takes turns")
            elif len(trains) == 1:
                who = f"all {ranks} ranks generate, then rank {trains[0]} alone trains"
                found.append(f"{who}: data-parallel training is not built yet")
            else:
                found.append(f"all {ranks} ranks generate, then all of them train")
        return tuple(found)

    @property
    def kv_budget_tokens(self) -> int:
        return int(self.config.rollout.kv_budget_tokens)

    @property
    def slots(self) -> int:
        return self.settings.slots

    def model_settings(
        self, *, vocab_size: int, pad_id: int, stop_ids: tuple[int, ...], words: tuple[str, ...] = ()
    ) -> ModelSettings:
        """The policy for a vocabulary, which only the environment knows."""
        return ModelSettings(
            path="scratch" if self.model_folder is None else str(self.model_folder.absolute()),
            vocab_size=vocab_size,
            max_context_tokens=self.config.rollout.max_context_tokens,
            pad_id=pad_id,
            stop_ids=stop_ids,
            layers=self.shape.layers,
            hidden=self.shape.hidden,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            dtype=self.config.train.dtype,
            device=self.device,
            words=words,
        )

    def engine_settings(self, model: ModelSettings) -> EngineSettings:
        rollout = self.config.rollout
        return EngineSettings(
            model, self.kv_budget_tokens, kv_policy=rollout.kv_policy, task_scheduler=rollout.task_scheduler
        )

    def trainer_settings(self, model: ModelSettings, *, weights_dir: str = "") -> TrainerSettings:
        config = self.config
        if config.algorithm.loss == "auto":
            raise ConfigurationError("algorithm.loss is not resolved")
        return TrainerSettings(
            model=model,
            seed=config.seed,
            temperature=config.rollout.temperature,
            loss=config.algorithm.loss,
            advantage=config.algorithm.advantage,
            kl_coef=config.algorithm.kl_coef,
            lr=config.train.lr,
            steps_per_batch=config.train.steps_per_batch,
            micro_batch_tokens=config.train.micro_batch_tokens,
            weights_dir=weights_dir,
        )


def resolve(
    loaded: Loaded,
    *,
    command: Command,
    memory_bytes: int | None = None,
    device: str = "cpu",
    model_folder: Path | None = None,
) -> Resolved:
    """Check the combinations and replace every `auto`.

    `memory_bytes`: what all ranks of this machine may use together (on accelerators: of one, times the ranks); None
    leaves memory out of `kv_budget_tokens`. `model_folder`: what `model.path` names, None for `scratch`. Raises
    `ConfigurationError`.
    """
    config = loaded.config
    try:
        strategy = get(config.schedule.strategy)
    except ConfigurationError as error:
        raise loaded.refuse("schedule.strategy", error.what, error.hint) from None
    check_combinations(loaded, strategy)
    shape = model_shape(config, model_folder, refuse=loaded.refuse)
    if config.rollout.engine == "vllm" and command != "sim" and device == "cpu":
        _check_heads(loaded, shape)
    layout = _layout(loaded, strategy, command)
    bound = config.schedule.max_staleness if strategy.max_staleness is None else strategy.max_staleness
    wanted = (bound + 1) * config.train.global_batch_groups * config.algorithm.group_size
    environments = [
        env.model_copy(update={"slots": wanted}) if env.slots == "auto" else env for env in config.environments.values()
    ]
    slots = sum(int(env.slots) for env in environments)
    if config.is_mixture:
        slots = min(slots, wanted)  # each may have all of them, together they need no more
    dtype = config.train.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    values: dict[str, dict[str, Any]] = {
        "rollout": {"kv_policy": _auto(config.rollout.kv_policy, strategy.kv_policy)},
        "algorithm": {"loss": _auto(config.algorithm.loss, strategy.loss)},
        "train": {"dtype": dtype},
        "schedule": {"max_staleness": bound, "staleness_counts": _counts(config, strategy)},
        "cluster": {"rollout_ranks": len(layout.engine_ranks), "reference_ranks": 0},
    }
    if config.rollout.kv_budget_tokens == "auto":
        values["rollout"]["kv_budget_tokens"] = _kv_budget(loaded, shape, layout, slots, dtype, memory_bytes)
    if values["rollout"]["kv_policy"] == "ctb" and config.rollout.priority == "weighted":
        values["rollout"]["priority_weights"] = asdict(replace(STANDARD, **config.rollout.priority_weights))
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in values.items()}
    env = environments if config.is_mixture else environments[0]
    resolved = config.model_copy(update={**sections, "env": env})
    return Resolved(
        loaded=loaded,
        config=resolved,
        strategy=strategy,
        origins={**loaded.origins, **dict.fromkeys(_strategys_keys(config, strategy), "strategy")},
        settings=_run_settings(resolved, slots),
        layout=layout,
        shape=shape,
        device=device,
        model_folder=model_folder,
        no_effect=without_effect(loaded, strategy, command=command),
    )


def _check_heads(loaded: Loaded, shape: ModelShape) -> None:
    """vLLM on a CPU computes only some head sizes: refused here, before anything starts."""
    if shape.head_dim not in CPU_HEAD_SIZES:
        raise loaded.refuse(
            "rollout.engine",
            f"vLLM on a CPU has no attention for heads of {shape.head_dim} (model.hidden / model.heads)",
            f"choose one of {', '.join(map(str, CPU_HEAD_SIZES))}, or use torch",
        )


def _counts(config: Config, strategy: Strategy) -> StalenessCounts:
    """Where nothing stale is trained, a start must wait for the new version: the strict rule."""
    return "oldest_token" if strategy.max_staleness == 0 else config.schedule.staleness_counts


def _auto(value: str, otherwise: str) -> str:
    return otherwise if value == "auto" else value


def _strategys_keys(config: Config, strategy: Strategy) -> list[str]:
    """The keys whose value the strategy decided."""
    keys = {
        "algorithm.loss": config.algorithm.loss == "auto",
        "rollout.kv_policy": config.rollout.kv_policy == "auto",
        "schedule.max_staleness": strategy.max_staleness is not None,
        "schedule.staleness_counts": config.schedule.staleness_counts != _counts(config, strategy),
        "cluster.rollout_ranks": strategy.all_ranks_generate or config.cluster.rollout_ranks == "auto",
    }
    return [key for key, decided in keys.items() if decided]


def _layout(loaded: Loaded, strategy: Strategy, command: Command) -> Layout:
    cluster = loaded.config.cluster
    ranks = cluster.ranks
    if strategy.all_ranks_generate or ranks == 1:
        rollout = ranks
    elif cluster.rollout_ranks != "auto":
        rollout = cluster.rollout_ranks
    else:
        rollout = ranks // 2 if command == "sim" else ranks - 1
    # All ranks generate: in virtual time all of them train too.
    actors = tuple(range(rollout, ranks)) or (tuple(range(ranks)) if command == "sim" else (ranks - 1,))
    if command != "sim" and len(actors) > 1:
        raise loaded.refuse(
            "cluster.rollout_ranks",
            f"{rollout} of {ranks} ranks leaves {len(actors)} to train; data-parallel training is not yet supported",
            f"give {ranks - 1}, or auto",
        )
    return Layout({replica: (replica,) for replica in range(rollout)}, actors)


def _kv_budget(
    loaded: Loaded, shape: ModelShape, layout: Layout, slots: int, dtype: str, memory_bytes: int | None
) -> int:
    """min(slots × context ÷ replicas, what memory leaves); refused when that is less than one task."""
    config = loaded.config
    context = config.rollout.max_context_tokens
    wanted = max(context, -(-slots * context // len(layout.engine_ranks)))
    if memory_bytes is None:
        return wanted
    room = kv_tokens_in_memory(
        shape,
        rank_bytes=memory_bytes / config.cluster.ranks,
        dtype=dtype,
        trains_too=bool(layout.shared_ranks),
        keeps_reference=config.algorithm.kl_coef > 0,
        micro_batch_tokens=config.train.micro_batch_tokens,
        engine=config.rollout.engine,
    )
    if room < context:
        raise loaded.refuse(
            "rollout.max_context_tokens",
            f"beside the model, memory holds {room} KV tokens on a rank, less than one task of {context}",
            "lower it, use a smaller model, or fewer ranks on this machine",
        )
    return min(wanted, room)


def _run_settings(config: Config, slots: int) -> RunSettings:
    checkpoint = config.checkpoint.every_updates
    return RunSettings(
        seed=config.seed,
        updates=config.train.updates,
        global_batch_groups=config.train.global_batch_groups,
        group_size=config.algorithm.group_size,
        steps_per_batch=config.train.steps_per_batch,
        micro_batch_tokens=config.train.micro_batch_tokens,
        max_staleness=config.schedule.max_staleness,
        staleness_counts=config.schedule.staleness_counts,
        publish_every_updates=config.schedule.publish_every_updates,
        max_turns=config.rollout.max_turns,
        max_context_tokens=config.rollout.max_context_tokens,
        max_new_tokens_per_turn=config.rollout.max_new_tokens_per_turn,
        temperature=config.rollout.temperature,
        slots=slots,
        uses_reference=config.algorithm.kl_coef > 0,
        warmup=WarmupSettings(config.warmup.demos, config.warmup.updates, config.warmup.lr),
        evaluation=EvalSettings(config.eval.every_updates, config.eval.prompts, config.eval.temperature),
        logprob_gap_alarm=LOGPROB_GAP_ALARM[config.train.dtype],
        checkpoint_every_updates=0 if checkpoint == "auto" else checkpoint,
        checkpoint_keep=config.checkpoint.keep,
        environment_weights=(
            {name: env.weight for name, env in config.environments.items()} if config.is_mixture else {}
        ),
        image_window=_image_window(config),
        kv_policy="ctb" if config.rollout.kv_policy == "ctb" else "lru",
        growth_z=config.rollout.growth_z,
        patience_s=config.rollout.patience_s,
        priority=config.rollout.priority,
        priority_weights=dict(config.rollout.priority_weights),
    )


def _image_window(config: Config) -> ImageWindow | None:
    window = config.rollout.image_window
    return None if window is None else ImageWindow(window, config.rollout.image_window_drop)


def wait_profile(env: EnvConfig) -> WaitProfile | None:
    """The waits of one environment."""
    wait = env.wait
    return None if wait is None else WaitProfile(wait.median_s, wait.sigma, wait.tail_fraction, wait.tail_s)
