"""The rules of events: what they say is what the journal says, in the order in which it happened (I1, I2, I5, I11).

Everything that is shown of a run comes from its events, so they must agree with the books. Reads each event as it
comes, after the journal's write that it tells of. Knows no code that emits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiderl.data.events import (
    Dropped,
    EvalFinished,
    Event,
    GroupReady,
    PromptIssued,
    RankLostEvent,
    RankState,
    RoleChanged,
    RunEnded,
    TaskFinished,
    UpdateCommitted,
    VersionLoaded,
    VersionPublished,
)
from tiderl.sim.checks.journal import JournalBook
from tiderl.sim.checks.report import Findings


class EventBook:
    """The events of one driver."""

    def __init__(
        self,
        journal: JournalBook,
        findings: Findings,
        engine_ranks: Mapping[int, tuple[int, ...]],
        actor_ranks: Sequence[int],
    ) -> None:
        self.journal, self.findings, self.engine_ranks = journal, findings, engine_ranks
        self.shared_ranks = {rank for ranks in engine_ranks.values() for rank in ranks} & set(actor_ranks)
        self.t_s = 0.0
        self.published = -1
        self.loaded: dict[int, int] = {}
        self.roles: dict[int, str] = {}
        self.ended = False

    def emit(self, event: Event) -> None:
        require = self.findings.require
        require(event.t_s >= self.t_s, "I10", f"{type(event).__name__} goes back in time")
        require(not self.ended, "I1", f"{type(event).__name__} after the run ended")
        self.t_s = max(self.t_s, event.t_s)
        match event:
            case PromptIssued() | GroupReady() | TaskFinished() | Dropped():
                self._task(event)
            case UpdateCommitted():
                self._committed(event)
            case VersionPublished() | VersionLoaded():
                self._version(event)
            case RankState() | RoleChanged() | RankLostEvent():
                self._rank(event)
            case EvalFinished():
                self.findings.saw("an evaluation")
            case RunEnded():
                self.ended = True

    def _task(self, event: PromptIssued | GroupReady | TaskFinished | Dropped) -> None:
        rows, require = self.journal.rows, self.findings.require
        if isinstance(event, PromptIssued):
            row = self.journal.prompts.get(event.prompt_id)
            require(row is not None and row.start_version == event.start_version, "I1", f"{event} is not so written")
            known = self.loaded.get(event.replica, -1)
            require(known == event.start_version, "I3", f"prompt {event.prompt_id} starts on version {known}")
        elif isinstance(event, Dropped):
            row_of = rows.get(event.trajectory_id)
            agree = row_of is not None and (row_of.status, row_of.reason) == ("dropped", event.reason)
            require(agree, "I1", f"the event says that {event.trajectory_id} was dropped, the journal {row_of}")
        elif isinstance(event, TaskFinished):
            if event.split == "train":
                agree = event.trajectory_id in rows and rows[event.trajectory_id].status == "ready"
                require(agree, "I1", f"the event says that {event.trajectory_id} finished, the journal does not")
        else:
            live = [r for r in rows.values() if r.prompt_id == event.prompt_id and r.status != "dropped"]
            ready = len(live) == self.journal.settings.group_size and all(r.status == "ready" for r in live)
            require(ready, "I9", f"group {event.prompt_id} is said to be ready, its rows are {live}")

    def _committed(self, event: UpdateCommitted) -> None:
        """The figures of the update, from the payloads alone."""
        ids = self.journal.updates.get(event.update)
        if ids is None:
            self.findings.wrong("I2", f"update {event.update} is said to be committed, the journal has none")
            return
        rows = [self.journal.rows[number] for number in ids]
        payloads = [self.journal.payloads[str(row.sha256)] for row in rows]
        expected = {
            "prompt_ids": tuple(dict.fromkeys(row.prompt_id for row in rows)),
            "trajectories": len(rows),
            "loss_tokens": sum(p.loss_tokens for p in payloads),
            "tokens": sum(p.tokens for p in payloads),
            "staleness_max": event.update - 1 - min(p.oldest_version for p in payloads),
        }
        for name, value in expected.items():
            given = getattr(event, name)
            self.findings.require(given == value, "I1", f"update {event.update}: {name} is {given}, should be {value}")

    def _version(self, event: VersionPublished | VersionLoaded) -> None:
        require, version = self.findings.require, event.version
        if isinstance(event, VersionPublished):
            committed = version == 0 or version in self.journal.updates
            require(committed, "I2", f"version {version} is published before its update is committed")
            require(version > self.published, "I2", f"version {version} is published after {self.published}")
            self.published = version
            return
        require(version <= self.published, "I2", f"version {version} is loaded before it is published")
        before = self.loaded.get(event.replica, -1)
        require(version > before, "I2", f"replica {event.replica} goes from version {before} to {version}")
        self.loaded[event.replica] = version

    def _rank(self, event: RankState | RoleChanged | RankLostEvent) -> None:
        if isinstance(event, RankLostEvent):
            self.findings.saw("a rank lost")
            for replica, ranks in self.engine_ranks.items():
                if event.rank in ranks:
                    self.loaded.pop(replica, None)
            return
        if isinstance(event, RoleChanged):
            role = self.roles.get(event.rank, "rollout")
            self.findings.require(role == event.from_role, "I5", f"rank {event.rank} is {role}, not {event.from_role}")
            self.roles[event.rank] = event.to_role
            self.findings.saw("a role changed")
            return
        # A rank that takes turns is reported by both of its halves; any other keeps the role that it has.
        if event.rank not in self.shared_ranks:
            role = self.roles.setdefault(event.rank, event.role)
            self.findings.require(role == event.role, "I5", f"rank {event.rank} is {role}, and reports as {event.role}")
