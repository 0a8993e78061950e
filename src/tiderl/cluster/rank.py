"""One rank at work: its cores, and the requests that wait on them. Plain, synchronous, one thread.

The host process and the inline cluster drive the same object, so both behave alike. A request is answered through a
ticket, at once or, for `generate`, when its turn ends. Must not know channels or event loops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tiderl.cluster.specs import Backward, Begin, Forward, Generated, HostSpec, Started, TurnName, WarmUp, load_builder
from tiderl.data.errors import InfrastructureFault
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.spans import span, taken
from tiderl.data.turns import EngineStats, PauseMode, Turn, TurnFailure, TurnResult
from tiderl.runtime.ports import EngineCore, TrainerCore
from tiderl.wire.faults import error_for_reason

_LATER = object()  # the command answers its ticket itself

SPAN_NAMES = {"generate": "add turn", "reference_logprobs": "reference", "finish": "optimizer"}
"""Spans of commands that are not called like their method."""

Ticket = Any
"""Who asked: handed back with the answer, never looked into."""


class Rank:
    """Cores built from a spec. Each request is answered or refused exactly once, with its ticket."""

    def __init__(
        self,
        spec: HostSpec,
        answer: Callable[[Ticket, Any], None],
        refuse: Callable[[Ticket, BaseException], None],
    ) -> None:
        self.spec = spec
        self.closed = False
        self._answer, self._refuse = answer, refuse
        self._engine: EngineCore | None = None
        self._trainer: TrainerCore | None = None
        self._turns: dict[tuple[TaskKey, int], Ticket] = {}
        self._commands: dict[str, Callable[[Ticket, Any], Any]] = {
            "close": lambda ticket, _: self.close(),
            "spans": lambda ticket, _: taken(),
        }
        if spec.engine is not None:
            self._engine = load_builder(spec.engine_core)(spec.engine)
            self._commands |= self._engine_commands(self._engine)
        if spec.trainer is not None:
            self._trainer = load_builder(spec.trainer_core)(spec.trainer)
            self._commands |= self._trainer_commands(self._trainer)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # two compute threads beside a busy neighbour made torch 10 to 20 times slower

    def started(self) -> Started:
        return Started(None if self._engine is None else self._engine.capabilities, self.stats())

    def stats(self) -> EngineStats | None:
        with span("stats"):
            return None if self._engine is None else self._engine.stats()

    def handle(self, ticket: Ticket, method: str, payload: Any) -> None:
        """Carry out one request. What a core raises goes to who asked; the rank lives on."""
        command = self._commands.get(method)
        if command is None:
            self._refuse(ticket, InfrastructureFault(f"{self.spec.name} has nothing that can {method}"))
            return
        try:
            with span(SPAN_NAMES.get(method, method)):
                result = command(ticket, payload)
        except Exception as error:  # noqa: BLE001 the boundary of the cores: passed on with its type
            self._refuse(ticket, error)
            return
        if result is not _LATER:
            self._answer(ticket, result)

    def has_work(self) -> bool:
        return self._engine is not None and self._engine.has_work()

    def step(self) -> None:
        """One engine step; answers the turns that ended. What it raises is the end of this rank."""
        assert self._engine is not None
        self._end_turns(self._engine.step())

    def blocked(self) -> str:
        """Who holds the KV when turns wait and none can run; empty when all is well."""
        if self._engine is None or not self._turns or self._engine.has_work():
            return ""
        stats = self._engine.stats()
        if stats.paused:
            return ""
        return (
            f"{len(self._turns)} turns wait and none can run: {stats.resident_tokens} of {stats.budget_tokens} tokens"
            f" are held by {', '.join(stats.holders) or 'nobody'}"
        )

    def fail_all(self, error: BaseException) -> None:
        """Refuse every turn that still waits."""
        tickets, self._turns = self._turns, {}
        for ticket in tickets.values():
            self._refuse(ticket, error)

    def close(self) -> None:
        """Idempotent."""
        if self.closed:
            return
        self.closed = True
        for core in (self._engine, self._trainer):
            if core is not None:
                core.close()
        self.fail_all(InfrastructureFault(f"{self.spec.name} was closed"))

    def _end_turns(self, outcomes: Sequence[TurnResult | TurnFailure]) -> None:
        """Of one step: the engine's state after it is the same for all, and takes longer to say than a turn."""
        if not outcomes:
            return
        stats = self.stats()
        assert stats is not None
        for outcome in outcomes:
            ticket = self._turns.pop((outcome.task, outcome.turn), None)
            if isinstance(outcome, TurnFailure):
                where = f"turn {outcome.turn} of {outcome.task} on {self.spec.name}"
                self._refuse(ticket, error_for_reason(outcome.error, outcome.what, where))
            else:
                self._answer(ticket, Generated(outcome, stats))

    def _engine_commands(self, engine: EngineCore) -> dict[str, Callable[[Ticket, Any], Any]]:
        def generate(ticket: Ticket, turn: Turn) -> Any:
            engine.add(turn)
            self._turns[turn.task, turn.turn] = ticket
            return _LATER

        def abort(ticket: Ticket, name: TurnName) -> EngineStats:
            result = engine.abort(name.task, name.turn)
            if result is not None:
                self._end_turns([result])
            return engine.stats()

        def pause(ticket: Ticket, mode: PauseMode) -> EngineStats:
            self._end_turns(engine.pause(mode))
            return engine.stats()

        def resume(ticket: Ticket, _: None) -> EngineStats:
            engine.resume()
            return engine.stats()

        def load_weights(ticket: Ticket, handle: WeightHandle) -> EngineStats:
            engine.load_weights(handle)
            return engine.stats()

        return {
            "generate": generate,
            "abort": abort,
            "pause": pause,
            "resume": resume,
            "load_weights": load_weights,
            "retain": lambda ticket, task: engine.retain(task),
            "release": lambda ticket, task: engine.release(task),
            "offload": lambda ticket, task: engine.offload(task),
        }

    def _trainer_commands(self, trainer: TrainerCore) -> dict[str, Callable[[Ticket, Any], Any]]:
        def warm_up(ticket: Ticket, asked: WarmUp) -> dict[str, float]:
            return trainer.warm_up(asked.demos, asked.updates, asked.lr)

        def forward(ticket: Ticket, asked: Forward) -> None:
            trainer.forward(asked.mb, proximal=asked.proximal)

        def backward(ticket: Ticket, asked: Backward) -> None:
            trainer.backward(asked.mb, asked.ref_logprobs)

        def begin(ticket: Ticket, asked: Begin) -> None:
            trainer.begin(asked.update, asked.members)

        return {
            "warm_up": warm_up,
            "forward": forward,
            "backward": backward,
            "begin": begin,
            "reference_logprobs": lambda ticket, mb: trainer.reference_logprobs(mb),
            "finish": lambda ticket, _: trainer.finish(),
            "export": lambda ticket, version: trainer.export(version),
            "discard": lambda ticket, handle: trainer.discard(handle),
            "save": lambda ticket, directory: trainer.save(directory),
            "restore": lambda ticket, directory: trainer.restore(directory),
            "save_model": lambda ticket, directory: trainer.save_model(directory),
        }
