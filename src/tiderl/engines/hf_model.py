"""The model of the embedded engine: from a Hugging Face configuration to a decoder, and its weights from a file.

Built without weights: they arrive only by `load`, which changes nothing unless the whole file fits the model.
Qwen3, Qwen2 and Llama with full attention; knows nothing of turns and budgets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiderl.data.errors import CheckpointError, ConfigurationError, MissingExtraError
from tiderl.data.scratch import SCRATCH_MODEL_TYPE, scratch_config
from tiderl.data.settings import ModelSettings
from tiderl.engines.attention import SlotAttention
from tiderl.engines.decoder import EMBEDDING, HEAD, Decoder, DecoderSizes
from tiderl.engines.slot_cache import SlotCache

FAMILIES = ("qwen3", "qwen2", "llama")
POSITION_ROPES = ("default", "linear", "llama3", "yarn")  # a token's rotation depends on its position only


class SlotModel:
    """`forward` over rows of a `SlotCache`, `load` for weights. On `settings.device`, in `settings.dtype`."""

    def __init__(self, settings: ModelSettings) -> None:
        try:
            import transformers
        except ModuleNotFoundError as missing:
            raise MissingExtraError("transformers", "train", where="engines.torch") from missing
        self.device = _device(settings.device)
        self.dtype = _dtype(settings.dtype)
        config = _config(settings)
        self.vocab_size = int(config.vocab_size)
        self._sizes = DecoderSizes(
            layers=int(config.num_hidden_layers),
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
            norm_eps=float(config.rms_norm_eps),
        )
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        # The family's own tables: they hold whatever scaling of positions the configuration asks for.
        rotary = type(model.model.rotary_emb)(config=config)
        places = torch.arange(settings.max_context_tokens)[None]
        cos, sin = rotary(torch.empty(0, dtype=self.dtype), places)
        activation = F.silu if config.hidden_act == "silu" else transformers.activations.ACT2FN[config.hidden_act]
        tables = cos[0].to(self.device), sin[0].to(self.device)
        self.decoder = Decoder(self._sizes, self._shapes, tables, activation)

    def new_cache(self, max_rows: int) -> SlotCache:
        return SlotCache(
            layers=self._sizes.layers,
            kv_heads=self._sizes.kv_heads,
            head_dim=self._sizes.head_dim,
            max_rows=max_rows,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, cache: SlotCache, first_row: int, ids: Tensor, positions: Tensor, last_position: int) -> Tensor:
        """Run `ids` (int64 [rows, width]) at `positions` and return the logits after each row's last token.

        A row shorter than `width` repeats its last token at its last position. Returns float32 [rows, vocabulary].
        """
        fresh = not positions[:, 0].any()
        ids, positions = ids.to(self.device, non_blocking=True), positions.to(self.device, non_blocking=True)
        attention = SlotAttention(cache, first_row, positions, last_position, fresh)
        return self.decoder.forward(attention, ids, positions).float()

    def load(self, path: str) -> None:
        """Copy a safetensors file with Hugging Face parameter names into the model. A tied head may be left out.

        Raises `CheckpointError`, with nothing changed, for a file that is missing, damaged or of another model.
        """
        from safetensors import SafetensorError, safe_open

        parameters, shapes = self.decoder.parameters, self._shapes  # a tied head is only there as the embedding
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                sources = self._sources(set(file.keys()), path)
                for name, source in sources.items():
                    shape = tuple(file.get_slice(source).get_shape())
                    if shape != shapes[name]:
                        raise CheckpointError(f"{name} has shape {shape}, the model has {shapes[name]}", where=path)
                for name, source in sources.items():
                    parameters[name].copy_(file.get_tensor(source))
        except (OSError, SafetensorError) as damaged:
            raise CheckpointError(f"the weights cannot be read: {damaged}", where=path) from damaged

    def _sources(self, names: set[str], path: str) -> dict[str, str]:
        """Which name of the file each parameter is read from."""
        sources = {name: name for name in self._shapes}
        tied = HEAD not in self._shapes
        if tied and EMBEDDING not in names:
            sources[EMBEDDING] = HEAD
        missing = sorted(set(sources.values()) - names)
        surplus = sorted(names - set(sources.values()) - ({HEAD} if tied else set()))
        if missing or surplus:
            raise CheckpointError(
                f"the weights are of another model: missing {missing[:3]}, unknown {surplus[:3]}", where=path
            )
        return sources


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises an AssertionError
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {name!r} is not usable: {reason}", where="rollout.engine torch") from error


def _dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ConfigurationError(f"dtype {name!r} is none of {', '.join(dtypes)}", where="train.dtype")
    return dtypes[name]


def _config(settings: ModelSettings) -> Any:
    from transformers import AutoConfig

    if settings.path == "scratch":
        return AutoConfig.for_model(SCRATCH_MODEL_TYPE, **scratch_config(settings))
    try:
        config = AutoConfig.from_pretrained(settings.path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no model configuration can be read: {str(error).splitlines()[0]}",
            where=f"model.path {settings.path}",
            hint="give 'scratch', a Hugging Face folder, or a hub id",
        ) from error
    _check_supported(config, settings)
    return config


def _check_supported(config: Any, settings: ModelSettings) -> None:
    def refuse(what: str, hint: str) -> ConfigurationError:
        return ConfigurationError(what, where=f"model.path {settings.path}", hint=hint)

    if config.model_type not in FAMILIES:
        raise refuse(
            f"the embedded engine cannot run a {config.model_type!r} model",
            f"use a model of the families {', '.join(FAMILIES)}",
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise refuse("the model uses sliding-window attention", "the embedded engine supports full attention only")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in POSITION_ROPES:
        raise refuse(f"rope type {rope!r} depends on the length of the context", "its KV cannot be kept over turns")
    if settings.vocab_size > config.vocab_size:
        raise refuse(
            f"the tokenizer has {settings.vocab_size} ids, the model only {config.vocab_size}",
            "use the tokenizer that belongs to the model",
        )
    if settings.max_context_tokens > config.max_position_embeddings:
        raise refuse(
            f"the model has {config.max_position_embeddings} positions, the context {settings.max_context_tokens}",
            "lower rollout.max_context_tokens",
        )
