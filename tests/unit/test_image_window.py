"""The window of images, against a record that is kept token by token: contexts, forks, and what the trainer sees."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.data.forks import Fork, branches, remaining
from tiderl.data.records import Prompt, Sequence, TaskKey, Trajectory, TurnSpan
from tiderl.data.turns import TurnResult
from tiderl.data.window import ImageWindow, WindowedContext
from tiderl.runtime.buffer import Group, Member
from tiderl.runtime.record import TokenRecord
from tiderl.trainers.rows import shared_rows
from tiderl.trainers.targets import useful_members

KEY = TaskKey("train", 0, 0)


@dataclass
class Token:
    """One token of the slow record. Its number is its id: no two are alike."""

    number: int
    image: int = -1  # of which image; -1: of none
    sampled: bool = False
    there: bool = True


@dataclass
class Slow:
    """A task under a window, one token at a time, by what the rule says in words."""

    window: ImageWindow | None
    tokens: list[Token] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    contexts: list[list[int]] = field(default_factory=list)
    """What each turn was asked with."""
    said: list[list[int]] = field(default_factory=list)
    rewrites: list[int] = field(default_factory=list)

    def context(self) -> list[int]:
        return [token.number for token in self.tokens if token.there]

    def observe(self, parts: list[tuple[int, bool]]) -> None:
        """`parts`: tokens, and whether they are an image."""
        before, coming = self.context(), sum(is_image for _, is_image in parts)
        if self.window is not None:
            while self.images and len(self.images) + coming > self.window.images:
                for image in self.images[: self.window.drop]:
                    for token in self.tokens:
                        token.there = token.there and token.image != image
                del self.images[: self.window.drop]
        after = self.context()
        if after != before:
            same = 0
            while same < len(after) and after[same] == before[same]:
                same += 1
            self.rewrites.append(same)
        for count, is_image in parts:
            image = -1
            if is_image:
                image = self.tokens[-1].number + 1 if self.tokens else 0
                self.images.append(image)
            self.tokens += [Token(len(self.tokens) + at, image) for at in range(count)]

    def say(self, count: int) -> None:
        self.contexts.append(self.context())
        self.said.append([len(self.tokens) + at for at in range(count)])
        self.tokens += [Token(len(self.tokens) + at, sampled=True) for at in range(count)]


Parts = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=3)
Windows = st.integers(1, 6).flatmap(lambda images: st.builds(ImageWindow, st.just(images), st.integers(1, images)))
Plays = st.tuples(
    st.none() | Windows,
    Parts,  # the first observation
    st.lists(st.tuples(st.integers(1, 4), Parts), max_size=14),  # what is said, and what is observed then
    st.integers(1, 4),  # the last word
)


def spans(parts: list[tuple[int, bool]]) -> list[tuple[int, int]]:
    found, start = [], 0
    for count, is_image in parts:
        if is_image:
            found.append((start, start + count))
        start += count
    return found


def result(turn: int, ids: list[int]) -> TurnResult:
    count = len(ids)
    return TurnResult(
        KEY,
        turn,
        np.array(ids, np.int32),
        -np.arange(1.0, count + 1, dtype=np.float32),
        np.full(count, turn, np.int32),
        "stop",
    )


def play(window: ImageWindow | None, first: list, turns: list, last: int) -> tuple[Slow, TokenRecord, list[TurnSpan]]:
    """Both records, and the turns of a trajectory; the fast one is compared at every step."""
    slow, record, found = Slow(window), TokenRecord(window), []

    def observe(parts: list[tuple[int, bool]]) -> None:
        ids = np.arange(record.length, record.length + sum(count for count, _ in parts), dtype=np.int32)
        expected = record.context_tokens_with(ids, spans(parts))
        record.append_context(ids, spans(parts))
        slow.observe(parts)
        assert record.context_tokens == expected == len(slow.context())
        assert record.context().tolist() == slow.context()
        assert record.rewrites == tuple(slow.rewrites)

    def say(count: int) -> None:
        start = record.length
        slow.say(count)
        record.append_sampled(result(len(slow.said) - 1, slow.said[-1]))
        found.append(TurnSpan(start, record.length, 0.0, "", "stop"))
        assert record.context().tolist() == slow.contexts[-1] + slow.said[-1]

    observe(first)
    for count, parts in turns:
        say(count)
        observe(parts)
    say(last)
    return slow, record, found


def trajectory(record: TokenRecord, turns: list[TurnSpan]) -> Trajectory:
    loss_mask, logprobs, versions = record.columns()
    return Trajectory(
        7, KEY, record.joined(), loss_mask, logprobs, versions, tuple(turns), 1.0, True, "terminated", (), record.forks
    )


def sequences(of: Trajectory) -> list[Sequence]:
    return Group(0, Prompt("p"), 0, 0, [Member(0, of.id, trajectory=of)]).sequences()


def context_of(sequence: Sequence, position: int) -> list[int]:
    return sequence.ids[:position].tolist()


@given(Plays)
def test_context_forks_and_sequences_are_those_of_a_record_kept_token_by_token(play_of: tuple) -> None:
    slow, record, turns = play(*play_of)
    found = trajectory(record, turns)
    seen = {
        said: context + saying[:at]
        for context, saying in zip(slow.contexts, slow.said, strict=True)
        for at, said in enumerate(saying)
    }
    bearing = [
        (int(sequence.ids[at]), sequence, int(at))
        for sequence in sequences(found)
        for at in np.flatnonzero(sequence.loss_mask)
    ]
    assert [said for said, _, _ in bearing] == list(seen), "each sampled token bears loss once, in order"
    for said, sequence, at in bearing:
        assert context_of(sequence, at) == seen[said], "behind the context that the policy saw"
        where = np.flatnonzero(found.ids == said)[0]
        assert sequence.logprobs[at] == found.logprobs[where]
        assert sequence.versions[at] == found.versions[where]
    for sequence in sequences(found):
        assert not sequence.logprobs[~sequence.loss_mask].any()
        assert (sequence.versions[~sequence.loss_mask] == -1).all()
        assert sequence.loss_mask[-1], "nothing is computed that predicts nothing"
    assert found.trained_tokens == sum(sequence.tokens for sequence in sequences(found))
    assert found.loss_tokens == sum(map(len, slow.said)) == len(bearing)
    assert len(found.forks) == len(slow.rewrites) == len(sequences(found)) - 1


@given(Plays)
def test_no_more_images_stay_than_the_window_has_and_prefixes_are_of_both_contexts(play_of: tuple) -> None:
    window, first, turns, _ = play_of
    context = WindowedContext(window)
    context.observe(sum(count for count, _ in first), spans(first))
    for count, parts in turns:
        context.say(count)
        before, forks = context.tokens, len(context.forks)
        context.observe(sum(count for count, _ in parts), spans(parts))
        if window is not None:
            assert context.images <= max(window.images, len(spans(parts)))
        else:
            assert context.forks == [] and context.tokens == context.record_tokens
        if len(context.forks) > forks:
            assert context.rewrites[-1] < min(before, context.tokens)
    assert list(context.rewrites) == sorted(context.rewrites), "what left once leaves nothing before it"


@given(Plays)
def test_a_trainer_s_rows_compute_each_sampled_token_behind_the_context_that_it_had(play_of: tuple) -> None:
    slow, record, turns = play(*play_of)
    found = sequences(trajectory(record, turns))
    seen = {
        said: context + saying[:at]
        for context, saying in zip(slow.contexts, slow.said, strict=True)
        for at, said in enumerate(saying)
    }
    computed = []
    for row in shared_rows(useful_members(found), max_row_tokens=10_000):
        paths = {int(path[at]): path[: at + 1] for path in row.paths for at in range(len(path))}
        for target, index in zip(row.targets.ids, row.targets.predicted_by, strict=True):
            predictor = int(row.targets.predictors[index])
            computed.append((int(target), row.ids[paths[predictor]].tolist()))
    assert sorted(computed) == sorted(seen.items())


@pytest.mark.parametrize(
    ("window", "kept", "coming", "leaving"),
    [
        (ImageWindow(5), 4, 1, 0),
        (ImageWindow(5), 5, 1, 1),
        (ImageWindow(5, 3), 5, 1, 3),
        (ImageWindow(5, 5), 5, 1, 5),
        (ImageWindow(5, 2), 5, 3, 4),  # three places are wanted: two times two leave
        (ImageWindow(5, 4), 5, 5, 5),  # no more than there are
        (ImageWindow(2), 2, 3, 2),  # an observation stays whole
        (ImageWindow(1), 0, 1, 0),
    ],
)
def test_images_leave_in_multiples_of_the_drop(window: ImageWindow, kept: int, coming: int, leaving: int) -> None:
    assert window.leaving(kept, coming) == leaving


def screens(window: ImageWindow | None, turns: int) -> WindowedContext:
    """A prompt of 100, then 10 said and a screenshot of 50, over and over."""
    context = WindowedContext(window)
    context.observe(100)
    for _ in range(turns):
        context.say(10)
        context.observe(50, ((0, 50),))
    return context


def test_with_a_drop_of_one_every_turn_past_the_window_is_a_sequence_of_its_own() -> None:
    context = screens(ImageWindow(2), 5)
    # The third screenshot makes the first one leave: prompt and first action stay before it.
    assert context.rewrites == (110, 120, 130)
    assert context.tokens == 100 + 5 * 10 + 2 * 50
    assert context.forks == [
        Fork(100 + 2 * 60 + 10, ((110, 160),)),
        Fork(100 + 3 * 60 + 10, ((170, 220),)),
        Fork(100 + 4 * 60 + 10, ((230, 280),)),
    ]


def test_with_a_larger_drop_the_window_shrinks_and_grows_again() -> None:
    context = WindowedContext(ImageWindow(3, 2))
    context.observe(100)
    kept = []
    for _ in range(8):
        context.say(10)
        context.observe(50, ((0, 50),))
        kept.append(context.images)
    assert kept == [1, 2, 3, 2, 3, 2, 3, 2]
    assert context.rewrites == (110, 130, 150), "two actions further each time"


def test_branches_end_where_the_next_fork_is() -> None:
    forks = (Fork(10, ((2, 5),)), Fork(20, ((5, 6), (12, 15))))
    first, second, third = branches(forks, 30)
    assert (first.spans, first.since, first.context_tokens, first.tokens) == (((0, 10),), 0, 0, 10)
    assert (second.spans, second.since, second.context_tokens) == (((0, 2), (5, 20)), 10, 7)
    assert third.spans == ((0, 2), (6, 12), (15, 30))
    assert (third.since, third.context_tokens, third.tokens) == (20, 13, 23)
    assert third.of(np.arange(30)).tolist() == [0, 1, *range(6, 12), *range(15, 30)]
    assert remaining([], 3) == ((0, 3),) and remaining([(0, 3)], 3) == ()


def test_a_trajectory_without_forks_is_one_sequence_of_its_very_columns() -> None:
    _, record, turns = play(None, [(3, True)], [(2, [(4, True)])], 1)
    found = trajectory(record, turns)
    (only,) = sequences(found)
    assert found.forks == () and found.trained_tokens == found.tokens == 10
    assert only.ids.tolist() == found.ids.tolist()
    assert np.shares_memory(only.loss_mask, found.loss_mask)
