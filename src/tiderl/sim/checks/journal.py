"""The rules of the journal, over what is written, write by write: I1, I2, I3, I8 and I9.

Keeps books of its own from the rows and payloads alone: how a trajectory ended, which updates there are, how stale what
they consumed was by the declared definition. Knows nothing of the code that writes, nor of a ledger's own refusals.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tiderl.data.records import Trajectory
from tiderl.data.settings import RunSettings
from tiderl.runtime.ports import LedgerRow, PromptRow, Replay, TrajectoryRow, VersionRow
from tiderl.sim.checks.report import Findings

OPEN = ("running", "ready")


@dataclass(frozen=True)
class Payload:
    """What the rules need of a stored trajectory."""

    prompt_id: int
    member: int
    attempt: int
    reward: float
    tokens: int
    """Of all its sequences."""
    loss_tokens: int
    oldest_version: int
    newest_version: int


@dataclass
class JournalBook:
    """The books of one run, over all its drivers."""

    settings: RunSettings
    findings: Findings
    rows: dict[int, TrajectoryRow] = field(default_factory=dict)
    prompts: dict[int, PromptRow] = field(default_factory=dict)
    updates: dict[int, tuple[int, ...]] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    payloads: dict[str, Payload] = field(default_factory=dict)
    ready_after: dict[int, int] = field(default_factory=dict)
    """Trajectory to the updates that were committed when its row became ready."""

    def begin(self, replay: Replay) -> None:
        """A driver starts over what a crash left: only that counts from now on."""
        self.rows = {row.id: row for row in replay.trajectories}
        self.prompts = {row.prompt_id: row for row in replay.prompts}
        self.updates = dict(replay.updates)
        self.versions = {row.version for row in replay.versions}
        known = {row.id for row in replay.trajectories if row.status in ("ready", "trained")}
        self.ready_after = {number: after for number, after in self.ready_after.items() if number in known}
        self.check_whole()

    def stored(self, trajectory: Trajectory, sha256: str) -> None:
        """A payload is put away: its own content (I8)."""
        t, wrong = trajectory, self.findings.wrong
        name = f"trajectory {t.id}"
        lengths = {len(t.ids), len(t.loss_mask), len(t.logprobs), len(t.versions)}
        if len(lengths) != 1 or not t.loss_mask.any():
            wrong("I8", f"{name} has columns of {sorted(lengths)} tokens, {int(t.loss_mask.sum())} sampled")
            return
        sampled, context = t.versions[t.loss_mask], ~t.loss_mask
        if (np.diff(sampled) < 0).any() or sampled[0] < 0:
            wrong("I6", f"{name} has token versions {[int(version) for version, _ in itertools.groupby(sampled)]}")
        if (t.versions[context] != -1).any() or t.logprobs[context].any():
            wrong("I8", f"{name} has log-probs or versions where nothing was sampled")
        if not np.isfinite(t.logprobs).all() or not np.isfinite(t.reward):
            wrong("I9", f"{name} has a log-prob or reward that is not finite")
        spans = np.zeros(t.tokens, np.bool_)
        for turn in t.turns:
            spans[turn.start : turn.end] = True
        if (spans != t.loss_mask).any():
            wrong("I8", f"{name} has sampled tokens outside its turns, or turns beyond them")
        if sampled[0] != sampled[-1]:
            self.findings.saw("a trajectory spans two versions")
        tokens = self._sequences_tokens(t)
        self.payloads[sha256] = Payload(
            t.key.prompt_id,
            t.key.member,
            t.key.attempt,
            t.reward,
            tokens,
            t.loss_tokens,
            int(sampled.min()),
            int(sampled.max()),
        )

    def _sequences_tokens(self, t: Trajectory) -> int:
        """Of the sequences that the forks make. What leaves is context that was there (I8)."""
        there, total, at = np.ones(t.tokens, np.bool_), 0, 0
        for fork in t.forks:
            leaving = np.zeros(t.tokens, np.bool_)
            for start, end in fork.left:
                leaving[start:end] = True
            if not at < fork.at < t.tokens or not leaving.any() or leaving[fork.at :].any():
                self.findings.wrong("I8", f"trajectory {t.id} has {fork} out of place")
            if (leaving & (t.loss_mask | ~there)).any():
                self.findings.wrong("I8", f"trajectory {t.id} has {fork} of what was sampled or had left before")
            at = fork.at
            total += int(there[:at].sum())
            there &= ~leaving
        return total + int(there.sum())

    def append(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            if isinstance(row, TrajectoryRow):
                self._trajectory(row)
            elif isinstance(row, PromptRow):
                self._prompt(row)
            elif isinstance(row, VersionRow):
                self._version(row)

    def _trajectory(self, row: TrajectoryRow) -> None:
        earlier, name = self.rows.get(row.id), f"trajectory {row.id}"
        require = self.findings.require
        require(row.status in ("running", "ready", "dropped"), "I1", f"{name} is written as {row.status}")
        if earlier is not None:
            require(earlier.status in OPEN, "I1", f"{name} ended as {earlier.status} and becomes {row.status}")
            same = (row.prompt_id, row.member) == (earlier.prompt_id, earlier.member)
            require(same, "I1", f"{name} changes its place")
        if row.status == "ready":
            payload = self.payloads.get(str(row.sha256))
            if payload is None:
                self.findings.wrong("I2", f"{name} is ready without a payload")
            else:
                place = (payload.prompt_id, payload.member, payload.attempt)
                require(place == (row.prompt_id, row.member, row.attempt), "I9", f"{name} has the payload of {place}")
                newest = max(self.versions, default=-1)
                require(
                    payload.newest_version <= newest, "I2", f"{name} has tokens of version {payload.newest_version}"
                )
                start = self.prompts[row.prompt_id].start_version
                older = f"{name} has tokens of version {payload.oldest_version}, its group starts at {start}"
                require(payload.oldest_version >= start, "I3", older)
            self.ready_after[row.id] = len(self.updates)
        if row.status == "dropped":
            require(bool(row.reason), "I1", f"{name} is dropped without a reason")
            self.findings.saw(f"dropped: {row.reason}")
        if row.attempt > 0 and row.status == "running" and earlier is not None:
            self.findings.saw("a task tried again")
        self.rows[row.id] = row

    def _prompt(self, row: PromptRow) -> None:
        number, s = row.prompt_id, self.settings
        self.findings.require(number == len(self.prompts), "I1", f"prompt {number} is not the next one")
        self.findings.require(row.start_version in self.versions, "I2", f"prompt {number} starts at no version")
        self.prompts[number] = row
        places = [(other.prompt_id, other.member) for other in self.rows.values() if other.status != "dropped"]
        live = {prompt_id for prompt_id, _ in places}  # consumed ones included
        live.add(number)
        if s.staleness_counts == "window":
            unconsumed = {r.prompt_id for r in self.rows.values() if r.status in OPEN} | {number}
            allowed, count = (s.max_staleness + 1) * s.global_batch_groups, len(unconsumed)
        else:
            allowed, count = (s.max_staleness + 1 + row.start_version) * s.global_batch_groups, len(live)
        self.findings.require(count <= allowed, "I3", f"prompt {number} is group {count} of {allowed} that may start")
        if count == allowed:
            self.findings.saw("the staleness bound is full")

    def _version(self, row: VersionRow) -> None:
        committed = row.version == 0 or row.version in self.updates
        self.findings.require(committed, "I2", f"version {row.version} is published before its update is committed")
        self.versions.add(row.version)

    def commit(self, update: int, trajectory_ids: Sequence[int]) -> None:
        s, require = self.settings, self.findings.require
        require(update == len(self.updates) + 1, "I2", f"update {update} is not the next after {len(self.updates)}")
        require(len(set(trajectory_ids)) == len(trajectory_ids), "I2", f"update {update} trains a trajectory twice")
        rows = [self.rows[number] for number in trajectory_ids if number in self.rows]
        unready = [row.id for row in rows if row.status != "ready"] or sorted(set(trajectory_ids) - self.rows.keys())
        require(not unready, "I2", f"update {update} trains {unready}, which are not ready")
        members: dict[int, list[int]] = {}
        for row in rows:
            members.setdefault(row.prompt_id, []).append(row.member)
        whole = all(sorted(found) == list(range(s.group_size)) for found in members.values())
        require(whole and len(members) == s.global_batch_groups, "I9", f"update {update} consumes groups {members}")
        stale = self._staleness(update, rows)
        require(stale <= s.max_staleness, "I3", f"update {update} consumes what is {stale} updates old")
        if stale == s.max_staleness > 0:
            self.findings.saw("consumed at the staleness bound")
        self.updates[update] = tuple(trajectory_ids)
        for row in rows:
            self.rows[row.id] = TrajectoryRow(
                row.id, row.prompt_id, row.member, row.attempt, "trained", update_no=update, sha256=row.sha256
            )

    def _staleness(self, update: int, rows: Sequence[TrajectoryRow]) -> int:
        """By the declared definition: of the oldest sampled token, or since the group became ready."""
        if self.settings.staleness_counts == "oldest_token":
            found = [self.payloads[str(row.sha256)].oldest_version for row in rows if row.sha256 in self.payloads]
            return (update - 1) - min(found, default=update - 1)
        since: dict[int, int] = {}
        for row in rows:
            after = self.ready_after.get(row.id, update - 1)
            since[row.prompt_id] = max(since.get(row.prompt_id, 0), after)
        return (update - 1) - min(since.values(), default=update - 1)

    def check_whole(self, *, finished: bool = False) -> None:
        """What must hold whenever a driver starts or ends; `finished`: the run is done, nothing is in flight."""
        require = self.findings.require
        require(sorted(self.prompts) == list(range(len(self.prompts))), "I1", "prompt numbers have a hole")
        require(sorted(self.updates) == list(range(1, len(self.updates) + 1)), "I2", "update numbers have a hole")
        trained = [number for ids in self.updates.values() for number in ids]
        require(len(trained) == len(set(trained)), "I2", "a trajectory is in two updates")
        by_status = {row.id for row in self.rows.values() if row.status == "trained"}
        require(by_status == set(trained), "I1", f"trained by status or by update alone: {by_status ^ set(trained)}")
        places = [(row.prompt_id, row.member) for row in self.rows.values() if row.status != "dropped"]
        require(len(places) == len(set(places)), "I1", "a member of a group lives twice")
        if finished:
            open_rows = [row.id for row in self.rows.values() if row.status in OPEN]
            require(not open_rows, "I1", f"the run is done, and {open_rows} have no end")
            require(len(self.updates) == self.settings.updates, "I1", f"done after {len(self.updates)} updates")

    def rewards(self, prompt_id: int) -> list[float]:
        """Of the group's members that live or were trained, by member."""
        found = [
            (row.member, self.payloads[str(row.sha256)].reward)
            for row in self.rows.values()
            if row.prompt_id == prompt_id and row.status != "dropped" and row.sha256 in self.payloads
        ]
        return [reward for _, reward in sorted(found)]
