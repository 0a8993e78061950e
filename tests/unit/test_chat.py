"""The `chat` renderer against transformers' own rendering of whole conversations, and what it refuses."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_models import CHATML, HEADERS, THINKING, write_tokenizer
from transformers import AutoTokenizer

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import ImageHandle, Observation
from tiderl.text.chat import ChatRenderer

TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "go", "arguments": {"to": "x"}}\n</tool_call>'
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS}
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def folder(name: str) -> Path:
    directory = tempfile.TemporaryDirectory(prefix="tiderl-chat-")
    _KEPT.append(directory)
    return write_tokenizer(
        Path(directory.name), TEMPLATES[name], eos="<|eot_id|>" if name == "headers" else "<|im_end|>"
    )


@functools.cache
def renderer(name: str = "chatml") -> ChatRenderer:
    return ChatRenderer(folder(name))


@functools.cache
def oracle(name: str = "chatml") -> Any:
    return AutoTokenizer.from_pretrained(folder(name))


def whole(name: str, *messages: tuple[str, str], tools: Any = None) -> list[int]:
    """The conversation up to where the assistant speaks, as transformers says it."""
    talk = [{"role": role, "content": text} for role, text in messages]
    return oracle(name).apply_chat_template(talk, tools=tools, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_turn_by_turn_gives_the_ids_of_the_whole_conversation(name: str) -> None:
    """Also where the template writes the newest answer otherwise than an older one."""
    words = renderer(name)
    talk: list[tuple[str, str]] = []
    ids: list[int] = []
    for number, (seen, said) in enumerate([("fetch the red cup", "left"), ("see wall 1 ahead", "take"), ("", "right")]):
        observation = Observation.text(seen)
        ids += (words.extend(observation) if number else words.begin(observation)).tolist()
        talk.append(("user", seen))
        assert ids == whole(name, *talk)
        ids += words.action_ids(said).tolist()
        talk.append(("assistant", said))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_that_was_cut_is_closed_and_its_own_ids_stay(name: str) -> None:
    words = renderer(name)
    said = words.action_ids("take the")
    assert words.extend(Observation.text("go"), said).tolist() == words.extend(Observation.text("go")).tolist()
    cut = words.extend(Observation.text("go"), said[:-1])
    assert cut.tolist() == [words.stop_ids[0], *words.extend(Observation.text("go"))]
    assert words.extend(Observation.text("go"), np.zeros(0, np.int32)).tolist() == cut.tolist()


def test_tools_are_said_first_and_their_answers_come_as_such() -> None:
    words = renderer()
    begun = words.begin(Observation.text("go to x"), [TOOL]).tolist()
    assert begun == whole("chatml", ("user", "go to x"), tools=[TOOL])
    said = words.action_ids(CALL)
    answered = [*begun, *said, *words.extend(Observation.text("you are at x"), said)]
    talk = (("user", "go to x"), ("assistant", CALL), ("tool", "you are at x"))
    assert answered == whole("chatml", *talk, tools=[TOOL])


def test_a_template_without_tools_refuses_them() -> None:
    words = renderer("headers")
    with pytest.raises(ConfigurationError, match="no way to say tools"):
        words.begin(Observation.text("go"), [TOOL])


def test_where_the_template_knows_no_tool_role_the_user_answers_a_call(tmp_path: Path) -> None:
    no_tools = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('a tool') }}{% endfor %}"
    words = ChatRenderer(write_tokenizer(tmp_path, no_tools + CHATML))
    said = words.action_ids(CALL)
    assert words.extend(Observation.text("x"), said).tolist() == words.extend(Observation.text("x")).tolist()


def test_stop_ids_are_the_end_of_a_turn_first_then_those_of_the_model(tmp_path: Path) -> None:
    id_of = oracle().convert_tokens_to_ids
    assert renderer().stop_ids == (id_of("<|im_end|>"),)
    write_tokenizer(tmp_path, eos="<|endoftext|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, id_of("<|im_end|>")]}))
    words = ChatRenderer(tmp_path)
    assert words.stop_ids == (id_of("<|im_end|>"), 3, id_of("<|endoftext|>"))
    assert (words.pad_id, words.vocab_size) == (id_of("<|endoftext|>"), len(oracle()))
    other_end = np.array([id_of("<|endoftext|>")], np.int32)
    assert words.extend(Observation.text("go"), other_end)[0] == id_of("<|im_end|>")  # the turn is closed all the same


PARSED = [
    ("take the cup", "take the cup", [], ""),
    ("  take\n", "take", [], ""),
    ("<think>\nleft or right?\n</think>\n\nleft", "left", [], ""),
    (CALL, "", [("go", {"to": "x"})], ""),
    (f"I go.\n{CALL}\n{CALL}", "I go.", [("go", {"to": "x"})] * 2, ""),
    ('<tool_call>{"name": "look"}</tool_call>', "", [("look", {})], ""),
    ("", "", [], "nothing was said"),
    ("<think>\nwell</think>", "", [], "nothing was said"),
    ("<think> left", None, [], "the thought has no end"),
    ("<tool_call>{'name': 'go'}</tool_call>", None, [], "no JSON"),
    ('<tool_call>{"name": "go"', None, [], "no end"),
    ('<tool_call>{"arguments": {}}</tool_call>', None, [], "no name"),
    ('<tool_call>["go"]</tool_call>', None, [], "no name"),
    ('<tool_call>{"name": "go", "arguments": "x"}</tool_call>', None, [], "no JSON object"),
    (f"<tool_call>{'[' * 100_000}</tool_call>", None, [], "no JSON"),
]


@pytest.mark.parametrize(("said", "text", "calls", "malformed"), PARSED, ids=[str(n) for n in range(len(PARSED))])
def test_what_was_said_is_text_and_calls_or_malformed(said: str, text: str | None, calls: list, malformed: str) -> None:
    ids = oracle()(said, add_special_tokens=False)["input_ids"]
    action = renderer().parse(np.array([*ids, renderer().stop_ids[0], 65], np.int32))
    assert malformed in action.malformed and bool(malformed) == bool(action.malformed)
    assert [(call.name, call.arguments) for call in action.tool_calls] == calls
    if text is not None:
        assert action.text == text


@pytest.mark.parametrize("token", ["<|im_start|>", 315])
def test_special_tokens_and_ids_of_no_token_are_malformed(token: str | int) -> None:
    number = oracle().convert_tokens_to_ids(token) if isinstance(token, str) else token
    assert "not one to say" in renderer().parse(np.array([65, number, renderer().stop_ids[0]], np.int32)).malformed


def test_text_of_the_environment_never_becomes_a_special_token() -> None:
    words = renderer()
    harmless = words.begin(Observation.text("see"))
    for text in ("see <|im_end|>", "<|im_start|>assistant"):
        specials = [number for number in words.begin(Observation.text(text)).tolist() if number in special_ids()]
        assert specials == [number for number in harmless.tolist() if number in special_ids()]


def special_ids() -> set[int]:
    return set(oracle().all_special_ids) | {oracle().convert_tokens_to_ids("<|im_start|>")}


REFUSED = {
    "counts the messages": ("{{ messages | length }}" + CHATML, "changes earlier turns"),
    "forgets the first": (CHATML.replace("in messages", "in messages[-2:]"), "changes earlier turns"),
    "opens a thought": (
        CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"),
        "changes earlier turns",
    ),
    "ends with plain text": (
        CHATML.replace("{{ message.content }}<|im_end|>", "{{ message.content }} bye"),
        "plain text",
    ),
    "is no template": ("{% for message in messages %}", "cannot be read"),
    "raises": ("{{ raise_exception('no talk') }}", "no talk"),
    "is missing": (None, "no chat template"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_template_that_cannot_be_followed_is_refused(what: str, tmp_path: Path) -> None:
    template, expected = REFUSED[what]
    with pytest.raises(ConfigurationError, match=expected) as caught:
        ChatRenderer(write_tokenizer(tmp_path, template))
    assert len(str(caught.value).splitlines()) <= 2


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no tokenizer\.json"):
        ChatRenderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ChatRenderer(tmp_path)


def test_the_template_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    begun = ChatRenderer(tmp_path).begin(Observation.text("go"))
    assert begun.tolist() == whole("chatml", ("user", "go"))


def test_images_are_refused_not_ignored() -> None:
    with pytest.raises(ConfigurationError, match="ImageHandle"):
        renderer().extend(Observation((ImageHandle("00", 1, 1),)))
