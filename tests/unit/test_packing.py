from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_cases import alike_group, random_group, sequence

from tiderl.data.errors import InvariantViolation
from tiderl.trainers.packing import pack
from tiderl.trainers.padding import Chunk, padded_chunks
from tiderl.trainers.rows import Row, shared_rows
from tiderl.trainers.targets import loss_values, useful_members

PAD = 0


def rows(max_row_tokens=10_000):
    return partial(shared_rows, max_row_tokens=max_row_tokens)


def padded(max_chunk_tokens=10_000, **options):
    return partial(padded_chunks, pad_id=PAD, max_chunk_tokens=max_chunk_tokens, **options)


def prefixes(call):
    """Of each computed token of a call: the ids that it may attend to, itself included."""
    if isinstance(call, Chunk):
        return [row[: column + 1].tolist() for row in call.ids for column in range(len(row))]
    found = {}
    for path, own in zip(call.paths, call.own_tokens, strict=True):
        for position in range(len(path) - own, len(path)):
            found[int(path[position])] = call.ids[path[: position + 1]].tolist()
            assert call.positions[path[position]] == position
    return [found[token] for token in range(call.computed_tokens)]


def predicted(packed):
    """For each loss-bearing token in flat order: what it is predicted from, and the token."""
    found = []
    for call in packed.calls:
        seen = prefixes(call)
        targets = call.targets
        found += [
            (seen[targets.predictors[row]], int(token))
            for row, token in zip(targets.predicted_by, targets.ids, strict=True)
        ]
    return [found[place] for place in packed.order]


def expected(sequences):
    """The slow way: walk over every token."""
    return [
        (s.ids[:position].tolist(), int(s.ids[position]))
        for s in sequences
        for position in range(len(s.ids))
        if s.loss_mask[position]
    ]


@given(
    seed=st.integers(0, 10_000),
    groups=st.integers(1, 4),
    max_tokens=st.sampled_from([8, 40, 100, 10_000]),
    layout=st.sampled_from([rows, padded]),
    group=st.sampled_from([random_group, alike_group]),
)
def test_every_loss_token_is_predicted_from_exactly_its_own_prefix(seed, groups, max_tokens, layout, group):
    sequences = [s for g in range(groups) for s in group(g, seed + g)]
    packed = pack(sequences, layout(max_tokens))
    assert predicted(packed) == expected(sequences)
    assert packed.lengths.tolist() == [int(s.loss_mask.sum()) for s in sequences]
    assert packed.tokens == sum(s.tokens for s in sequences)
    for call in packed.calls:
        several = len(call.ids if isinstance(call, Chunk) else call.paths) > 1
        assert call.computed_tokens <= max_tokens or not several
        assert (np.diff(call.targets.predicted_by) >= 0).all()


@given(seed=st.integers(0, 10_000), groups=st.integers(1, 4))
def test_a_row_computes_each_beginning_once_and_nothing_else(seed, groups):
    sequences = [s for g in range(groups) for s in alike_group(g, seed + g)]
    (row,) = pack(sequences, rows()).calls
    useful = [s.ids[: np.flatnonzero(s.loss_mask)[-1]].tolist() for s in sequences]
    beginnings = {tuple(ids[: n + 1]) for ids in useful for n in range(len(ids))}
    assert sorted(map(tuple, prefixes(row))) == sorted(beginnings)


def test_the_example_of_the_rows_by_hand():
    a, b, c, d, e, x = range(1, 7)
    (row,) = pack([sequence([a, b, d, e, x], [4]), sequence([a, b, c, x], [3])], rows()).calls
    assert isinstance(row, Row)
    assert row.ids.tolist() == [a, b, c, d, e]
    assert row.positions.tolist() == [0, 1, 2, 2, 3]
    assert [path.tolist() for path in row.paths] == [[0, 1, 2], [0, 1, 3, 4]]
    assert row.own_tokens.tolist() == [3, 2]
    assert row.targets.predictors.tolist() == [2, 4]
    assert row.targets.places.tolist() == [1, 0]  # sorted by ids, the second sequence comes first


def test_sequences_that_part_at_a_loss_token_share_what_predicts_it():
    (row,) = pack([sequence([4, 5], [1]), sequence([4, 6], [1]), sequence([4, 5], [1])], rows()).calls
    assert row.ids.tolist() == [4]
    assert row.targets.predicted_by.tolist() == [0, 0, 0]
    assert sorted(zip(row.targets.places.tolist(), row.targets.ids.tolist(), strict=True)) == [(0, 5), (1, 6), (2, 5)]


def test_a_row_holds_its_budget_counted_before_sharing():
    alike = [sequence([4, 5, 6, 7], [3])] * 5  # three useful tokens each
    assert [row.computed_tokens for row in pack(alike, rows(8)).calls] == [3, 3, 3]
    assert [row.computed_tokens for row in pack(alike, rows(2)).calls] == [3] * 5  # a longer one is alone


def test_a_chunk_is_as_wide_as_its_longest_row_and_padded_on_the_right():
    packed = pack([sequence([4, 5, 1], [2]), sequence([6, 7, 4, 1], [3])], padded(100))
    assert [chunk.ids.tolist() for chunk in packed.calls] == [[[6, 7, 4], [4, 5, PAD]]]
    assert (packed.computed_tokens, packed.padding_tokens) == (6, 1)
    assert packed.positions.tolist() == [2, 6]  # third of the first three tokens, fourth of the next four


def test_short_rows_leave_a_chunk_of_long_ones_only_when_that_chunk_is_worth_a_call():
    def shapes(sequences, **options):
        return [chunk.ids.shape for chunk in pack(sequences, padded(4096, **options)).calls]

    long, short = sequence([4] * 129, [128]), sequence([4] * 17, [16])
    assert shapes([short, long, short]) == [(3, 128)]
    assert shapes([short, *[long] * 4, short]) == [(4, 128), (2, 16)]
    assert shapes([short, *[long] * 4, short], shortest_fraction=0.0) == [(6, 128)]


def test_values_come_in_flat_order():
    sequences = [sequence([4, 5, 6], [1, 2], [-0.5, -0.25]), sequence([4, 5], [1], -1.0, version=7)]
    assert loss_values(sequences, "logprobs", np.float32).tolist() == [-0.5, -0.25, -1.0]
    assert loss_values(sequences, "versions", np.int64).tolist() == [0, 0, 7]


@pytest.mark.parametrize("layout", [rows, padded])
def test_sequences_without_loss_or_without_tokens_are_harmless(layout):
    packed = pack([sequence([4, 5], []), sequence([], []), sequence([4, 5], [1])], layout())
    assert predicted(packed) == [([4], 5)]
    assert packed.lengths.tolist() == [0, 0, 1]
    assert pack([], layout()).loss_tokens == 0


def test_a_first_token_that_bears_loss_is_refused():
    with pytest.raises(InvariantViolation, match="first token"):
        useful_members([sequence([4, 5], [0], trajectory_id=9)])
