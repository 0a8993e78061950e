"""A slow, obvious engine: one iteration at a time, every KV block by name, no closed form. Oracle of `sim/engine.py`.

A `Script` says what tasks ask for and when; `play` returns what each turn got and when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from support.block_oracle import Blocks

from tiderl.cost.model import CostModel


@dataclass(frozen=True)
class TurnScript:
    new_context: int  # tokens added to the context before the turn
    says: int  # tokens the policy would sample
    max_new: int
    wait_s: float  # afterwards, before the next turn


@dataclass(frozen=True)
class TaskScript:
    start_s: float
    priority: float
    retain: bool
    turns: tuple[TurnScript, ...]
    group: int = -1  # the tasks of a group start with the same `prompt` tokens; -1 = with nobody
    prompt: int = 0
    release_s: float | None = None  # after its last turn


@dataclass(frozen=True)
class Script:
    tasks: tuple[TaskScript, ...]
    loads: tuple[tuple[float, int], ...]  # (moment, version), the first at 0 s
    aborts: tuple[tuple[float, int, int], ...]  # (moment, task, turn)
    kv_budget: int
    max_batch: int
    prefill_per_step: int
    prefill_beside: int = 1 << 30  # in a step that also decodes
    block: int = 16
    system: int = 0  # tokens that all tasks of all groups start with
    kv_policy: str = "lru"


@dataclass(frozen=True)
class Got:
    finished_s: float
    versions: tuple[int, ...]
    reason: str
    cached: int
    queued_s: float
    prefill_s: float
    decode_s: float


@dataclass
class _Running:
    task: int
    turn: int
    context: int
    script: TurnScript
    arrived_s: float
    order: int
    admitted_s: float | None = None
    first_s: float | None = None
    cached: int = 0
    versions: list[int] = field(default_factory=list)
    seat: int = -1  # order of admission, -1 while it waits
    prefilling: bool = False
    names: list[tuple] = field(default_factory=list)  # of its blocks, in order

    @property
    def known(self) -> int:
        return self.context + len(self.versions)

    @property
    def target(self) -> int:
        return min(self.script.says, self.script.max_new)


@dataclass
class Played:
    got: dict[tuple[int, int], Got]
    peak_blocks: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    resident: list[tuple[float, int, int]] = field(default_factory=list)  # from a moment on: tokens, and unused ones


def play(script: Script, cost: CostModel) -> Played:
    """What every turn got; the largest number of blocks used or cached at once; preemptions."""
    size = script.block
    count = max(script.kv_budget // size, -(-min(script.kv_budget, 4096) // size))
    blocks = Blocks(count, script.kv_policy == "ctb", [task.group for task in script.tasks])
    users, filled = blocks.users, blocks.filled
    now, version, order, seats = 0.0, -1, 0, 0
    arrivals = [(task.start_s, index, 0, 0) for index, task in enumerate(script.tasks)]
    loads, aborts = sorted(script.loads), sorted(script.aborts)
    releases: list[tuple[float, int]] = []
    alive: set[int] = set()  # tasks that came and are not released
    waiting: list[_Running] = []
    running: list[_Running] = []
    out = Played({})
    loading_until: float | None = None
    loading_version = -1

    def name_of(r: _Running, index: int) -> tuple:
        task = script.tasks[r.task]
        if task.group >= 0 and index < (script.system - 1) // size:
            return ("system", index)
        if task.group >= 0 and index < (task.prompt - 1) // size:
            return ("group", task.group, index)
        return ("task", r.task, index)

    def names_of(r: _Running, tokens: int) -> list[tuple]:
        return [name_of(r, index) for index in range(-(-tokens // size))]

    def over(name: tuple) -> bool:
        groups = {script.tasks[t].group for t in alive}
        if name[0] == "system":
            return not any(group >= 0 for group in groups)
        return name[1] not in (groups if name[0] == "group" else alive)

    def leave(r: _Running, keep: bool) -> None:
        running.remove(r)
        for name in reversed(r.names):
            users[name] -= 1
            if filled[name] < size:
                filled[name] = 0  # half a block is worth nothing to anybody else
            if users[name] == 0:
                del users[name]
                if filled[name] == size and not over(name) and (keep or name[0] != "task"):
                    blocks.queue.append(name)
                else:
                    del filled[name]
        r.names, r.seat, r.prefilling = [], -1, False

    def end(r: _Running, reason: str, at: float) -> None:
        if r in running:
            leave(r, script.tasks[r.task].retain)
            if script.tasks[r.task].retain:
                blocks.hold(r.task, script.tasks[r.task].priority)
        else:
            waiting.remove(r)
        admitted = at if r.admitted_s is None else r.admitted_s
        first = at if r.first_s is None else r.first_s
        out.got[r.task, r.turn] = Got(
            at, tuple(r.versions), reason, r.cached, admitted - r.arrived_s, first - admitted, at - first
        )
        task = script.tasks[r.task]
        if r.turn + 1 < len(task.turns):
            arrivals.append((at + r.script.wait_s, r.task, r.turn + 1, r.known))
        elif task.release_s is not None:
            releases.append((at + task.release_s, r.task))

    def priority_of(r: _Running) -> float:
        return script.tasks[r.task].priority

    while arrivals or waiting or running or loads or loading_until is not None:
        # What has come by now, in order of its moment.
        if loading_until is not None and now >= loading_until:
            version, loading_until = loading_version, None
            blocks.held.clear()
            while blocks.queue:
                blocks.forget(blocks.queue[0])
            for name in filled:
                filled[name] = 0
            for r in running:
                r.prefilling = True
                for name in names_of(r, r.known)[len(r.names) :]:
                    blocks.take(name)  # the pool may be too small for a moment: preemption follows
                    r.names.append(name)
        if releases and min(releases)[0] <= now:
            releases.remove(first_release := min(releases))
            alive.discard(first_release[1])
            blocks.unhold(first_release[1])
            for name in [name for name in blocks.queue if name[:2] == ("task", first_release[1])]:
                blocks.forget(name)
            for name in [name for name in blocks.queue if over(name)]:
                blocks.forget(name)
            continue
        due = [moment for moment, *_ in arrivals if moment <= now]
        if due and not (aborts and aborts[0][0] < min(due)):
            arrival = next(a for a in arrivals if a[0] == min(due))
            arrivals.remove(arrival)
            moment, task, turn, before = arrival
            turn_script = script.tasks[task].turns[turn]
            waiting.append(_Running(task, turn, before + turn_script.new_context, turn_script, moment, order))
            alive.add(task)
            blocks.use(task, script.tasks[task].priority)
            order += 1
            continue
        if aborts and aborts[0][0] <= now:
            _, task, turn = aborts.pop(0)
            for r in [r for r in running + waiting if (r.task, r.turn) == (task, turn)]:
                end(r, "aborted", now)
            continue
        if loads and loads[0][0] <= now and loading_until is None:
            loading_version = loads.pop(0)[1]
            loading_until = now + cost.load_s
            continue

        if loading_until is None and version >= 0:
            # Preemption: who came last of the lowest priority, until what everybody decodes next has room.
            while True:
                grows = sum(not r.prefilling and -(-r.known // size) > len(r.names) for r in running)
                if len(users) + grows <= blocks.count:
                    break
                last = max(running, key=lambda r: (-priority_of(r), r.seat))
                leave(last, True)
                waiting.append(last)
                out.preemptions += 1
            # Admission: priority, then arrival; nobody overtakes.
            while waiting and len(running) < script.max_batch:
                head = min(waiting, key=lambda r: (-priority_of(r), r.order))
                names = names_of(head, head.known)
                if len(users) + grows + sum(name not in users for name in names) > blocks.count:
                    break
                # A block that a running turn uses is there before this one's own part is due.
                hits = 0
                while hits < (head.known - 1) // size and (names[hits] in users or names[hits] in blocks.queue):
                    hits += 1
                for name in names:
                    if name in blocks.queue:
                        blocks.queue.remove(name)
                        users[name] = 0
                blocks.unhold(head.task)
                for index, name in enumerate(names):
                    if index >= hits and users.get(name, 0) == 0:
                        filled[name] = 0
                    blocks.take(name)
                head.names, head.prefilling = names, True
                head.seat, seats = seats, seats + 1
                if head.admitted_s is None:
                    head.admitted_s, head.cached = now, hits * size
                waiting.remove(head)
                running.append(head)

        if not running or loading_until is not None or version < 0:
            # An abort of nobody must not keep the clock going.
            moments = [a[0] for a in arrivals] + [moment for moment, _ in releases]
            moments += [loading_until] if loading_until is not None else [moment for moment, _ in loads]
            if waiting or running:
                moments += [moment for moment, *_ in aborts]
            out.resident.append((now, blocks.resident, blocks.resident_unused))
            if not moments:
                break
            now = max(now, min(moments))
            continue

        # One iteration.
        decoding = [r for r in running if not r.prefilling]
        for r in decoding:
            for name in names_of(r, r.known)[len(r.names) :]:
                blocks.take(name)
                r.names.append(name)
        out.resident.append((now, blocks.resident, blocks.resident_unused))
        out.peak_blocks = max(out.peak_blocks, len(users) + len(blocks.queue))
        chunk = room = min(script.prefill_per_step, script.prefill_beside) if decoding else script.prefill_per_step
        ending = []
        for r in sorted((r for r in running if r.prefilling), key=lambda r: r.seat):
            missing = 0
            for index, name in enumerate(r.names):
                gap = min(size, r.known - index * size) - filled[name]
                filled[name] += min(gap, room)
                missing += gap - min(gap, room)
                room -= min(gap, room)
            if not missing:
                ending.append(r)
        now += (
            cost.iteration_s
            + cost.sequence_s * (len(decoding) + len(ending))
            + cost.context_token_s * sum(r.known for r in decoding)
            + cost.prefill_token_s * (chunk - room)
        )
        for r in decoding:
            filled[r.names[(r.known - 1) // size]] += 1
        for r in ending:
            r.prefilling = False
        for r in decoding + ending:
            r.versions.append(version)
            r.first_s = now if r.first_s is None else r.first_s
        done = [r for r in running if not r.prefilling and len(r.versions) == r.target]
        # Those who decoded leave first, in order of admission, then those whose first token was their last.
        for r in sorted(done, key=lambda r: (r in ending, r.seat)):
            end(r, "stop" if r.script.says <= r.script.max_new else "length", now)
    out.evicted_blocks = blocks.evicted
    return out
