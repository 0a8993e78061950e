"""What the embedded engine's admission and chunks are worth where memory or patience is short.

    OMP_NUM_THREADS=1 python bench/pressure.py [--rounds 5] [--json]
    python bench/pressure.py --short

One thread, float32, a random Qwen3 model of 0.9 M parameters. All settings run in turn; figures are medians over the
rounds (min to max), in seconds of the process's CPU, which a busy machine disturbs less than the wall clock.

    stall    8 turns decode while a prompt of 2,000 tokens is prefilled: the longest gap between two of their tokens,
             by `prefill_tokens_beside_decoding` (4096: the whole prompt in one step)
    agents   64 tasks in 8 groups, 6 turns of 4 tokens, 32 new tokens between turns: sampled tokens per second, same
    growth   32 turns of up to 200 tokens that mostly stop early, in a KV budget that holds a third of what they may
             need: sampled tokens per second, by `growth_quantile` (1.0: all they may need is reserved)

`--short` takes seconds and checks that whatever the setting, turns sample the same ids.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from alternatives import write_model

from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings, ModelSettings
from tiderl.data.turns import Sampling, Turn, TurnResult
from tiderl.engines.torch_engine import TorchEngine

MAX_CONTEXT_TOKENS = 4096
CHUNKS = (4096, 512, 256)
QUANTILES = (1.0, 0.8, 0.5)
EARLY_STOPS = tuple(range(2, 1024, 30))  # of 1024 ids: a turn ends after some 30 tokens
SAME_FRACTION = 0.99  # of turns: rounding may tip a draw that lies between two tokens

Sampled = dict[tuple[TaskKey, int], list[int]]


class Player:
    """A fresh engine for each play; the same random turns each time."""

    def __init__(self, model: ModelSettings, weights: Path, *, long_tokens: int, tasks: int, turns: int) -> None:
        self._model = msgspec.structs.replace(model, max_context_tokens=MAX_CONTEXT_TOKENS)
        self._handle = WeightHandle(0, str(weights), weights.stat().st_size)
        self._long_tokens, self._tasks, self._turns = long_tokens, tasks, turns

    def _engine(self, **changes: float) -> tuple[TorchEngine, np.random.Generator]:
        settings = {"kv_budget_tokens": 64 * 1024, **changes}
        engine = TorchEngine(EngineSettings(self._model, **settings))  # type: ignore[arg-type]
        engine.load_weights(self._handle)
        return engine, np.random.default_rng(0)

    def _turn(self, task: TaskKey, at: int, ids: np.ndarray, new_tokens: int, stop_ids: tuple[int, ...] = ()) -> Turn:
        seed = 1000 * task.prompt_id + 100 * task.member + at
        return Turn(task, at, ids, Sampling(1.0, new_tokens, stop_ids, seed), MAX_CONTEXT_TOKENS)

    def _ids(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        return rng.integers(2, self._model.vocab_size, tokens, dtype=np.int32)

    def stall(self, chunk_tokens: int) -> tuple[float, Sampled]:
        """Milliseconds of the longest step while the long prompt is prefilled."""
        engine, rng = self._engine(prefill_tokens_beside_decoding=chunk_tokens, prefill_tokens_per_step=4096)
        for number in range(8):
            engine.add(self._turn(TaskKey("train", number, 0), 0, self._ids(rng, 32), 64))
        for _ in range(10):
            engine.step()
        long = TaskKey("train", 9, 0)
        engine.add(self._turn(long, 0, self._ids(rng, self._long_tokens), 1))
        gaps, sampled = [], Sampled()
        while (long, 0) not in sampled:
            started_s = time.process_time()
            keep(sampled, engine.step())
            gaps.append(time.process_time() - started_s)
        while engine.has_work():
            keep(sampled, engine.step())
        return 1000 * max(gaps), sampled

    def agents(self, chunk_tokens: int) -> tuple[float, Sampled]:
        """Sampled tokens per second of tasks that come back some steps after each turn."""
        return self._play(4, self._turns, stop_ids=(), prefill_tokens_beside_decoding=chunk_tokens)

    def growth(self, quantile: float) -> tuple[float, Sampled]:
        budget_tokens = self._tasks * (100 + 200) // 6
        return self._play(200, 2, stop_ids=EARLY_STOPS, growth_quantile=quantile, kv_budget_tokens=budget_tokens)

    def _play(self, new_tokens: int, turns: int, stop_ids: tuple[int, ...], **changes: float) -> tuple[float, Sampled]:
        engine, rng = self._engine(**changes)
        prompts = [self._ids(rng, 100) for _ in range(-(-self._tasks // 8))]
        contexts = {TaskKey("train", n // 8, n % 8): prompts[n // 8] for n in range(self._tasks)}
        observations = {key: [self._ids(rng, 32) for _ in range(turns)] for key in contexts}
        due = dict.fromkeys(contexts, (0, 0))  # which turn comes, at which step
        sampled, now = Sampled(), 0
        started_s = time.process_time()
        while due or engine.has_work():
            for key, (at, _) in [item for item in due.items() if item[1][1] <= now]:
                del due[key]
                engine.add(self._turn(key, at, contexts[key], new_tokens, stop_ids))
            for result in keep(sampled, engine.step()):
                key, at = result.task, result.turn
                contexts[key] = np.concatenate([contexts[key], result.ids, observations[key][at]])
                if at + 1 < turns:
                    due[key] = (at + 1, now + 1 + (at + key.member) % 5)
                else:
                    engine.release(key)
            now += 1
        return sum(map(len, sampled.values())) / (time.process_time() - started_s), sampled


def keep(sampled: Sampled, outcomes: list) -> list[TurnResult]:  # type: ignore[type-arg]
    for outcome in outcomes:
        assert isinstance(outcome, TurnResult), outcome
        sampled[outcome.task, outcome.turn] = outcome.ids.tolist()
    return outcomes


def measure(player: Player, rounds: int, seen: Callable[[str, Sampled], None]) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, settings in (("stall", CHUNKS), ("agents", CHUNKS), ("growth", QUANTILES)):
            for setting in settings:
                value, sampled = getattr(player, name)(setting)
                seen(name, sampled)
                figures[f"{name} {setting}"].append(value)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first: dict[str, Sampled] = {}

    def check(name: str, sampled: Sampled) -> None:
        expected = first.setdefault(name, sampled)
        same = sum(sampled[key] == ids for key, ids in expected.items())
        assert sampled.keys() == expected.keys() and same >= SAME_FRACTION * len(expected), f"{name}: other ids"

    with tempfile.TemporaryDirectory() as folder:
        long_tokens, tasks, turns = (300, 16, 2) if arguments.short else (2000, 64, 6)
        model, weights = write_model("tiny", Path(folder))
        player = Player(model, weights, long_tokens=long_tokens, tasks=tasks, turns=turns)
        figures = measure(player, 1 if arguments.short else arguments.rounds, check)
    if arguments.short:
        figures = {}  # of nothing worth a number
    if arguments.json or arguments.short:
        print(json.dumps({"figures": figures, "ids_equal": True}))
        return
    for name, values in figures.items():
        unit = "ms" if name.startswith("stall") else "tokens/s"
        print(f"{name:12} {statistics.median(values):8.0f} {unit}   ({min(values):.0f} to {max(values):.0f})")


if __name__ == "__main__":
    main()
