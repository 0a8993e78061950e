"""Small cores without torch, for tests of what is around a core. One step makes one token of every turn.

Special first tokens of a context: `BREAKS` makes the step raise, `FAILS` ends its turn with a `TurnFailure`, `STUCK` is
a turn that never fits; `SLOW` sleeps 50 ms at each step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from tiderl.data.errors import BudgetError, RequestTooLarge
from tiderl.data.records import MicroBatch, TaskKey, UpdateStats, WeightHandle
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import EngineSettings, ModelSettings, TrainerSettings
from tiderl.data.turns import EngineCapabilities, EngineStats, PauseMode, Turn, TurnFailure, TurnResult

BREAKS, FAILS, STUCK, SLOW = 60, 61, 62, 63
VOCAB_SIZE = 60  # ordinary words stay below the special ones
MAX_CONTEXT_TOKENS = 128
HERE = __name__

MODEL = ModelSettings("scratch", VOCAB_SIZE, MAX_CONTEXT_TOKENS, pad_id=0, stop_ids=(1,))
ENGINE = EngineSettings(MODEL, kv_budget_tokens=1024)
TRAINER = TrainerSettings(MODEL, seed=0, temperature=1.0)


class FakeEngine:
    capabilities = EngineCapabilities(retain=True, offload=False)

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._turns: dict[TaskKey, tuple[Turn, list[int]]] = {}  # its tokens' versions so far
        self._held: dict[TaskKey, np.ndarray] = {}
        self._version = -1
        self._paused = False
        self._generated = 0

    def add(self, turn: Turn) -> None:
        if len(turn.ids) + turn.sampling.max_new_tokens > self._settings.model.max_context_tokens:
            raise RequestTooLarge(f"{len(turn.ids)} tokens", where=str(turn.task))
        if turn.task in self._turns:
            raise BudgetError("a second turn", where=str(turn.task))
        self._turns[turn.task] = (turn, [])

    def abort(self, task: TaskKey, turn: int) -> TurnResult | None:
        if task not in self._turns or self._turns[task][0].turn != turn:
            return None
        return self._end(task, "aborted")

    def step(self) -> list[TurnResult | TurnFailure]:
        ended: list[TurnResult | TurnFailure] = []
        for task, (turn, versions) in list(self._turns.items()):
            special = int(turn.ids[0])
            if special == BREAKS:
                raise RuntimeError("the core broke")
            if special == FAILS:
                del self._turns[task]
                ended.append(TurnFailure(task, turn.turn, "numerical", "logits are not finite"))
                continue
            if special == STUCK:
                continue
            if special == SLOW:
                time.sleep(0.05)
            versions.append(self._version)
            self._generated += 1
            if len(versions) == turn.sampling.max_new_tokens:
                ended.append(self._end(task, "length"))
        return ended

    def _end(self, task: TaskKey, reason: str) -> TurnResult:
        turn, versions = self._turns.pop(task)
        held = self._held.get(task, turn.ids[:0])
        new = np.full(len(versions), 7, np.int32)
        self._held[task] = np.concatenate([turn.ids, new])
        logprobs = np.full(len(versions), -0.5, np.float32)
        cached = min(len(held), len(turn.ids))
        return TurnResult(task, turn.turn, new, logprobs, np.array(versions, np.int32), reason, cached)

    def has_work(self) -> bool:
        return not self._paused and any(turn.ids[0] != STUCK for turn, _ in self._turns.values())

    def retain(self, task: TaskKey) -> None: ...
    def offload(self, task: TaskKey) -> None: ...
    def release(self, task: TaskKey) -> None:
        self._held.pop(task, None)

    def pause(self, mode: PauseMode) -> list[TurnResult]:
        self._paused = True
        return [self._end(task, "aborted") for task in list(self._turns)] if mode == "abort" else []

    def resume(self) -> None:
        self._paused = False

    def load_weights(self, handle: WeightHandle) -> None:
        self._version = handle.version
        self._held.clear()

    def stats(self) -> EngineStats:
        held = sum(len(ids) for ids in self._held.values())
        holders = tuple(str(task) for task in self._held)
        return EngineStats(
            self._version, len(self._turns), 0, held, 1024, self._paused, self._generated, holders=holders
        )

    def close(self) -> None: ...


class FakeTrainer:
    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings

    def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]:
        return {"pid": float(os.getpid())}

    def reference_logprobs(self, mb: MicroBatch) -> np.ndarray:
        return np.zeros(mb.tokens, np.float32)

    def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None: ...
    def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None: ...
    def begin(self, update: int, members: Sequence[int]) -> None:
        if update < 0:
            raise ZeroDivisionError("an update below 0")

    def finish(self) -> UpdateStats:
        return UpdateStats({"loss": 0.0}, 0.0)

    def export(self, version: int) -> WeightHandle:
        return WeightHandle(version, "nowhere", 0)

    def discard(self, handle: WeightHandle) -> None: ...
    def save(self, directory: str) -> None: ...
    def restore(self, directory: str) -> None: ...
    def save_model(self, directory: str) -> None: ...
    def close(self) -> None: ...


def build_engine(settings: EngineSettings) -> FakeEngine:
    return FakeEngine(settings)


def build_trainer(settings: TrainerSettings) -> FakeTrainer:
    return FakeTrainer(settings)
