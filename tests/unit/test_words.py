"""The renderers: what goes to ids and comes back, and what the words renderer refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import ImageHandle, Observation, TokenCount
from tiderl.text.lengths import LengthsRenderer
from tiderl.text.words import SPECIALS, WordsRenderer

WORDS = ("go", "left", "right", "red", "ball")
RENDERER = WordsRenderer.from_vocabulary(WORDS)
PAD, END, ACT, UNKNOWN = range(4)
ID = {word: 4 + number for number, word in enumerate(sorted(WORDS))}


def test_the_tokens_are_the_specials_then_the_words_in_order() -> None:
    assert RENDERER.words == (*SPECIALS, "ball", "go", "left", "red", "right")
    assert (RENDERER.pad_id, RENDERER.stop_ids, RENDERER.vocab_size) == (PAD, (END,), 9)


def test_the_order_of_the_vocabulary_and_repeats_do_not_matter() -> None:
    assert WordsRenderer.from_vocabulary([*reversed(WORDS), "Left"]).words == RENDERER.words


def test_saved_tokens_make_the_same_renderer() -> None:
    assert WordsRenderer(RENDERER.words).words == RENDERER.words
    with pytest.raises(ConfigurationError):
        WordsRenderer(WORDS)


def test_observations_end_where_the_policy_speaks() -> None:
    ids = RENDERER.begin(Observation(("go Red", "ball")))
    assert ids.tolist() == [ID["go"], ID["red"], ID["ball"], ACT]
    assert ids.dtype == np.int32
    assert RENDERER.extend(Observation.text("")).tolist() == [ACT]


def test_an_unknown_word_is_one_token_and_counted() -> None:
    renderer = WordsRenderer.from_vocabulary(WORDS)
    assert renderer.extend(Observation.text("go north west")).tolist() == [ID["go"], UNKNOWN, UNKNOWN, ACT]
    assert renderer.unknown_words == 2


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5))
def test_what_a_demonstration_says_is_parsed_back(words: list[str]) -> None:
    action = RENDERER.parse(RENDERER.action_ids(" ".join(words)))
    assert (action.text, action.malformed) == (" ".join(words), "")


@pytest.mark.parametrize(
    ("ids", "text", "malformed"),
    [
        ([ID["left"], END], "left", False),
        ([ID["left"]], "left", False),  # cut by length: the words still count
        ([ID["left"], END, ID["right"]], "left", False),
        ([END], "", True),
        ([], "", True),
        ([ID["left"], ACT, END], "left <act>", True),
        ([PAD, END], "<pad>", True),
        ([UNKNOWN, END], "<unk>", True),
    ],
)
def test_parse_reads_up_to_the_stop_and_calls_specials_malformed(ids: list[int], text: str, malformed: bool) -> None:
    action = RENDERER.parse(np.array(ids, np.int32))
    assert (action.text, bool(action.malformed)) == (text, malformed)


@pytest.mark.parametrize("vocabulary", [(), ("two words",), ("<end>",), ("",)])
def test_a_vocabulary_that_cannot_work_is_refused(vocabulary: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError):
        WordsRenderer.from_vocabulary(vocabulary)


def test_tools_and_images_are_refused_not_ignored() -> None:
    with pytest.raises(ConfigurationError, match="tools"):
        RENDERER.begin(Observation.text("go"), [{"name": "search"}])
    with pytest.raises(ConfigurationError, match="ImageHandle"):
        RENDERER.extend(Observation((ImageHandle("00", 1, 1),)))


def test_lengths_take_no_memory_and_count_exactly() -> None:
    renderer = LengthsRenderer()
    ids = renderer.begin(Observation((TokenCount(70_000), TokenCount(30_000))))
    assert (ids.shape, ids.dtype, ids.strides) == ((100_000,), np.int32, (0,))
    assert renderer.extend(Observation((TokenCount(0),))).shape == (0,)
    assert renderer.action_ids("turn left").shape == (3,)
    assert (renderer.parse(ids).text, renderer.parse(ids).malformed) == ("", "")


def test_lengths_refuse_text() -> None:
    with pytest.raises(ConfigurationError):
        LengthsRenderer().begin(Observation.text("hello"))
