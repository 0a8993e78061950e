"""The `words` renderer: a scratch vocabulary, one id for each word of an environment.

Only what is new is rendered, history is never touched (I8): observation words, then `<act>`, where the policy
speaks; it ends what it says with `<end>`. Must not know environments or models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiderl.data.errors import ConfigurationError
from tiderl.data.forks import Span
from tiderl.data.records import Action, Observation

PAD, END, ACT, UNKNOWN = SPECIALS = ("<pad>", "<end>", "<act>", "<unk>")


class WordsRenderer:
    """Text split on white space, in lower case; a word outside the vocabulary becomes `<unk>` and is counted.

    `words` are all tokens in id order, the specials first: what a saved tokenizer needs, and what makes the
    same renderer again.
    """

    def __init__(self, words: Sequence[str]) -> None:
        if tuple(words[: len(SPECIALS)]) != SPECIALS or len(set(words)) != len(words):
            raise ConfigurationError(
                "these are not the tokens of a words renderer: specials first, each word once",
                where="model.tokenizer",
                hint="make one from an environment's words with WordsRenderer.from_vocabulary",
            )
        self.words = tuple(words)
        self.unknown_words = 0
        self.pad_id = self.words.index(PAD)
        self.stop_ids: tuple[int, ...] = (self.words.index(END),)
        self.vocab_size = len(self.words)
        self._ids = {word: number for number, word in enumerate(self.words)}
        self._act_id, self._unknown_id = self._ids[ACT], self._ids[UNKNOWN]
        self._special_ids = frozenset(self._ids[word] for word in SPECIALS)

    @classmethod
    def from_vocabulary(cls, vocabulary: Iterable[str]) -> WordsRenderer:
        """The renderer for an environment's words, in the order of the alphabet. Raises `ConfigurationError`
        for an empty vocabulary and for an entry that is not one word."""
        words = sorted({word.lower() for word in vocabulary})
        for word in words:
            if word in SPECIALS or word.split() != [word]:
                raise ConfigurationError(
                    f"{word!r} cannot be a word of the vocabulary",
                    where="the environment's vocabulary()",
                    hint=f"words hold no white space and are none of {' '.join(SPECIALS)}",
                )
        if not words:
            raise ConfigurationError("the vocabulary is empty", where="the environment's vocabulary()")
        return cls((*SPECIALS, *words))

    @classmethod
    def from_folder(cls, folder: Path, vocabulary: Iterable[str]) -> WordsRenderer:
        """The renderer that a saved folder was made with. Raises `ConfigurationError` for a folder of another
        tokenizer, and for one that lacks a word of `vocabulary`: the model would be blind to it."""
        path = folder / "tokenizer.json"
        try:
            ids = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
            words = sorted(ids, key=ids.__getitem__)
            if [ids[word] for word in words] != list(range(len(words))):
                raise ValueError("its ids have holes")
            renderer = cls(words)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigurationError) as error:
            raise ConfigurationError(
                f"{folder} has no words tokenizer",
                where="model.tokenizer words",
                hint="it takes folders that TideRL saved; for a model with a chat template set model.tokenizer: chat",
            ) from error
        missing = sorted({word.lower() for word in vocabulary} - renderer._ids.keys())
        if missing:
            raise ConfigurationError(
                f"{folder} does not know {len(missing)} of the environment's words: {', '.join(missing[:5])}",
                where="model.tokenizer words",
                hint="it was trained on another environment: use that one, or start from scratch",
            )
        return renderer

    def begin(self, observation: Observation, tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """int32 [n]: the observation's words and `<act>`. Raises `ConfigurationError` for tools and for
        images."""
        if tools:
            raise ConfigurationError(
                "the words tokenizer has no way to say tools",
                where="model.tokenizer",
                hint="use a model with a chat template for an environment that offers tools",
            )
        return self.extend(observation)

    def extend(self, observation: Observation, said: np.ndarray | None = None) -> np.ndarray:
        """int32 [n]: the same for every later observation, however the turn before it ended."""
        ids: list[int] = []
        for part in observation.parts:
            if not isinstance(part, str):
                raise ConfigurationError(
                    f"the words tokenizer has no way to say a part of type {type(part).__name__}",
                    where="model.tokenizer",
                )
            ids.extend(self._encode(part))
        return np.array([*ids, self._act_id], np.int32)

    def images(self, observation: Observation) -> tuple[Span, ...]:
        """None: what is no text was refused."""
        return ()

    def action_ids(self, text: str) -> np.ndarray:
        """int32 [n]: the words of `text` and `<end>`."""
        return np.array([*self._encode(text), self.stop_ids[0]], np.int32)

    def parse(self, ids: np.ndarray) -> Action:
        """The words before the first `<end>`, or all where the turn was cut. Nothing said, or a special among
        the words, is malformed."""
        said: list[int] = []
        for number in ids.tolist():
            if number in self.stop_ids:
                break
            said.append(number)
        text = self.decode(said)
        if not said:
            return Action(text, malformed="nothing was said")
        special = next((number for number in said if number in self._special_ids), None)
        if special is not None:
            return Action(text, malformed=f"{self.words[special]} is not a word to say")
        return Action(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The tokens with blanks between, specials included: for people."""
        return " ".join(self.words[number] for number in ids)

    def _encode(self, text: str) -> list[int]:
        ids = [self._ids.get(word, self._unknown_id) for word in text.lower().split()]
        self.unknown_words += ids.count(self._unknown_id)
        return ids
