import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_cases import random_group, sequence

from tiderl.data.errors import InvariantViolation
from tiderl.trainers.packing import loss_values, pack

PAD = 0


def predicted(packed):
    """For each loss-bearing token in flat order: the row's ids up to the predicting column, and the target."""
    found = []
    for chunk in packed.chunks:
        for row, column, target in zip(chunk.rows, chunk.columns, chunk.targets, strict=True):
            found.append((chunk.ids[row, : column + 1].tolist(), int(target)))
    return [found[place] for place in packed.order]


def expected(sequences):
    """The slow way: walk over every token."""
    return [
        (s.ids[:position].tolist(), int(s.ids[position]))
        for s in sequences
        for position in range(len(s.ids))
        if s.loss_mask[position]
    ]


@given(seed=st.integers(0, 10_000), groups=st.integers(1, 4), max_chunk_tokens=st.sampled_from([8, 40, 100, 10_000]))
def test_every_loss_token_is_predicted_from_exactly_its_own_prefix(seed, groups, max_chunk_tokens):
    sequences = [s for g in range(groups) for s in random_group(g, seed + g)]
    packed = pack(sequences, PAD, max_chunk_tokens)
    assert predicted(packed) == expected(sequences)
    assert packed.lengths.tolist() == [int(s.loss_mask.sum()) for s in sequences]
    assert packed.tokens == sum(s.tokens for s in sequences)
    for chunk in packed.chunks:
        assert chunk.ids.size <= max_chunk_tokens or len(chunk.ids) == 1


def test_a_chunk_is_as_wide_as_its_longest_row_and_padded_on_the_right():
    packed = pack([sequence([4, 5], [1]), sequence([6, 7, 4], [2])], PAD, 100)
    assert [chunk.ids.tolist() for chunk in packed.chunks] == [[[6, 7, 4], [4, 5, PAD]]]
    assert packed.padded_tokens == 6
    assert packed.positions.tolist() == [1, 4]  # second of the first two tokens, third of the next three


def test_short_rows_leave_a_chunk_of_long_ones_only_when_that_chunk_is_worth_a_call():
    long, short = sequence([4] * 128, [1]), sequence([4] * 16, [1])
    assert [c.ids.shape for c in pack([short, long, short], PAD, 4096).chunks] == [(3, 128)]
    assert [c.ids.shape for c in pack([short, *[long] * 4, short], PAD, 4096).chunks] == [(4, 128), (2, 16)]


def test_values_come_in_flat_order():
    sequences = [sequence([4, 5, 6], [1, 2], [-0.5, -0.25]), sequence([4, 5], [1], -1.0, version=7)]
    assert loss_values(sequences, "logprobs", np.float32).tolist() == [-0.5, -0.25, -1.0]
    assert loss_values(sequences, "versions", np.int64).tolist() == [0, 0, 7]


def test_sequences_without_loss_or_without_tokens_are_harmless():
    packed = pack([sequence([4, 5], []), sequence([], []), sequence([4, 5], [1])], PAD, 100)
    assert predicted(packed) == [([4], 5)]
    assert packed.lengths.tolist() == [0, 0, 1]
    assert pack([], PAD, 100).loss_tokens == 0


def test_a_first_token_that_bears_loss_is_refused():
    with pytest.raises(InvariantViolation, match="first token"):
        pack([sequence([4, 5], [0], trajectory_id=9)], PAD, 100)
