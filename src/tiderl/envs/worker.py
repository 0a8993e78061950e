"""The environment worker: `python -m tiderl.envs.worker --fd N --log FILE`. Holds many environments, a thread
each.

The main thread only receives and hands on, so it answers while environments hang. Whatever an environment
raises becomes a typed fault; what it prints goes to the log file. The process ends when the driver does. Must
not know slots or runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from tiderl.data import spans
from tiderl.data.errors import (
    ConfigurationError,
    EnvironmentFault,
    EnvironmentRaised,
    InfrastructureFault,
    TideError,
    VerifierFault,
)
from tiderl.envs import protocol
from tiderl.envs.answers import (
    TASK_SET_ERRORS,
    as_observation,
    as_prompts,
    as_reward,
    as_step,
    as_words,
    raised,
)
from tiderl.envs.base import check_methods, check_options, describe
from tiderl.envs.memory import guard_memory
from tiderl.envs.output import ROUTED_PRINTS, LastLines, capture_process_output, printed_by
from tiderl.envs.registry import load
from tiderl.wire.channel import Channel
from tiderl.wire.framing import Message
from tiderl.wire.spawn import attach, die_with_parent

Call = tuple[Message, protocol.LaneRequest]

_FAULTS: dict[type[protocol.LaneRequest], tuple[type[TideError], tuple[type[TideError], ...]]] = {
    protocol.ScoreRequest: (VerifierFault, (VerifierFault,)),
    protocol.PromptsRequest: (EnvironmentRaised, TASK_SET_ERRORS),
    protocol.VocabularyRequest: (EnvironmentRaised, TASK_SET_ERRORS),
    protocol.ExpertRequest: (EnvironmentRaised, TASK_SET_ERRORS),
}


class Lane:
    """One thread and at most one environment object."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._environment: Any = None
        self._printed = LastLines()
        self.busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"lane-{number}", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        self._calls.put(call)

    def abandon(self) -> None:
        """End when the running call returns."""
        self._calls.put(None)

    def hung(self, after_s: float) -> bool:
        busy_since_s = self.busy_since_s
        return busy_since_s is not None and time.monotonic() - busy_since_s >= after_s

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        with printed_by(self._printed):
            while (call := self._calls.get()) is not None:
                message, request = call
                self.busy_since_s = time.monotonic()
                self._answer(message, request)
                self.busy_since_s = None
                if isinstance(request, protocol.CloseRequest):
                    return
            with contextlib.suppress(BaseException):  # nobody waits for an abandoned lane
                self._close()

    def _answer(self, message: Message, request: protocol.LaneRequest) -> None:
        channel, pid = self._worker.channel, os.getpid()
        try:
            with spans.span(message.method):
                answer = self._call(request)
            if os.getpid() != pid:
                os._exit(0)  # a forked copy of this thread: the original answers
            channel.reply(message, answer)
        except BaseException as error:  # noqa: BLE001  the border of the user's code: sent as a typed fault
            if os.getpid() != pid:
                os._exit(1)
            kind, known = _FAULTS.get(type(request), (EnvironmentRaised, (EnvironmentFault,)))
            fault = raised(error, request.where, self._printed.lines(), kind, known)
            with contextlib.suppress(InfrastructureFault):  # the channel closed: the process ends anyway
                channel.reply_error(message, fault)

    def _call(self, request: protocol.LaneRequest) -> Any:
        kind, options = self._worker.environment_class, self._worker.options
        match request:
            case protocol.StepRequest():
                return as_step(self._environment.step(request.action), request.where)
            case protocol.ResetRequest():
                self._environment = kind(**options)
                return as_observation(self._environment.reset(request.prompt), request.where)
            case protocol.ScoreRequest():
                return as_reward(self._environment.score(request.trajectory), request.where, VerifierFault)
            case protocol.PauseRequest():
                self._environment.pause()
                return None  # whatever it answers says nothing
            case protocol.ResumeRequest():
                self._environment.resume()
                return None
            case protocol.CloseRequest():
                return self._close()
            case protocol.ExpertRequest():
                self._environment = kind(**options)
                return as_words(self._environment.expert(request.prompt), request.where)
            case protocol.PromptsRequest():
                return as_prompts(kind.prompts(request.split, **options), request.where)
            case protocol.VocabularyRequest():
                return as_words(kind.vocabulary(**options), request.where)
        raise InfrastructureFault(f"no call: {type(request).__name__}", where=request.where)

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        close = getattr(environment, "close", None)
        if callable(close):
            close()


class Worker:
    """The main thread's part: load the class, then hand each request to its lane."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.environment_class: Any = None
        self.options: dict[str, Any] = {}
        self._lanes: dict[int, Lane] = {}
        self._ending: list[Lane] = []  # closed or abandoned; some of them never end

    def serve(self) -> None:
        """Until the channel closes, which raises `InfrastructureFault`."""
        while True:
            message = self.channel.receive()
            if message is None:
                continue
            if message.method == protocol.LOAD:
                self._load(message)
                continue
            if message.method == protocol.SPANS:
                self.channel.reply(message, spans.taken())
                continue
            request: protocol.LaneRequest = message.payload(protocol.REQUESTS[message.method])
            if isinstance(request, protocol.AbandonRequest):
                self.channel.reply(message, self._abandon(request))
                continue
            self._hand_on(message, request)

    def _hand_on(self, message: Message, request: protocol.LaneRequest) -> None:
        if not isinstance(request, protocol.CloseRequest):
            lane = self._lanes.get(request.lane)
            if lane is None:
                lane = self._lanes[request.lane] = Lane(self, request.lane)
            lane.put((message, request))
        elif request.lane in self._lanes:
            lane = self._lanes.pop(request.lane)
            lane.put((message, request))
            self._ending = [*self._still_ending(), lane]
        else:
            self.channel.reply(message)  # abandoned before

    def _load(self, message: Message) -> None:
        """In the main thread, where imports that set signal handlers belong."""
        request: protocol.LoadRequest = message.payload(protocol.LoadRequest)
        if request.profile:
            spans.start("hand on")
        try:
            self.environment_class = load(request.name)
            self.options = dict(request.options)
            check_options(self.environment_class, self.options)
            check_methods(self.environment_class, self.options)
            description = describe(self.environment_class)
        except ConfigurationError as error:
            self.channel.reply_error(message, error)
            return
        guard_memory(description.memory_limit_bytes, alone=request.alone)
        self.channel.reply(message, description)

    def _abandon(self, request: protocol.AbandonRequest) -> int:
        lane = self._lanes.pop(request.lane, None)
        if lane is not None:
            lane.abandon()
            self._ending.append(lane)
        self._ending = self._still_ending()
        return sum(lane.hung(request.hung_after_s) for lane in self._ending)

    def _still_ending(self) -> list[Lane]:
        return [lane for lane in self._ending if lane.alive]


def main() -> None:
    """Serve the channel whose file descriptor is given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    arguments = parser.parse_args()
    channel = attach(arguments.fd)
    die_with_parent(channel)
    capture_process_output(arguments.log)
    ROUTED_PRINTS.acquire(forward=True)
    with contextlib.suppress(InfrastructureFault):
        Worker(channel).serve()


if __name__ == "__main__":
    main()
