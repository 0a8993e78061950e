"""The policy as a Hugging Face folder: weights, config, tokenizer, generation config, chat template.

`AutoModelForCausalLM`, `AutoTokenizer` and vLLM load it. A scratch vocabulary becomes a tokenizer that splits on white
space, as the `words` renderer does. Knows nothing of updates.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import ModelSettings
from tiderl.trainers.folders import whole_folder
from tiderl.trainers.model import named_weights

TOKENIZER_FILES = ("*token*.json", "vocab.json", "merges.txt", "*.model", "chat_template.*")
"""What a folder holds of its tokenizer; `*.model` are sentencepiece's."""
UNKNOWN_WORD, ACT_WORD = "<unk>", "<act>"
"""The `words` renderer's names for a word outside the vocabulary and for "now the policy speaks"."""


def save_model_folder(
    model: Any, settings: ModelSettings, temperature: float, dtype: torch.dtype, directory: str
) -> None:
    """Write the folder whole. Raises `CheckpointError` where the disk refuses, `ConfigurationError` where the model
    came without a tokenizer."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    generation = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(settings.stop_ids),
        pad_token_id=settings.pad_id,
    )
    with whole_folder(directory) as folder:
        save_file(named_weights(model, dtype), folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        generation.save_pretrained(folder)
        _save_tokenizer(settings, folder)
        # safetensors writes for the owner's eyes only; who may read the rest of the folder may read its weights.
        (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _save_tokenizer(settings: ModelSettings, folder: Path) -> None:
    """Made of `words`, or a copy of the files that came with the model: saved anew they might split text otherwise than
    the renderer did. A scratch model without words (there is no text then) has its ids as words."""
    if settings.words or settings.path == "scratch":
        _words_tokenizer(settings).save_pretrained(folder)
        return
    files = [path for pattern in TOKENIZER_FILES for path in Path(settings.path).glob(pattern)]
    if not files:
        raise ConfigurationError(
            "the model has no tokenizer that can be saved with it", where=f"model.path {settings.path}"
        )
    for path in files:
        shutil.copyfile(path, folder / path.name)


def _words_tokenizer(settings: ModelSettings) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = settings.words or tuple(str(number) for number in range(settings.vocab_size))
    unknown = UNKNOWN_WORD if UNKNOWN_WORD in words else words[settings.pad_id]
    stop = words[settings.stop_ids[0]] if settings.stop_ids else None
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=words[settings.pad_id],
        unk_token=unknown,
        eos_token=stop,
        model_max_length=settings.max_context_tokens,
        clean_up_tokenization_spaces=False,
    )
    if ACT_WORD in words and stop is not None:
        fast.chat_template = (
            "{% for message in messages %}{{ message['content'] }}"
            f"{{{{ ' {stop} ' if message['role'] == 'assistant' else ' {ACT_WORD} ' }}}}"
            "{% endfor %}"
        )
    return fast
