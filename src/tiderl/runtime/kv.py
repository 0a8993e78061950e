"""What the rollout loop asks about KV: where a task fits, its seat there, and what happens when engines change.

`RequestLevel` leaves KV to the engines (`kv_policy: lru`). `TaskLevel` is continuous task batching (`ctb`): admission
by forecast, a probe for each group, priorities, migration. Knows groups and pools; starts no task itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from tiderl.data.events import Event
from tiderl.data.pools import PoolBook
from tiderl.data.records import Prompt, TaskKey
from tiderl.runtime.buffer import Buffer, Group, Member
from tiderl.runtime.loads import Loads
from tiderl.runtime.ports import Engine
from tiderl.runtime.seat import FixedSeat, Seat
from tiderl.runtime.seats import TaskSeats
from tiderl.runtime.waiting import Entry
from tiderl.schedule.appetite import Appetite
from tiderl.schedule.order import CANDIDATES
from tiderl.schedule.pool import TaskPool
from tiderl.schedule.priority import TaskFacts
from tiderl.schedule.residents import Facts, Resident
from tiderl.schedule.staleness import NO_DEADLINE, StartView, starts_allowed
from tiderl.schedule.tasks import EVAL_PRIORITY, TRAIN_PRIORITY, KvRules, ReplicaView, What


@dataclass(frozen=True)
class Next:
    """The first waiting one of each sort: prompts tell what kind of task it is."""

    evaluation: Prompt | None
    member: Entry | None
    of: Callable[[int], Entry | None]
    """The first member whose group was opened on a replica."""


class KvPolicy(Protocol):
    def replicas(self, waiting: Next, start: StartView) -> Sequence[ReplicaView]:
        """The candidates for the next start; `room` for a group is not looked for where none may start."""

    def home(self, group: Group) -> int | None:
        """Where a group's prompt is, or will be."""

    def seat(self, key: TaskKey, replica: int, prompt: Prompt, group: Group | None) -> Seat:
        """The task's place there, from now on."""

    def first_members(self, group: Group) -> list[Member]:
        """Of a new group, those that may start now; the others are reported to `ready` when they may."""

    def forget(self, group: Group) -> None:
        """The group is given up."""

    def usable(self, replica: int, version: int | None, up: bool) -> None:
        """Its version or state changed: tasks can be given to it at this version, None: not now."""

    def trained(self, waited_s: float, seconds: float) -> None:
        """An update is committed, for which the trainer waited and worked so long."""

    def rebalance(self) -> None:
        """Move tasks that have waited too long."""

    def books(self) -> Mapping[int, PoolBook]:
        """Of each replica where tasks have seats of their own."""


class RequestLevel:
    """Every replica takes every task; its engine keeps what it can."""

    def __init__(self, engines: Mapping[int, Engine], loads: Loads) -> None:
        self._engines, self._loads = engines, loads

    def replicas(self, waiting: Next, start: StartView) -> Sequence[ReplicaView]:
        return self._loads.least()

    def home(self, group: Group) -> int | None:
        return None

    def seat(self, key: TaskKey, replica: int, prompt: Prompt, group: Group | None) -> Seat:
        return FixedSeat(key, self._engines[replica], EVAL_PRIORITY if key.split == "eval" else TRAIN_PRIORITY)

    def first_members(self, group: Group) -> list[Member]:
        return group.members

    def forget(self, group: Group) -> None:
        pass

    def usable(self, replica: int, version: int | None, up: bool) -> None:
        pass

    def trained(self, waited_s: float, seconds: float) -> None:
        pass

    def rebalance(self) -> None:
        pass

    def books(self) -> Mapping[int, PoolBook]:
        return {}


class TaskLevel:
    """Continuous task batching over all replicas."""

    def __init__(
        self,
        engines: Mapping[int, Engine],
        loads: Loads,
        buffer: Buffer,
        rules: KvRules,
        emit: Callable[[Event], None],
        *,
        changed: Callable[[], None],
        moved: Callable[[TaskKey, int, int], None],
        ready: Callable[[Group, Collection[Member]], None],
    ) -> None:
        """`changed`: there may be room. `moved`: a task went to another replica. `ready`: members may start."""
        self._loads, self._buffer, self._rules, self._ready = loads, buffer, rules, ready
        self._seats = TaskSeats(engines, rules, emit, changed=self._stir, moved=self._moved, began=self._began)
        self._changed = changed
        self._groups: dict[int, Counter[int]] = {}  # prompt id -> replica -> tasks of the group there
        self._places: dict[TaskKey, int] = {}  # of training tasks
        self._tell_moved = moved
        self._held_back: dict[int, tuple[Group, list[Member]]] = {}
        self._versions: dict[int, int | None] = {}
        self._kinds: dict[str, None] = {}  # of training tasks that have begun
        self._appetite = Appetite(buffer.batch_groups * rules.group_size)
        self._stirred: dict[int, None] = {}  # where there may be more room than when it was looked at last

    def replicas(self, waiting: Next, start: StartView) -> Sequence[ReplicaView]:
        found = {view.replica: view for view in self._loads.least()}
        home = self.home(waiting.member[0]) if waiting.member is not None else None
        stirred = list(islice(self._stirred, CANDIDATES))
        for replica in stirred if home is None else (home, *stirred):
            view = self._loads.of(replica)
            if view is not None:
                found[replica] = view
        views = []
        for view in found.values():
            room = self._room(view, waiting, home, may_start=starts_allowed(start, view.version) > 0)
            if self._stirred.pop(view.replica, view) is None and room:
                self._stirred[view.replica] = None  # the others' turn first
            views.append(replace(view, room=room, pressed=self._seats.pools[view.replica].pressed))
        return views

    def _room(self, view: ReplicaView, waiting: Next, home: int | None, *, may_start: bool) -> frozenset[What]:
        """`home`: of the first waiting member."""
        pool, longest, now_s = self._seats.pools[view.replica], float(self._rules.max_context_tokens), _now()
        room: list[What] = []
        if waiting.evaluation is not None:
            kind = _kind("eval", waiting.evaluation)
            tokens = pool.expected_first_tokens(kind, None)
            if pool.room_for(kind, longest if tokens is None else tokens, now_s):
                room.append("eval")
        if waiting.member is not None and self._fits(pool, waiting.member, now_s):
            room.append("member")
        own = waiting.of(view.replica)
        if own is not None and own is not waiting.member and own[0].start_version <= view.version:
            if self._fits(pool, own, now_s):
                room.append("own")
        elif (waiting.member is None or "member" in room or view.replica != home) and not self._sated() and may_start:
            sizes = {kind: pool.expected_first_tokens(kind, None) or longest for kind in self._kinds}
            kind = max(sizes, key=lambda name: sizes[name], default="train:")
            if pool.room_for(kind, sizes.get(kind, longest), now_s):
                room.append("group")
        return frozenset(room)

    def _fits(self, pool: TaskPool, entry: Entry, now_s: float) -> bool:
        group, _ = entry
        kind, name = _kind("train", group.prompt), _name(group.prompt_id)
        tokens = pool.expected_first_tokens(kind, name)
        return pool.room_for(kind, self._rules.max_context_tokens if tokens is None else tokens, now_s, group=name)

    def _sated(self) -> bool:
        """A whole batch is ready, and as many tasks are in flight as the trainer can take."""
        buffer = self._buffer
        self._appetite.updates_done(buffer.updates_done, _now())
        ready = len(buffer.ready_groups) >= buffer.batch_groups
        return self._loads.total >= self._appetite.tasks(batch_is_ready=ready)

    def _stir(self, replica: int) -> None:
        self._stirred[replica] = None
        self._changed()

    def trained(self, waited_s: float, seconds: float) -> None:
        self._appetite.trained(waited_s, seconds)

    def home(self, group: Group) -> int | None:
        if group.opened_on is not None and self._loads.of(group.opened_on) is not None:
            return group.opened_on
        there = self._groups.get(group.prompt_id)
        return max(there, key=lambda replica: (there[replica], -replica)) if there else None

    def seat(self, key: TaskKey, replica: int, prompt: Prompt, group: Group | None) -> Seat:
        kind = _kind(key.split, prompt)
        pool = self._seats.pools[replica]
        name = _name(key.prompt_id) if group is not None else None
        tokens = pool.expected_first_tokens(kind, name)
        if group is not None:
            self._kinds.setdefault(kind)
            self._groups.setdefault(group.prompt_id, Counter())[replica] += 1
            self._places[key] = replica
        return self._seats.seat(
            key,
            replica,
            kind,
            self._rules.max_context_tokens if tokens is None else tokens,
            self._facts(group),
            left=lambda life_s: self._left(group, key, life_s),
        )

    def _left(self, group: Group | None, key: TaskKey, life_s: float | None) -> None:
        if group is None:
            return
        if life_s is not None:
            self._appetite.lived(life_s)
        there = self._groups[group.prompt_id]
        there[self._places.pop(key)] -= 1
        if not there.total():
            del self._groups[group.prompt_id]

    def _moved(self, key: TaskKey, replica: int, to: int) -> None:
        there = self._groups[key.prompt_id]
        there[replica] -= 1
        there[to] += 1
        self._places[key] = to
        self._tell_moved(key, replica, to)

    def _facts(self, group: Group | None) -> Facts:
        rules, buffer, appetite, seats = self._rules, self._buffer, self._appetite, self._seats

        def facts(resident: Resident, now_s: float) -> TaskFacts:
            context_fraction = resident.context_tokens / rules.max_context_tokens
            active = resident.state != "waiting"
            if group is None:
                return TaskFacts(True, 0.0, active, context_fraction)
            done = sum(member.trajectory is not None for member in group.members)
            fraction = done / len(group.members)
            if rules.priority != "deadlines":
                return TaskFacts(False, fraction, active, context_fraction)
            kind = seats.kinds[resident.kind]
            turns = float(kind.growth.tables().left_turns[resident.booked_step])
            latest_s = math.inf
            if group.deadline != NO_DEADLINE and appetite.update_s is not None:
                updates = group.deadline + 1 - buffer.updates_done
                latest_s = now_s + updates * appetite.update_s - (turns + 1) * (kind.waits.mean_s + seats.active_s)
            tokens = resident.context_tokens + turns * kind.growth.growth_tokens
            return TaskFacts(
                False,
                fraction,
                active,
                context_fraction,
                remaining_tokens=(len(group.members) - done) * tokens,
                latest_start_s=latest_s,
                starving=not buffer.ready_groups,
            )

        return facts

    def first_members(self, group: Group) -> list[Member]:
        pool = max(self._seats.pools.values(), key=lambda pool: pool.budget_tokens - pool.booked_tokens)
        kind = _kind("train", group.prompt)
        known = self._seats.kinds.get(kind)
        # A probe whose environment begins late would take longer than it tells: who has no room waits for it.
        if (known is not None and known.growth.first_is_known) or pool.begins_late(kind):
            return group.members
        if pool.room_for(kind, self._rules.max_context_tokens, _now(), len(group.members)):
            return group.members
        probe, *others = group.members
        self._held_back[group.prompt_id] = (group, others)
        return [probe]

    def _began(self, key: TaskKey) -> None:
        """A task's first context is known: its group's other members follow."""
        if key.split == "train" and key.prompt_id in self._held_back:
            self._ready(*self._held_back.pop(key.prompt_id))

    def forget(self, group: Group) -> None:
        self._held_back.pop(group.prompt_id, None)

    def usable(self, replica: int, version: int | None, up: bool) -> None:
        if version is not None and version != self._versions.get(replica):
            self._versions[replica] = version
            self._seats.void(replica)
        self._seats.open(replica, up)

    def books(self) -> Mapping[int, PoolBook]:
        return self._seats.books()

    def rebalance(self) -> None:
        if len(self._seats.pools) > 1:
            self._seats.migrate(self._loads.usable_versions(), self._oldest)

    def _oldest(self, key: TaskKey) -> int | None:
        group = self._buffer.groups.get(key.prompt_id) if key.split == "train" else None
        return None if group is None else group.start_version


def _kind(split: str, prompt: Prompt) -> str:
    return f"{split}:{prompt.environment}"


def _name(prompt_id: int) -> tuple[str, int]:
    return ("train", prompt_id)


def _now() -> float:
    return asyncio.get_running_loop().time()
