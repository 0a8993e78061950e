"""All ranks in this process, driven from the event loop: one engine step per turn of the loop, no threads.

The same cores as in host processes, in a fixed order, so a CPU run with one rank is the same bit for bit each time
(architecture §6). A core that breaks ends the run: there is no other process that could be started afresh.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tiderl.cluster.host import BLOCKED_AFTER_S
from tiderl.cluster.layout import Layout
from tiderl.cluster.rank import Rank
from tiderl.cluster.specs import HostSpec
from tiderl.data.errors import ChannelTimeout, RankLost, TideError
from tiderl.runtime.ports import RankChange
from tiderl.wire.faults import describe_error, restore_error


class InlineLink:
    """The way to a rank of this process: a queue that the cluster's loop empties. Nothing is copied."""

    def __init__(self, spec: HostSpec, wake: asyncio.Event) -> None:
        self.spec = spec
        self.down = "it was not started"
        self.waiting: deque[tuple[asyncio.Future[Any] | None, str, Any]] = deque()
        self._wake = wake

    async def request(self, method: str, payload: Any, result: Any, deadline_s: float) -> Any:
        if self.down:
            raise RankLost(self.down, where=self.spec.name)
        ticket: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append((ticket, method, payload))
        self._wake.set()
        try:
            async with asyncio.timeout(deadline_s):
                return await ticket
        except TimeoutError:
            raise ChannelTimeout(f"no answer to {method} within {deadline_s:g} s", where=self.spec.name) from None

    def notify(self, method: str, payload: Any) -> None:
        if not self.down:
            self.waiting.append((None, method, payload))
            self._wake.set()

    def answer(self, ticket: asyncio.Future[Any] | None, result: Any) -> None:
        if ticket is not None and not ticket.done():
            ticket.set_result(result)

    def refuse(self, ticket: asyncio.Future[Any] | None, error: BaseException) -> None:
        if ticket is not None and not ticket.done():
            refusal = restore_error(describe_error(error), self.spec.name)
            refusal.__cause__ = error
            ticket.set_exception(refusal)

    def fail(self, reason: str) -> None:
        """The rank is gone: all that waits in the queue fails, and all that comes later."""
        self.down = reason
        while self.waiting:
            self.refuse(self.waiting.popleft()[0], RankLost(reason))


class InlineCluster:
    """A `Cluster` in one process. `report` gets a line when turns wait and none can run."""

    def __init__(self, specs: Sequence[HostSpec], *, report: Callable[[str], None] | None = None) -> None:
        self.ranks = len(specs)
        self._wake = asyncio.Event()
        self._links = {spec.rank: InlineLink(spec, self._wake) for spec in specs}
        self._layout = Layout(specs, self._links)
        self.engines, self.engine_ranks = self._layout.engines, self._layout.engine_ranks
        self.references, self.actors = self._layout.references, self._layout.actors
        self.update = self._layout.update
        self._report = report
        self._hosts: dict[int, Rank] = {}
        self._driving: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[TideError] | None = None

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        for number, link in self._links.items():
            self._hosts[number] = Rank(link.spec, link.answer, link.refuse)
            link.down = ""
            if (proxy := self._layout.proxies.get(number)) is not None:
                proxy.renew(self._hosts[number].started())
        self._driving = asyncio.create_task(self._drive(), name="inline cluster")

    async def next_change(self) -> RankChange:
        """Ranks of this process never come back: waits for ever, or raises what broke a core."""
        assert self._failure is not None
        raise await asyncio.shield(self._failure)

    async def close(self) -> None:
        if self._driving is not None:
            self._driving.cancel()
            await asyncio.gather(self._driving, return_exceptions=True)
            self._driving = None
        for number, host in self._hosts.items():
            host.close()
            self._links[number].fail("the cluster was closed")

    async def _drive(self) -> None:
        while True:
            self._wake.clear()
            for number, host in self._hosts.items():
                try:
                    self._turn(number, host)
                except Exception as error:  # noqa: BLE001 a broken core: recorded with its type, ends the run
                    self._break(error)
                    return
            if any(host.has_work() for host in self._hosts.values()):
                await asyncio.sleep(0)
            else:
                await self._idle()

    def _turn(self, number: int, host: Rank) -> None:
        """What a host process does between two looks at its channel."""
        link = self._links[number]
        while link.waiting:
            host.handle(*link.waiting.popleft())
        if host.has_work():
            host.step()
            stats = host.stats()
            assert stats is not None
            self._layout.proxies[number].stats = stats

    async def _idle(self) -> None:
        """Wait for a request; after a second of waiting turns, say once who holds the KV."""
        try:
            async with asyncio.timeout(BLOCKED_AFTER_S if self._blocked() and self._report else None):
                await self._wake.wait()
        except TimeoutError:
            assert self._report is not None
            self._report(self._blocked())
            await self._wake.wait()

    def _blocked(self) -> str:
        lines = [f"{host.spec.name}: {blocked}" for host in self._hosts.values() if (blocked := host.blocked())]
        return "\n".join(lines)

    def _break(self, error: Exception) -> None:
        failure = restore_error(describe_error(error), "inline cluster")
        failure.__cause__ = error
        for number, host in self._hosts.items():
            host.fail_all(failure)
            self._links[number].fail(failure.what)
        assert self._failure is not None
        self._failure.set_result(failure)
