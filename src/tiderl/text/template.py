"""A model folder's tokenizer and chat template, read without transformers: the driver that renders imports no torch.

`tokenizer.json` is run by the tokenizers library; the template runs in jinja's sandbox, with the names that Hugging
Face gives to templates. Must not know observations or actions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tiderl.data.errors import ConfigurationError, MissingExtraError

WHERE = "model.tokenizer chat"

Message = Mapping[str, Any]
"""`role` and `content`, as templates take them."""


class ChatTokenizer:
    """Text to ids, ids to text, conversations to text. Raises `ConfigurationError` for a folder that lacks a part."""

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as missing:
            raise MissingExtraError("tokenizers", "train", where=WHERE) from missing
        self.folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise self.refuse("there is no tokenizer.json", "save the tokenizer in its fast form with save_pretrained")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no more special one
            raise self.refuse(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values()) + 1
        special = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        self._settings = _read_json(folder / "tokenizer_config.json")
        self.named_tokens = {name: text for name in _NAMED if (text := _content(self._settings.get(name)))}
        self.special_tokens = frozenset(special | set(self.named_tokens.values()))
        self.special_ids = frozenset(self._ids[token] for token in self.special_tokens if token in self._ids)
        self._template = self._compile()

    def refuse(self, what: str, hint: str = "") -> ConfigurationError:
        return ConfigurationError(f"{self.folder}: {what}", where=WHERE, hint=hint)

    def render(self, messages: Sequence[Message], *, tools: Sequence[Message] = (), speak: bool = False) -> str:
        """The conversation as text; `speak`: up to where the assistant speaks next. Raises `ConfigurationError` for
        what the template cannot say."""
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=speak, **self.named_tokens
            )
        except (TemplateError, TypeError) as error:
            raise self.refuse(f"the chat template failed: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone; texts of special tokens become these tokens, and none is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def knows(self, token: int) -> bool:
        """False for an id that the model has and the tokenizer has not: padding of the embedding."""
        return self._tokenizer.id_to_token(token) is not None

    def end_ids(self) -> tuple[int, ...]:
        """Ids that end what a model says, by tokenizer and generation configuration, ascending."""
        given = _read_json(self.folder / "generation_config.json").get("eos_token_id")
        ids = {number for number in (given if isinstance(given, list) else [given]) if isinstance(number, int)}
        eos = self._ids.get(self.named_tokens.get("eos_token", ""))
        return tuple(sorted(ids if eos is None else ids | {eos}))

    def pad_id(self) -> int | None:
        return self._ids.get(self.named_tokens.get("pad_token", ""))

    def _compile(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self._source())
        except TemplateError as error:
            raise self.refuse(f"the chat template cannot be read: {error}") from error

    def _source(self) -> str:
        path = self.folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else self._settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if not isinstance(source, str):
            raise self.refuse("the tokenizer has no chat template", "use an instruction-tuned model, or add one")
        return source


_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def _content(token: Any) -> str:
    """A token of tokenizer_config.json is its text or a mapping that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", where=WHERE) from error
    return values if isinstance(values, dict) else {}


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """jinja's own filter escapes for HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
