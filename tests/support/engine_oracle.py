"""A slow, obvious engine: one iteration at a time, plain lists, no closed form. The oracle of `sim/engine.py`.

A `Script` says what tasks ask for and when; `play` returns what each turn got and when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Script:
    tasks: tuple[TaskScript, ...]
    loads: tuple[tuple[float, int], ...]  # (moment, version), the first at 0 s
    aborts: tuple[tuple[float, int, int], ...]  # (moment, task, turn)
    kv_budget: int
    max_batch: int
    prefill_per_step: int


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
    prefill_left: int = 0
    versions: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.context + len(self.versions)

    @property
    def target(self) -> int:
        return min(self.script.says, self.script.max_new)


def play(script: Script, cost: CostModel) -> tuple[dict[tuple[int, int], Got], int]:
    """What every turn got, and the largest number of KV positions that were ever reserved or held."""
    now, version, order, peak = 0.0, -1, 0, 0
    arrivals = [(task.start_s, index, 0, 0) for index, task in enumerate(script.tasks)]
    loads, aborts = sorted(script.loads), sorted(script.aborts)
    waiting: list[_Running] = []
    running: list[_Running] = []
    held: list[tuple[int, int]] = []  # (task, tokens), least recently used first
    got: dict[tuple[int, int], Got] = {}
    loading_until: float | None = None
    loading_version = -1

    def reserved() -> int:
        return sum(r.context + r.script.max_new for r in running)

    def end(r: _Running, reason: str, at: float) -> None:
        if r in running:
            running.remove(r)
            computed = r.known - r.prefill_left if r.prefill_left or not r.versions else r.known - 1
            if script.tasks[r.task].retain and computed:
                held.append((r.task, computed))
        else:
            waiting.remove(r)
        admitted = at if r.admitted_s is None else r.admitted_s
        first = at if r.first_s is None else r.first_s
        got[r.task, r.turn] = Got(
            at, tuple(r.versions), reason, r.cached, admitted - r.arrived_s, first - admitted, at - first
        )
        if r.turn + 1 < len(script.tasks[r.task].turns):
            arrivals.append((at + r.script.wait_s, r.task, r.turn + 1, r.known))

    while arrivals or waiting or running or loads or loading_until is not None:
        # What has come by now, in order of its moment.
        if loading_until is not None and now >= loading_until:
            version, loading_until = loading_version, None
            held.clear()
            for r in running:
                r.prefill_left = r.known
            running.sort(key=lambda r: r.order)
        due = [moment for moment, *_ in arrivals if moment <= now]
        if due and not (aborts and aborts[0][0] < min(due)):
            arrival = next(a for a in arrivals if a[0] == min(due))
            arrivals.remove(arrival)
            moment, task, turn, before = arrival
            turn_script = script.tasks[task].turns[turn]
            waiting.append(_Running(task, turn, before + turn_script.new_context, turn_script, moment, order))
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

        # Admission: priority, then arrival; nobody overtakes.
        if loading_until is None and version >= 0:
            while waiting and len(running) < script.max_batch:
                head = min(waiting, key=lambda r: (-script.tasks[r.task].priority, r.order))
                need = head.context + head.script.max_new
                if reserved() + need > script.kv_budget:
                    break
                own = sum(tokens for task, tokens in held if task == head.task)
                held[:] = [entry for entry in held if entry[0] != head.task]
                while reserved() + need + sum(tokens for _, tokens in held) > script.kv_budget:
                    held.pop(0)
                waiting.remove(head)
                running.append(head)
                head.cached = min(own, head.context - 1)
                head.prefill_left = head.context - head.cached
                head.admitted_s = now
        peak = max(peak, reserved() + sum(tokens for _, tokens in held))

        if not running or loading_until is not None or version < 0:
            # An abort of nobody must not keep the clock going.
            moments = [a[0] for a in arrivals] + [moment for moment, _ in loads]
            if loading_until is not None:
                moments = [a[0] for a in arrivals] + [loading_until]
            if waiting or running:
                moments += [moment for moment, *_ in aborts]
            if not moments:
                return got, peak
            now = max(now, min(moments))
            continue

        # One iteration.
        room = script.prefill_per_step
        chunks: list[tuple[_Running, int]] = []
        for r in running:
            if r.prefill_left and room:
                tokens = min(room, r.prefill_left)
                chunks.append((r, tokens))
                room -= tokens
        decoding = [r for r in running if not r.prefill_left]
        ending = [r for r, tokens in chunks if tokens == r.prefill_left]
        now += (
            cost.iteration_s
            + cost.sequence_s * (len(decoding) + len(ending))
            + cost.context_token_s * sum(r.known for r in decoding)
            + cost.prefill_token_s * sum(tokens for _, tokens in chunks)
        )
        for r, tokens in chunks:
            r.prefill_left -= tokens
        for r in decoding + ending:
            r.versions.append(version)
            r.first_s = now if r.first_s is None else r.first_s
        done = [r for r in running if not r.prefill_left and len(r.versions) == r.target]
        # Those who decoded leave first, then those whose first token was their last.
        for r in sorted(done, key=lambda r: (r in ending, r.order if r not in ending else running.index(r))):
            end(r, "stop" if r.script.says <= r.script.max_new else "length", now)
    return got, peak
