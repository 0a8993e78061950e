"""The process of one rank: drain the channel; the engine has work, so step it; else block on the channel.

Run as `python -m tiderl.cluster.host --fd N`; the first message is its `HostSpec`. Reports the engine's state at least
every 100 ms while it works, and who holds the KV once turns waited 1 s with none able to run.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from typing import Any

from tiderl.cluster.rank import Rank
from tiderl.cluster.specs import METHODS, HostSpec
from tiderl.data import spans
from tiderl.data.errors import InfrastructureFault, TideError
from tiderl.wire.channel import Channel
from tiderl.wire.faults import describe_error
from tiderl.wire.framing import Message
from tiderl.wire.spawn import attach, die_with_parent

STATS_EVERY_S = 0.1  # the port's promise
BLOCKED_AFTER_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tiderl.cluster.host")
    parser.add_argument("--fd", type=int, required=True)
    channel = attach(parser.parse_args().fd)
    die_with_parent(channel)
    request = channel.receive()
    assert request is not None
    try:
        spec: HostSpec = request.payload(HostSpec)
        if spec.profile:
            spans.start("host loop")
        with spans.span("start"):
            rank = Rank(spec, channel.reply, channel.reply_error)
    except Exception as error:  # noqa: BLE001 passed on with its type: the driver decides
        _log(error)
        channel.reply_error(request, error)
        return 1
    channel.reply(request, rank.started())
    try:
        serve(channel, rank)
    except Exception as error:  # noqa: BLE001 the end of this rank: reported with its type, then a fresh process
        _log(error)
        channel.notify("fatal", describe_error(error))
        return 1
    return 0


def serve(channel: Channel, rank: Rank) -> None:
    """Until told to close. Raises what the engine's step raises and `InfrastructureFault` when the channel closes."""
    reported_s = time.monotonic()
    reported_blocked = False
    while not rank.closed:
        working = rank.has_work()
        blocked = "" if working else rank.blocked()
        wait_s = 0.0 if working else BLOCKED_AFTER_S if blocked and not reported_blocked else None
        message = channel.receive(wait_s)
        if message is None and blocked:
            channel.notify("blocked", blocked)
            reported_blocked = True
        while message is not None:
            _carry_out(channel, rank, message)
            message = None if rank.closed else channel.receive(0.0)
        if rank.has_work():
            with channel.gathered():  # turns that end in one step are told as one
                rank.step()
            reported_blocked = False
            if time.monotonic() - reported_s >= STATS_EVERY_S:
                channel.notify("stats", rank.stats())
                reported_s = time.monotonic()


def _carry_out(channel: Channel, rank: Rank, message: Message) -> None:
    try:
        payload: Any = message.payload(METHODS[message.method].payload)
    except (KeyError, InfrastructureFault) as error:
        channel.reply_error(message, error)
        return
    rank.handle(message, message.method, payload)


def _log(error: BaseException) -> None:
    """To this process's log: the whole story of what nobody expected, one line of what has a type."""
    if isinstance(error, TideError):
        print(error, file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


if __name__ == "__main__":
    sys.exit(main())
