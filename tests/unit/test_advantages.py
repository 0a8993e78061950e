import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_cases import sequence

from tiderl.data.errors import InvariantViolation, NumericalFault
from tiderl.data.records import Sequence as TrainSequence
from tiderl.trainers.advantages import advantages, is_uninformative, sequence_advantage

NAMES = ("group", "leave_one_out")


def test_group_advantage_by_hand():
    # mean 1, deviations -1 -1 0 2, variance (1 + 1 + 0 + 4) / 4 = 1.5
    scale = np.sqrt(1.5) + 1e-4
    assert advantages("group", np.array([0.0, 0.0, 1.0, 3.0])) == pytest.approx(np.array([-1, -1, 0, 2]) / scale)


def test_leave_one_out_advantage_by_hand():
    # others' means: (0+1+3)/3, (0+1+3)/3, (0+0+3)/3, (0+0+1)/3
    expected = [0 - 4 / 3, 0 - 4 / 3, 1 - 1, 3 - 1 / 3]
    assert advantages("leave_one_out", np.array([0.0, 0.0, 1.0, 3.0])) == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_exactly_zero(name):
    # the mean of three times 0.1 is not 0.1 in floating point
    for rewards in ([0.1] * 3, [0.7] * 7, [0.0] * 8, [5.0]):
        assert advantages(name, np.array(rewards)).tolist() == [0.0] * len(rewards)
        assert is_uninformative(np.array(rewards))


@pytest.mark.parametrize("name", NAMES)
@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16))
def test_advantages_are_finite_and_sum_to_zero(name, rewards):
    values = advantages(name, np.array(rewards))
    assert np.isfinite(values.astype(np.float32)).all()
    assert abs(values.sum()) <= 1e-6 * (1 + np.abs(values).sum()) + 1e-9 * np.abs(rewards).max() * len(rewards)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_reward_never_becomes_an_advantage(name, bad):
    with pytest.raises(InvariantViolation, match="non-finite"):
        advantages(name, np.array([1.0, bad, 0.0]))


@pytest.mark.parametrize("name", NAMES)
def test_rewards_too_large_to_compare_are_a_typed_fault(name):
    with pytest.raises(NumericalFault, match="too large to compare"):
        advantages(name, np.array([1.7e308, -1.7e308]))


def test_a_member_is_found_by_its_number():
    member_1 = sequence([4, 5], [1], rewards=(0.0, 0.0, 1.0, 3.0), member=2)
    assert sequence_advantage("leave_one_out", member_1) == 0.0


@pytest.mark.parametrize("member", [1, -1, 2])
def test_a_group_that_does_not_hold_the_members_reward_is_refused(member):
    right = sequence([4, 5], [1], rewards=(1.0, 0.0), member=0)
    fields = {name: getattr(right, name) for name in TrainSequence.__struct_fields__}
    with pytest.raises(InvariantViolation, match="do not hold"):
        sequence_advantage("group", TrainSequence(**fields | {"member": member}))
