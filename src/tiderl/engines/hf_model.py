"""The model of the embedded engine: a Hugging Face causal LM run over the slot cache, and its weights from a file.

Built without weights: they arrive only by `load`, which changes nothing unless the whole file fits the model.
Qwen3, Qwen2 and Llama with full attention; knows nothing of turns and budgets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiderl.data.errors import CheckpointError, ConfigurationError, MissingExtraError
from tiderl.data.scratch import SCRATCH_MODEL_TYPE, scratch_config
from tiderl.data.settings import ModelSettings
from tiderl.engines.slot_cache import SlotCache, attention_mask, slot_attention

FAMILIES = ("qwen3", "qwen2", "llama")
ATTENTION = "tiderl_slots"  # the name of `slot_attention` in transformers' registry
POSITION_ROPES = ("default", "linear", "llama3", "yarn")  # a token's rotation depends on its position only
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SlotModel:
    """`forward` over rows of a `SlotCache`, `load` for weights. On `settings.device`, in `settings.dtype`."""

    def __init__(self, settings: ModelSettings) -> None:
        try:
            import transformers
        except ModuleNotFoundError as missing:
            raise MissingExtraError("transformers", "train", where="engines.torch") from missing
        transformers.AttentionInterface.register(ATTENTION, slot_attention)
        self.device = _device(settings.device)
        self.dtype = _dtype(settings.dtype)
        config = _config(settings)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=self.dtype, attn_implementation=ATTENTION
            )
        model.to_empty(device=self.device)
        backbone = model.model
        with torch.device(self.device):  # its tables are computed at construction, not loaded
            backbone.rotary_emb = type(backbone.rotary_emb)(config=config)
        model.tie_weights()
        if self.dtype == torch.float32:
            _fuse_norms(model)
        self._model = model.eval().requires_grad_(False)
        self.vocab_size = int(config.vocab_size)
        self._kv_heads = int(config.num_key_value_heads)
        self._query_groups = int(config.num_attention_heads) // self._kv_heads
        self._layers = int(config.num_hidden_layers)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def new_cache(self, max_rows: int) -> SlotCache:
        return SlotCache(
            layers=self._layers,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            max_rows=max_rows,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, cache: SlotCache, first_row: int, ids: Tensor, positions: Tensor, last_position: int) -> Tensor:
        """Run `ids` (int64 [rows, width]) at `positions` and return the logits after each row's last token.

        A row shorter than `width` repeats its last token at its last position. Returns float32 [rows, vocabulary].
        """
        ids, positions = ids.to(self.device, non_blocking=True), positions.to(self.device, non_blocking=True)
        visible = cache.select(first_row, positions, last_position)
        mask = attention_mask(visible, self._query_groups, self.dtype)
        backbone = self._model.model
        hidden = backbone.embed_tokens(ids)
        rotary = backbone.rotary_emb(hidden, positions)
        for layer in backbone.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=rotary,
            )
        logits: Tensor = self._model.lm_head(backbone.norm(hidden[:, -1]))
        return logits.float()

    def load(self, path: str) -> None:
        """Copy a safetensors file with Hugging Face parameter names into the model. A tied head may be left out.

        Raises `CheckpointError`, with nothing changed, for a file that is missing, damaged or of another model.
        """
        from safetensors import SafetensorError, safe_open

        parameters = dict(self._model.named_parameters())  # a tied head appears once, as the embedding
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                sources = self._sources(set(file.keys()), parameters, path)
                for name, source in sources.items():
                    shape = tuple(file.get_slice(source).get_shape())
                    if shape != tuple(parameters[name].shape):
                        raise CheckpointError(
                            f"{name} has shape {shape}, the model has {tuple(parameters[name].shape)}",
                            where=path,
                        )
                for name, source in sources.items():
                    parameters[name].copy_(file.get_tensor(source))
        except (OSError, SafetensorError) as damaged:
            raise CheckpointError(f"the weights cannot be read: {damaged}", where=path) from damaged

    def _sources(self, names: set[str], parameters: dict[str, Any], path: str) -> dict[str, str]:
        sources = {name: name for name in parameters}
        tied = HEAD not in parameters
        if tied and EMBEDDING not in names:
            sources[EMBEDDING] = HEAD
        missing = sorted(set(sources.values()) - names)
        surplus = sorted(names - set(sources.values()) - ({HEAD} if tied else set()))
        if missing or surplus:
            raise CheckpointError(
                f"the weights are of another model: missing {missing[:3]}, unknown {surplus[:3]}", where=path
            )
        return sources


def _fuse_norms(module: torch.nn.Module) -> None:
    """Replace the family's RMS norms by torch's one-kernel norm over the same parameter names.

    In float32 only: in half precision the families round before they multiply by the weight, torch after.
    """
    for name, child in module.named_children():
        if hasattr(child, "variance_epsilon"):
            weight = child.weight
            norm = torch.nn.RMSNorm(weight.shape, eps=child.variance_epsilon, device=weight.device, dtype=weight.dtype)
            setattr(module, name, norm)
        else:
            _fuse_norms(child)


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
