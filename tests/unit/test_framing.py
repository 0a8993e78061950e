"""A frame gives back exactly what went in, whatever the pieces it arrives in; what is damaged is a typed fault."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tiderl.data.errors import InfrastructureFault
from tiderl.data.records import MicroBatch, Observation, Sequence, Step, TokenCount
from tiderl.wire.framing import ErrorText, FrameReader, Message, pack

DTYPES = st.sampled_from(["bool", "int8", "int32", "int64", "uint16", "float16", "float32", "float64", ">i4"])
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


class Box(msgspec.Struct):
    """A record with arrays in every place where one may be."""

    one: np.ndarray
    maybe: np.ndarray | None
    many: tuple[np.ndarray, ...]
    named: dict[str, np.ndarray]


def receive(frames: bytes, piece_bytes: int = 1 << 20, limit_bytes: int = 1 << 28) -> list[Message]:
    reader = FrameReader(limit_bytes)
    found: list[Message] = []
    for start in range(0, len(frames), piece_bytes):
        found.extend(reader.feed(frames[start : start + piece_bytes]))
    assert not reader.torn
    return found


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(ARRAYS, min_size=1, max_size=5), st.integers(1, 64))
def test_arrays_come_back_equal_in_any_pieces(arrays: list[np.ndarray], piece_bytes: int) -> None:
    box = Box(arrays[0], arrays[-1], tuple(arrays), {str(i): array for i, array in enumerate(arrays)})
    frames = bytes(pack(1, "first", box)) + bytes(pack(2, "", None))
    first, second = receive(frames, piece_bytes)
    found = first.payload(Box)
    assert (first.id, first.method, second.id, second.method) == (1, "first", 2, "")
    assert same(found.one, arrays[0]) and found.maybe is not None and same(found.maybe, arrays[-1])
    assert all(same(left, right) for left, right in zip(found.many, arrays, strict=True))
    assert all(same(found.named[str(i)], array) for i, array in enumerate(arrays))


@settings(max_examples=40, deadline=None)
@given(hnp.arrays("int32", (6, 7)), st.integers(1, 3), st.integers(-3, -1))
def test_arrays_that_are_not_contiguous_come_back_equal(array: np.ndarray, up: int, down: int) -> None:
    for view in (array[::up, ::down], array.T, np.broadcast_to(array[0], (4, 7)), array[:, :0]):
        (message,) = receive(bytes(pack(1, "x", view)))
        found = message.payload(np.ndarray)
        assert same(found, np.ascontiguousarray(view).reshape(view.shape))


def test_received_arrays_are_writable() -> None:
    (message,) = receive(bytes(pack(1, "x", np.zeros(3))))
    message.payload(np.ndarray)[0] = 1.0


def test_records_of_the_run_come_back() -> None:
    sequence = Sequence(
        trajectory_id=3,
        prompt_id=1,
        member=2,
        ids=np.arange(5, dtype=np.int32),
        loss_mask=np.array([False, True] * 5)[::2],
        logprobs=np.zeros(5, np.float32),
        versions=np.full(5, -1, np.int32),
        reward=0.5,
        group_rewards=np.array([0.5, 1.0]),
    )
    (message,) = receive(bytes(pack(7, "forward", MicroBatch(1, 0, 2, (sequence, sequence)))))
    found = message.payload(MicroBatch)
    assert (found.update, found.part, found.index, len(found.sequences)) == (1, 0, 2, 2)
    assert same(found.sequences[1].loss_mask, np.zeros(5, bool))
    assert same(found.sequences[1].group_rewards, sequence.group_rewards)


def test_numbers_of_numpy_become_plain_numbers() -> None:
    step = Step(Observation(("text", TokenCount(3))), reward=np.float64(0.25), info={"n": np.int64(3)})
    (message,) = receive(bytes(pack(1, "step", step)))
    assert message.payload(Step) == Step(Observation(("text", TokenCount(3))), 0.25, info={"n": 3})


def test_errors_travel_in_the_header() -> None:
    error = ErrorText("RankLost", "gone", "rank 1", "")
    (message,) = receive(bytes(pack(4, "", error=error)))
    assert message.error == error and message.payload(None) is None


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.zeros(2, dtype=[("a", "i4")]), {1, 2}.__iter__(), 1 << 70], ids=str
)
def test_what_cannot_be_sent_is_a_fault(value: object) -> None:
    with pytest.raises(InfrastructureFault, match="cannot be sent"):
        pack(1, "x", value)


def test_frames_over_the_limit_are_refused_at_both_ends() -> None:
    with pytest.raises(InfrastructureFault, match="over the limit"):
        pack(1, "x", np.zeros(1000), limit_bytes=4000)
    with pytest.raises(InfrastructureFault, match="over the limit"):
        receive(bytes(pack(1, "x", np.zeros(1000))), limit_bytes=4000)


def test_bytes_that_are_no_frame_are_a_fault() -> None:
    with pytest.raises(InfrastructureFault, match="no frame"):
        receive(b"Traceback (most recent call last)")


def test_torn_frame_is_noticed() -> None:
    frame = bytes(pack(1, "x", np.zeros(10)))
    for end in (1, 15, 17, len(frame) - 1):
        reader = FrameReader()
        assert list(reader.feed(frame[:end])) == []
        assert reader.torn


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 255))
def test_damaged_frame_is_a_fault_or_a_message_but_never_a_crash(where: int, value: int) -> None:
    frame = pack(1, "x", Box(np.arange(4), None, (), {}))
    frame[where % len(frame)] = value
    try:
        for message in FrameReader().feed(bytes(frame)):
            message.payload(Box)
    except InfrastructureFault:
        pass


def test_array_that_reaches_past_its_frame_is_a_fault() -> None:
    class Place(msgspec.Struct, array_like=True):
        offset: int
        dtype: str
        shape: tuple[int, ...]

    for place in (Place(0, "<i4", (4,)), Place(-4, "<i4", (1,)), Place(0, "<i4", (-1,)), Place(0, "|O", (1,))):
        (message,) = receive(bytes(pack(1, "x", place)))
        with pytest.raises(InfrastructureFault, match="damaged"):
            message.payload(np.ndarray)


def test_payload_of_another_type_is_a_fault() -> None:
    (message,) = receive(bytes(pack(1, "x", "text")))
    with pytest.raises(InfrastructureFault, match="damaged"):
        message.payload(MicroBatch)
