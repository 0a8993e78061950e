"""The driver's side of one environment worker: start, call with a deadline, abandon what hangs, kill what is
gone.

A call that is running when the process dies is answered as an environment fault: nobody can tell which of the
running calls did it, and those are retried a bounded number of times. Must not know tasks or slots.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tiderl.data.errors import (
    ChannelTimeout,
    EnvironmentMemory,
    EnvironmentRaised,
    EnvironmentTimeout,
    InfrastructureFault,
)
from tiderl.data.spans import ProcessSpans
from tiderl.envs import protocol
from tiderl.envs.base import Description
from tiderl.envs.memory import MEMORY_EXIT_STATUS
from tiderl.envs.output import last_lines_of
from tiderl.wire.channel import Connection
from tiderl.wire.spawn import Child, spawn

T = TypeVar("T")

LOAD_DEADLINE_S = 120.0
"""Importing a large environment on a busy machine takes tens of seconds."""
ANSWER_S = 5.0
"""A worker whose main thread has not answered by then, after a call of its hung, is held by that call."""
REAP_S = 2.0


class WorkerProcess:
    """One worker. `environments` counts those placed in it; `retired` takes no new ones."""

    def __init__(self, child: Child, connection: Connection, log: Path, answer_s: float) -> None:
        self._child, self._connection, self._log = child, connection, log
        self._answer_s = answer_s
        self._lanes = itertools.count()
        self._killed_because = ""
        self.environments = 0
        self.retired = False
        self.description = Description("", (), ())

    @classmethod
    async def start(
        cls,
        name: str,
        options: Mapping[str, Any],
        log: Path,
        answer_s: float = ANSWER_S,
        *,
        alone: bool = False,
        profile: bool = False,
    ) -> WorkerProcess:
        """A worker with the class loaded, for one environment at a time if `alone`. Raises what `registry.load`
        raises, `InfrastructureFault` when it dies."""
        child = spawn("tiderl.envs.worker", "--log", str(log), log=log)
        connection = await Connection.open(child.socket, f"environment worker {log.stem}")
        worker = cls(child, connection, log, answer_s)
        try:
            worker.description = await connection.request(
                protocol.LOAD, protocol.LoadRequest(name, options, alone, profile), Description, LOAD_DEADLINE_S
            )
        except ChannelTimeout:
            await worker.kill("its import never ended")
            text = f"importing it took longer than {LOAD_DEADLINE_S:g} s"
            raise EnvironmentTimeout(text, where=f"env.name {name}") from None
        except InfrastructureFault as fault:
            raise InfrastructureFault(
                f"the environment worker died while loading {name}: {await worker.ending()}",
                where=f"env.name {name}",
                hint=f"see {log}",
            ) from fault
        except BaseException:
            await worker.kill("its class could not be loaded")
            raise
        return worker

    @property
    def is_alive(self) -> bool:
        return self._connection.is_open

    @property
    def pid(self) -> int:
        return self._child.pid

    def new_lane(self) -> int:
        return next(self._lanes)

    async def call(self, method: str, request: protocol.LaneRequest, result: type[T] | Any, deadline_s: float) -> T:
        """The answer of the user's code. Raises its faults; `EnvironmentTimeout` after `deadline_s`, while
        the call goes on; `EnvironmentRaised` when the process died of it, `InfrastructureFault` when it was
        dead before."""
        if not self.is_alive:
            raise InfrastructureFault(f"its worker is gone: {await self.ending()}", where=request.where)
        try:
            answer: T = await self._connection.request(method, request, result, deadline_s)
            return answer
        except ChannelTimeout:
            text = f"no answer to {method} within {deadline_s:.3g} s (env.deadline_s)"
            raise EnvironmentTimeout(text, where=request.where) from None
        except InfrastructureFault as fault:
            if self.is_alive:
                raise
            ending = await self.ending()
            if self._killed_because:
                raise InfrastructureFault(f"its worker was killed: {ending}", where=request.where) from fault
            if self._child.process.returncode == MEMORY_EXIT_STATUS:
                hint = "memory_limit_bytes of its class"
                text = f"its process took more memory than it may: {ending}"
                raise EnvironmentMemory(text, where=request.where, hint=hint) from fault
            raise EnvironmentRaised(f"its process died during {method}: {ending}", where=request.where) from fault

    async def abandon(self, lane: int, where: str, hung_after_s: float) -> int:
        """Forget a lane; how many calls the worker holds that have been running for longer than
        `hung_after_s` and that nobody waits for. A worker that does not answer is killed."""
        request = protocol.AbandonRequest(lane=lane, where=where, hung_after_s=hung_after_s)
        try:
            hung: int = await self._connection.request(protocol.ABANDON, request, int, self._answer_s)
            return hung
        except ChannelTimeout:
            await self.kill("it no longer answered")
        except InfrastructureFault:
            pass  # gone already
        return 0

    async def spans(self) -> ProcessSpans | None:
        """Where its time went; None when it is not profiled, gone, or does not answer."""
        try:
            found: ProcessSpans | None = await self._connection.request(
                protocol.SPANS, None, ProcessSpans | None, self._answer_s
            )
        except InfrastructureFault:
            return None
        return found

    async def kill(self, reason: str) -> None:
        """End the process and all it started. Idempotent."""
        if not self._killed_because and self.is_alive:
            self._killed_because = reason
        self.retired = True
        self._child.kill()
        await self._connection.close()
        await asyncio.to_thread(self._child.reap, REAP_S)

    async def ending(self) -> str:
        """How the process ended and what it printed last, in words."""
        self.retired = True
        self._child.kill()  # what it started may live on
        await asyncio.to_thread(self._child.reap, REAP_S)
        printed = last_lines_of(self._log)
        reason = self._killed_because or self._child.status()
        return f"{reason}; it printed last: {printed[-1]}" if printed else reason
