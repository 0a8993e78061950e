"""The `chat` renderer: a tokenizer with a chat template, ids in and ids out.

Keeps I8: the template is run once for the first observation, and later only to learn what follows a turn; what the
policy said is never decoded and encoded again. A template that rewrites history is refused. Must not know models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiderl.data.errors import ConfigurationError
from tiderl.data.forks import Span
from tiderl.data.records import Action, Observation, ToolCall
from tiderl.text.template import WHERE, ChatTokenizer, Message

FIRST, SAID, NEXT = "What now?", "SaidByThePolicy", "And now?"
"""A conversation to learn the template from. `SAID` has no white space at its ends, which templates may cut."""

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
TOOL_CALL_OPENS = "<tool_call>"
THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
THOUGHT_OPENS = "<think>"


class ChatRenderer:
    """The template's words around observations and answers of tools; tool calls as `<tool_call>{json}</tool_call>`.

    Raises `ConfigurationError` for a folder without a tokenizer or a template that this can follow.
    """

    words: tuple[str, ...] = ()
    """None of its own: the model keeps the tokenizer of its folder."""

    def __init__(self, folder: str | Path) -> None:
        self._tokenizer = tokenizer = ChatTokenizer(Path(folder))
        self._tool_role = "user"
        following = self._following([_user(FIRST)], _user(NEXT))
        again = [_user(FIRST), _assistant(SAID), _user(NEXT)]
        if self._following(again, _user(NEXT)) != following:
            raise self._rewrites()
        self._close_id, *_ = tokenizer.encode(following)
        if self._close_id not in tokenizer.special_ids:
            raise tokenizer.refuse(
                "its chat template ends what the assistant says with plain text, so no token stops the policy"
            )
        self._tool_role = self._find_tool_role()
        self.stop_ids: tuple[int, ...] = (
            self._close_id,
            *(number for number in tokenizer.end_ids() if number != self._close_id),
        )
        pad_id = tokenizer.pad_id()
        self.pad_id = self._close_id if pad_id is None else pad_id
        self.vocab_size = tokenizer.vocab_size

    def begin(self, observation: Observation, tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """int32 [n]: tools and first observation as the template says them, up to where the policy speaks. Raises
        `ConfigurationError` for tools that the template leaves out, and for images."""
        messages = [_user(self._text(observation))]
        text = self._tokenizer.render(messages, tools=tools, speak=True)
        if tools and text == self._tokenizer.render(messages, speak=True):
            raise self._tokenizer.refuse("its chat template has no way to say tools")
        return np.array(self._tokenizer.encode(text), np.int32)

    def extend(self, observation: Observation, said: np.ndarray | None = None) -> np.ndarray:
        """int32 [n]: the end of the assistant's turn as far as the policy did not sample it, the observation, and up to
        where the policy speaks again. After a tool call the observation is the tool's answer."""
        closed = said is None or (len(said) > 0 and int(said[-1]) == self._close_id)
        called = said is not None and bool(self.parse(said).tool_calls)
        role = self._tool_role if called else "user"
        message = {"role": role, "content": self._text(observation)}
        ids = self._tokenizer.encode(self._following([_user(FIRST)], message))
        return np.array(ids[1:] if closed else ids, np.int32)

    def images(self, observation: Observation) -> tuple[Span, ...]:
        """None: what is no text was refused."""
        return ()

    def action_ids(self, text: str) -> np.ndarray:
        """int32 [n]: `text` and the token that ends the assistant's turn."""
        return np.array([*self._tokenizer.encode(self._harmless(text)), self._close_id], np.int32)

    def parse(self, ids: np.ndarray) -> Action:
        """What was said before the first stop token, without the thought that it may begin with and without its tool
        calls. A tool call or thought that does not end, or is no JSON, is malformed, and so is nothing at all."""
        said: list[int] = []
        for number in ids.tolist():
            if number in self.stop_ids:
                break
            said.append(number)
        text = self._tokenizer.decode(said).strip()
        for number in said:
            if number in self._tokenizer.special_ids or not self._tokenizer.knows(number):
                return Action(text, malformed=f"the token {number} is not one to say")
        spoken = THOUGHT.sub("", text, count=1)
        if spoken.lstrip().startswith(THOUGHT_OPENS):
            return Action(text, malformed="the thought has no end")
        calls: list[ToolCall] = []
        for written in TOOL_CALL.findall(spoken):
            call = _tool_call(written)
            if isinstance(call, str):
                return Action(text, malformed=call)
            calls.append(call)
        rest = TOOL_CALL.sub("", spoken).strip()
        if TOOL_CALL_OPENS in rest:
            return Action(text, malformed="the tool call has no end")
        return Action(rest, tuple(calls), "" if rest or calls else "nothing was said")

    def _following(self, history: Sequence[Message], message: Message) -> str:
        """What the template writes after the assistant's answer to `history` when `message` comes next."""
        before = self._tokenizer.render(history, speak=True) + SAID
        whole = self._tokenizer.render([*history, _assistant(SAID), message], speak=True)
        if not whole.startswith(before):
            raise self._rewrites()
        return whole[len(before) :]

    def _find_tool_role(self) -> str:
        """`tool` where the template says answers of tools in its own way, else `user`."""
        try:
            following = self._following([_user(FIRST)], {"role": "tool", "content": NEXT})
        except ConfigurationError:
            return "user"
        return "tool" if NEXT in following and self._tokenizer.encode(following)[0] == self._close_id else "user"

    def _text(self, observation: Observation) -> str:
        for part in observation.parts:
            if not isinstance(part, str):
                raise ConfigurationError(
                    f"the chat tokenizer has no way to say a part of type {type(part).__name__}", where=WHERE
                )
        return self._harmless(observation.as_text())

    def _harmless(self, text: str) -> str:
        """An environment's text must not become a special token: a blank breaks up what reads like one."""
        for token in self._tokenizer.special_tokens:
            if token in text:
                text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _rewrites(self) -> ConfigurationError:
        return self._tokenizer.refuse(
            "its chat template changes earlier turns when later ones come, so no turn extends the ids before it",
            "use a template that only appends: what follows the generation prompt stays as it was said",
        )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _tool_call(written: str) -> ToolCall | str:
    """The call, or what is wrong with it."""
    try:
        call = json.loads(written)
    except (ValueError, RecursionError) as error:
        return f"the tool call is no JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "the tool call has no name"
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return "the arguments of the tool call are no JSON object"
    return ToolCall(call["name"], arguments)
