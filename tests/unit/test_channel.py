"""The two ends of a channel: answers find their requests, errors keep their class, a close fails what is pending."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tiderl.data.errors import (
    ChannelTimeout,
    EnvironmentRaised,
    InfrastructureFault,
    MissingExtraError,
    NumericalFault,
    RankLost,
    TideError,
)
from tiderl.wire.channel import Channel, Connection
from tiderl.wire.faults import error_for_reason
from tiderl.wire.framing import FrameReader, Message, pack


async def with_peer(
    serve: Callable[[Channel, Message], None], talk: Callable[[Connection], object], unasked: list[int] | None = None
) -> None:
    """Run `talk` over a connection whose other end hands every message to `serve` in a thread."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)

    def work() -> None:
        try:
            while (message := channel.receive()) is not None:
                serve(channel, message)
        except InfrastructureFault:
            channel.close()

    worker = threading.Thread(target=work)
    worker.start()
    take = None if unasked is None else lambda message: unasked.append(message.payload(int))
    connection = await Connection.open(ours, "rank 3", lost=RankLost, on_message=take)
    try:
        await talk(connection)  # type: ignore[misc]
    finally:
        await connection.close()
        worker.join(5)
        assert not worker.is_alive()


def test_answers_find_their_requests_in_any_order() -> None:
    held: list[Message] = []

    def serve(channel: Channel, message: Message) -> None:
        held.append(message)
        if len(held) == 3:
            for request in reversed(held):
                channel.notify("progress", request.payload(int))
                channel.reply(request, request.payload(int) * 10)

    async def talk(connection: Connection) -> None:
        found = await asyncio.gather(*(connection.request("times_ten", n, int, 5) for n in (1, 2, 3)))
        assert found == [10, 20, 30]
        assert unasked == [3, 2, 1]

    unasked: list[int] = []
    asyncio.run(with_peer(serve, talk, unasked))


ERRORS: list[BaseException] = [
    NumericalFault("logits are not finite", where="turn 3", hint="look"),
    EnvironmentRaised("boom", where="mine.py"),
    MissingExtraError("torch", "train", where="here"),
    MissingExtraError("vllm", "vllm-cpu", where="here", steps="see there"),
    TideError("something"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_ours_arrive_as_the_same_class(error: TideError) -> None:
    async def talk(connection: Connection) -> None:
        with pytest.raises(TideError) as caught:
            await connection.request("x", None, None, 5)
        found = caught.value
        assert type(found) is type(error)
        assert (found.what, found.where, found.hint) == (error.what, error.where or "rank 3", error.hint)

    asyncio.run(with_peer(lambda channel, message: channel.reply_error(message, error), talk))


def test_an_error_that_ends_a_run_says_what_to_do_also_without_a_hint_of_its_own() -> None:
    turn = error_for_reason("numerical", "logits are not finite", "turn 3")
    lines = str(turn).splitlines()
    assert lines[0] == "turn 3: logits are not finite" and "lower train.lr" in lines[1] and len(lines) == 2
    assert str(NumericalFault("x", hint="look")) == "x\n  look"
    assert "can be resumed" in str(ChannelTimeout("no answer to backward within 3600 s", where="rank 1"))


def test_unknown_exception_arrives_with_type_and_last_line() -> None:
    def serve(channel: Channel, message: Message) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            channel.reply_error(message, error)

    async def talk(connection: Connection) -> None:
        with pytest.raises(
            InfrastructureFault, match=r"KeyError: 'missing' at .*test_channel\.py:\d+: \{\}\["
        ) as caught:
            await connection.request("x", None, None, 5)
        assert type(caught.value) is InfrastructureFault

    asyncio.run(with_peer(serve, talk))


def test_request_without_answer_times_out_and_the_connection_lives_on() -> None:
    def serve(channel: Channel, message: Message) -> None:
        if message.method == "loud":
            channel.reply(message, 1)

    async def talk(connection: Connection) -> None:
        with pytest.raises(ChannelTimeout, match="no answer to quiet"):
            await connection.request("quiet", None, int, 0.05)
        assert await connection.request("loud", None, int, 5) == 1

    asyncio.run(with_peer(serve, talk))


def test_close_fails_what_is_pending_and_all_that_follows() -> None:
    async def talk(connection: Connection) -> None:
        pending = [asyncio.ensure_future(connection.request("x", None, int)) for _ in range(2)]
        await asyncio.sleep(0)
        await connection.close()
        await connection.close()
        for request in pending:
            with pytest.raises(RankLost):
                await request
        with pytest.raises(RankLost):
            connection.notify("x")
        assert await connection.closed() == "closed by us"

    asyncio.run(with_peer(lambda channel, message: None, talk))


def test_peer_that_dies_in_the_middle_of_a_frame_is_noticed() -> None:
    async def check() -> None:
        ours, theirs = socket.socketpair()
        connection = await Connection.open(ours, "rank 0", lost=RankLost)
        request = asyncio.ensure_future(connection.request("x", None, int))
        await asyncio.to_thread(theirs.recv, 1 << 16)
        theirs.sendall(pack(1, "", 5)[:-1])
        theirs.close()
        with pytest.raises(RankLost, match="middle of a frame"):
            await request

    asyncio.run(check())


def test_peer_that_talks_nonsense_is_closed() -> None:
    async def check() -> None:
        ours, theirs = socket.socketpair()
        connection = await Connection.open(ours, "rank 0", lost=RankLost)
        theirs.sendall(b"Segmentation fault (core dumped)")
        assert "no frame" in await connection.closed()
        theirs.close()

    asyncio.run(check())


def test_blocking_end_notices_a_close_and_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    assert channel.receive(0) is None
    assert channel.receive(0.01) is None
    ours.sendall(pack(1, "x", 5) + pack(2, "y", 6)[:-2])
    message = channel.receive()
    assert message is not None and message.payload(int) == 5
    ours.close()
    with pytest.raises(InfrastructureFault, match="middle of a frame"):
        channel.receive()
    with pytest.raises(InfrastructureFault):
        channel.notify("x")
    channel.close()


def numbers_in(reader: FrameReader, data: bytes) -> list[int]:
    return [message.payload(int) for message in reader.feed(data)]


def test_what_is_gathered_goes_as_one_piece_in_order() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel = Channel(theirs)
    with channel.gathered():
        for number in range(3):
            channel.notify("x", number)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
    assert numbers_in(FrameReader(), ours.recv(1 << 16)) == [0, 1, 2]
    channel.notify("x", 3)
    assert numbers_in(FrameReader(), ours.recv(1 << 16)) == [3]
    assert channel.sent_bytes == sum(len(pack(0, "x", number)) for number in range(4))
    channel.close()
    ours.close()


def test_a_thread_does_not_wait_for_another_that_sends() -> None:
    """The peer does not read, so the first one is stuck with its large frame: the others leave theirs to it."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    stuck = threading.Thread(target=lambda: channel.notify("x", np.zeros(1 << 22, np.uint8)))
    stuck.start()
    while not channel._writing.locked():
        time.sleep(0.001)
    for number in range(3):
        channel.notify("y", number)  # returns
    assert stuck.is_alive()
    reader, found = FrameReader(), []
    while len(found) < 4:
        found += [message.method for message in reader.feed(ours.recv(1 << 18))]
    stuck.join(5)
    assert found == ["x", "y", "y", "y"]
    channel.close()
    ours.close()


def test_frames_of_many_threads_arrive_whole_and_each_thread_s_in_order() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)

    def say(number: int) -> None:
        for offset in range(200):
            channel.notify("x", 1000 * number + offset)

    threads = [threading.Thread(target=say, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    reader, found = FrameReader(), []
    while len(found) < 1600:
        found += numbers_in(reader, ours.recv(1 << 16))
    for number in range(8):
        assert [n % 1000 for n in found if n // 1000 == number] == list(range(200))
    channel.close()
    ours.close()


def test_what_tasks_say_in_one_turn_of_the_loop_goes_as_one_piece() -> None:
    async def check() -> None:
        ours, theirs = socket.socketpair()
        connection = await Connection.open(ours, "rank 0")
        requests = [asyncio.ensure_future(connection.request("x", number, int)) for number in range(3)]
        received = await asyncio.to_thread(theirs.recv, 1 << 16)
        assert numbers_in(FrameReader(), received) == [0, 1, 2]
        for number in range(3):
            theirs.sendall(pack(number + 1, "", 10 * number))
        assert await asyncio.gather(*requests) == [0, 10, 20]
        await connection.close()
        theirs.close()

    asyncio.run(check())


def test_reason_names_its_own_class() -> None:
    assert type(error_for_reason("numerical", "x")) is NumericalFault
    assert type(error_for_reason("environment_raised", "x")) is EnvironmentRaised
    assert type(error_for_reason("never heard of", "x")) is InfrastructureFault
