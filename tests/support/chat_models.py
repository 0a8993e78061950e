"""Tiny model folders with a chat template, made from nothing: a byte-level tokenizer and random weights.

`transformers` reads the same folders, so its own rendering is the oracle of the `chat` renderer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""With tools and answers of tools, as the Qwen families write them."""

THINKING = CHATML.replace(
    "<|im_start|>{{ message.role }}\n{{",
    "<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{",
)
"""An empty thought before the last answer only: what is said later changes how earlier turns are written."""

HEADERS = """\
{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
"""A first token of its own, trimmed contents, no line break after a turn, no tools: as Llama 3 writes."""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEXTS = ("fetch the red cup see wall 1 ahead left right forward take", '{"name": "go", "arguments": {"to": "x"}}')


def write_tokenizer(folder: Path, template: str | None = CHATML, *, eos: str = "<|im_end|>") -> Path:
    """`tokenizer.json` and `tokenizer_config.json`, the template in the latter."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 5, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": eos, "special": True},
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_model(folder: Path, family: str = "qwen3", template: str = CHATML, *, positions: int = 1024) -> Path:
    """A whole model folder: random weights of one of the families `qwen3`, `qwen2`, `llama`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=320,  # more than the tokenizer has, as models pad theirs
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=positions,
        tie_word_embeddings=family != "llama",
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return write_tokenizer(folder, template)
