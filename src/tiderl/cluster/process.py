"""One process per rank, watched: a dead host is reported, started again with a growing pause, and reported back.

A rank that comes back is empty: no weights, no KV. What waited on it fails with `RankLost` at once. A host that keeps
dying ends the run with a typed error that quotes its log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiderl.cluster.layout import Layout
from tiderl.cluster.proxies import EngineProxy
from tiderl.cluster.specs import METHODS, HostSpec, Started
from tiderl.data.errors import InfrastructureFault, RankLost, TideError
from tiderl.data.spans import ProcessSpans
from tiderl.data.turns import EngineStats
from tiderl.runtime.ports import RankChange
from tiderl.wire.channel import Connection
from tiderl.wire.framing import ErrorText, Message
from tiderl.wire.spawn import Child, spawn

START_DEADLINE_S = 300.0  # imports and model building on a slow disk
CLOSE_DEADLINE_S = 5.0
SPANS_DEADLINE_S = 60.0  # behind at most one step or one training call; nothing waits for it
RESTARTS = 5  # within RESTART_WINDOW_S; more is a fault that a restart does not cure
RESTART_WINDOW_S = 600.0
FIRST_PAUSE_S = 0.1  # doubled with every restart in the window
LOG_TAIL_BYTES = 2000


class ProcessLink:
    """The way to a rank host: one child process and its connection, renewed at every start."""

    def __init__(self, spec: HostSpec, log_dir: Path | None, report: Callable[[str], None] | None) -> None:
        self.spec = spec
        self.proxy: EngineProxy | None = None
        self._log = None if log_dir is None else log_dir / f"rank-{spec.rank}.log"
        self._report = report
        self._child: Child | None = None
        self._connection: Connection | None = None
        self._down = "it was not started"

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """A new process, its cores built. Raises what building raised, `RankLost`, `ChannelTimeout`."""
        name = self.spec.name
        self._child = spawn("tiderl.cluster.host", log=self._log)
        try:
            connection = await Connection.open(self._child.socket, name, lost=RankLost, on_message=self._take)
            self._connection = connection
            started: Started = await connection.request("start", self.spec, Started, START_DEADLINE_S)
        except RankLost as lost:
            await self.kill()
            hint = f"its log ends with: {tail}" if (tail := self.log_tail()) else ""
            raise RankLost(f"it ended while it started ({self._child.status()})", where=name, hint=hint) from lost
        except BaseException:
            await self.kill()
            raise
        if self.proxy is not None:
            self.proxy.renew(started)
        self._down = ""

    async def request(self, method: str, payload: Any, result: Any, deadline_s: float) -> Any:
        if self._down or self._connection is None:
            raise RankLost(self._down, where=self.spec.name)
        return await self._connection.request(method, payload, result, deadline_s)

    def notify(self, method: str, payload: Any) -> None:
        if not self._down and self._connection is not None and self._connection.is_open:
            self._connection.notify(method, payload)

    async def lost(self) -> str:
        """Wait for the host's end, clear it away, and say why it ended."""
        assert self._connection is not None and self._child is not None
        reason = await self._connection.closed()
        self._down = reason
        child = self._child
        await self.kill()
        self._down = f"{reason} ({child.status()})"
        return self._down

    async def close(self) -> None:
        """Ask it to end, then make it end; idempotent."""
        if not self._down and self._connection is not None:
            self._down = "the cluster was closed"
            with contextlib.suppress(InfrastructureFault):  # killed below either way
                await self._connection.request("close", None, METHODS["close"].result, CLOSE_DEADLINE_S)
        self._down = "the cluster was closed"
        await self.kill()

    async def spans(self) -> list[tuple[str, ProcessSpans]]:
        """Of its process; empty when it is not profiled, down or too busy."""
        try:
            found = await self.request("spans", None, METHODS["spans"].result, SPANS_DEADLINE_S)
        except InfrastructureFault:
            return []
        return [] if found is None else [(f"{self.spec.name}: {self.spec.holds}", found)]

    async def kill(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._child is not None:
            self._child.kill()
            self._child.socket.close()
            await asyncio.to_thread(self._child.reap)

    def log_tail(self) -> str:
        """The last line of the host's log."""
        if self._log is None or not self._log.exists():
            return ""
        lines = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _take(self, message: Message) -> None:
        if message.method == "stats" and self.proxy is not None:
            self.proxy.stats = message.payload(EngineStats)
        elif message.method == "blocked" and self._report is not None:
            self._report(f"{self.spec.name}: {message.payload(str)}")
        elif message.method == "fatal" and self._connection is not None:
            self._connection.fail(message.payload(ErrorText).what)


class ProcessCluster:
    """A `Cluster` of rank hosts. Their output goes to `log_dir/rank-N.log`; `report` gets a line when a
    rank's turns wait and none can run; `restarts` is how often a rank is started again within ten minutes."""

    def __init__(
        self,
        specs: Sequence[HostSpec],
        log_dir: Path | str | None,
        *,
        report: Callable[[str], None] | None = None,
        restarts: int = RESTARTS,
    ) -> None:
        self.ranks = len(specs)
        folder = None if log_dir is None else Path(log_dir)
        self._links = {spec.rank: ProcessLink(spec, folder, report) for spec in specs}
        layout = Layout(specs, self._links)
        for rank, proxy in layout.proxies.items():
            self._links[rank].proxy = proxy
        self.engines, self.engine_ranks = layout.engines, layout.engine_ranks
        self.references, self.actors, self.update = layout.references, layout.actors, layout.update
        self._folder = folder
        self._restarts = restarts
        self._changes: asyncio.Queue[RankChange | TideError] = asyncio.Queue()
        self._watching: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> dict[int, int | None]:
        """The process of each rank."""
        return {rank: link.pid for rank, link in self._links.items()}

    async def start(self) -> None:
        """Returns when every host's cores stand. Raises the first rank's error, with all others ended."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        outcomes = await asyncio.gather(*(link.start() for link in self._links.values()), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed:
            await self.close()
            raise failed[0]
        self._watching = [
            asyncio.create_task(self._watch(link), name=f"watch {link.spec.name}") for link in self._links.values()
        ]

    async def next_change(self) -> RankChange:
        """Raises `InfrastructureFault` when a rank died too often to be started again."""
        change = await self._changes.get()
        if isinstance(change, TideError):
            raise change
        return change

    async def spans(self) -> list[tuple[str, ProcessSpans]]:
        """See `data.spans.Spanned`."""
        found = await asyncio.gather(*(link.spans() for link in self._links.values()))
        return [one for of_link in found for one in of_link]

    async def close(self) -> None:
        watching, self._watching = self._watching, []
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def _watch(self, link: ProcessLink) -> None:
        """Start the rank again whenever it ends, until it ended too often."""
        loop = asyncio.get_running_loop()
        deaths: deque[float] = deque()
        while True:
            reason = await link.lost()
            self._changes.put_nowait(RankChange(link.spec.rank, True, reason))
            while True:
                deaths.append(loop.time())
                while deaths[0] < loop.time() - RESTART_WINDOW_S:
                    deaths.popleft()
                if len(deaths) > self._restarts:
                    self._changes.put_nowait(_hopeless(link, len(deaths), reason))
                    return
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (len(deaths) - 1))
                try:
                    await link.start()
                except TideError as error:
                    reason = error.what
                else:
                    break
            self._changes.put_nowait(RankChange(link.spec.rank, False))


def _hopeless(link: ProcessLink, deaths: int, reason: str) -> InfrastructureFault:
    tail = link.log_tail()
    return InfrastructureFault(
        f"its process died {deaths} times within {RESTART_WINDOW_S:g} s, last: {reason}",
        where=link.spec.name,
        hint=f"its log ends with: {tail}" if tail else "",
    )
