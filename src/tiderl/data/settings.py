"""Frozen settings that `api` resolves from the configuration and hands to the parts.

Everything `auto` is already a number here. Also the price list of numbers that `schedule` may not import from `cost`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tiderl.data.window import ImageWindow

LossName = Literal["grpo", "decoupled_ppo"]
StalenessCounts = Literal["oldest_token", "window"]
AdvantageName = Literal["group", "leave_one_out"]


class ModelSettings(msgspec.Struct, frozen=True):
    """The policy. `path` is `scratch` or a Hugging Face folder; the sizes count only for `scratch`."""

    path: str
    vocab_size: int
    max_context_tokens: int
    pad_id: int
    stop_ids: tuple[int, ...]
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    dtype: str = "float32"
    device: str = "cpu"
    words: tuple[str, ...] = ()  # the vocabulary in id order, for the saved tokenizer


class EngineSettings(msgspec.Struct, frozen=True):
    """One replica's engine."""

    model: ModelSettings
    kv_budget_tokens: int
    max_batch: int = 64  # sequences computed in one step
    prefill_tokens_per_step: int = 2048
    kv_policy: str = "lru"
    """Which waiting task's KV makes room first. `lru`: the least recently used, whatever was hinted. `ctb`: a task is
    held whole until its next turn, `release`, `offload` or other weights; running turns that find no other room drop
    the held task of the lowest `Turn.priority`, then the least recently used."""
    prefill_tokens_beside_decoding: int = 256
    """The same in a step that also decodes, so that a long prompt does not stall it. On a CPU, beside a prompt of 2,000
    tokens, the gap between two tokens falls to an eighth and throughput stays."""
    growth_quantile: float = 0.8
    """A turn starts when its context and this quantile of what recent turns sampled fit; 1.0 = all it may sample."""
    kv_block_tokens: int = 16
    """Positions in one block of KV, for engines that keep it in blocks; the embedded engine keeps whole contexts."""
    min_shared_tokens: int = 1
    """Shorter prompts are computed by every task of a group: for simulated engines (the embedded one has its own)."""
    host_kv_budget_tokens: int | None = None
    """Offloaded KV in host memory; None = `kv_budget_tokens` on an accelerator, also a simulated one, 0 on a CPU (it is
    the same memory)."""
    task_scheduler: str = "auto"
    """For vLLM under `ctb`, the scheduler that pins tasks' blocks: `sync`, `async`, or `none` for vLLM's own, which
    takes no hints; `auto` = `sync` on a CPU, `async` on an accelerator."""


class TrainerSettings(msgspec.Struct, frozen=True):
    """The trainer on one rank. `clip_*` and `importance_weight_cap`: see `trainers/losses.py`."""

    model: ModelSettings
    seed: int
    temperature: float
    loss: LossName = "grpo"
    advantage: AdvantageName = "group"
    kl_coef: float = 0.01
    lr: float = 3.0e-4
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_weight_cap: float = 2.0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    steps_per_batch: int = 1
    micro_batch_tokens: int = 4096
    weights_dir: str = ""  # where versions are exported to; "" = a folder of the trainer's own, gone when it ends


class WarmupSettings(msgspec.Struct, frozen=True):
    demos: int
    updates: int
    lr: float


class EvalSettings(msgspec.Struct, frozen=True):
    every_updates: int
    prompts: int
    temperature: float
    samples: int = 1  # episodes for each prompt


class RunSettings(msgspec.Struct, frozen=True):
    """What the runtime needs to know; the same for real and virtual time."""

    seed: int
    updates: int
    global_batch_groups: int
    group_size: int
    steps_per_batch: int
    micro_batch_tokens: int
    max_staleness: int
    staleness_counts: StalenessCounts
    publish_every_updates: int
    max_turns: int
    max_context_tokens: int
    max_new_tokens_per_turn: int
    temperature: float
    slots: int
    uses_reference: bool
    warmup: WarmupSettings
    evaluation: EvalSettings
    logprob_gap_alarm: float
    """Mean absolute engine-trainer log-prob gap at equal version above which a fault is recorded."""
    checkpoint_every_updates: int = 0  # 0 = as cheap as it is
    checkpoint_keep: int = 2
    environment_weights: dict[str, float] = {}  # of a mixture: name to weight; empty for one environment
    image_window: ImageWindow | None = None  # None: all images stay in the context
    kv_policy: Literal["lru", "ctb"] = "lru"
    growth_z: float = 1.0  # these four: as in `rollout`, for `ctb`
    patience_s: float = 30.0
    priority: Literal["tiers", "weighted", "deadlines"] = "tiers"
    priority_weights: dict[str, float] = {}


class WaitProfile(msgspec.Struct, frozen=True):
    """Extra seconds that an environment's step really waits: lognormal with a heavy tail."""

    median_s: float
    sigma: float
    tail_fraction: float = 0.0
    tail_s: tuple[float, float] = (0.0, 0.0)


class WorkloadProfile(msgspec.Struct, frozen=True):
    """How an environment behaves, for virtual time: lognormal lengths by their median and sigma.

    Kept in the environment registry's line; read without importing the environment.
    """

    turns_median: float
    turns_sigma: float
    first_observation_tokens: float
    observation_tokens: float
    observation_sigma: float
    action_tokens: float
    action_sigma: float
    step_s: float
    step_sigma: float
    reset_s: float = 0.0
    group_correlation: float = 0.5
    success_fraction: float = 0.5
    system_tokens: float = 0.0  # of the first observation: the same for all prompts, such as tool schemas
    score_s: float = 0.0  # of the verifier after the last turn
    timeout_fraction: float = 0.0  # of resets and steps: they never answer
    failure_fraction: float = 0.0  # of resets and steps: they raise
    action_correlation: float = 0.0  # of a turn's action lengths, between the members of a group
    observation_images: bool = False  # each observation after the first prompt is one image
