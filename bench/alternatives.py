"""What `bench/engine.py` measures: the embedded engine, transformers and vLLM over one weight file.

Each alternative has `sample(ids, new_tokens)` and `prefill(ids)`, which return figures by name; `ids` int32 [batch, n].
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.scratch import SCRATCH_MODEL_TYPE, scratch_config
from tiderl.data.settings import EngineSettings, ModelSettings
from tiderl.data.turns import Sampling, Turn, TurnResult
from tiderl.engines.torch_engine import TorchEngine

MAX_CONTEXT_TOKENS = 640
MAX_BATCH = 64
MODELS = {
    "tiny": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 1024},  # 0.9 M parameters
    "small": {"hidden": 256, "layers": 6, "heads": 4, "kv_heads": 2, "vocab_size": 4096},  # 5.8 M
}
PREFILL_TOKENS_PER_STEP = (
    2048  # beside decoding sequences too: the benchmark has no player who waits for a stalled turn
)
WEIGHT_SCALE = 2.0  # spreads the logits of an untrained model, so that the largest is never a tie
Ids = np.ndarray | Sequence[np.ndarray]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def write_model(name: str, folder: Path) -> tuple[ModelSettings, Path]:
    """A model folder with random weights; returns its settings and the weight file."""
    settings = ModelSettings(
        path="scratch", max_context_tokens=MAX_CONTEXT_TOKENS, pad_id=0, stop_ids=(1,), **MODELS[name]
    )
    config = AutoConfig.for_model(SCRATCH_MODEL_TYPE, **scratch_config(settings))
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    weights = folder / "model.safetensors"
    scaled = {
        key: value.detach() * (WEIGHT_SCALE if value.dim() > 1 else 1.0) for key, value in model.named_parameters()
    }
    save_file(scaled, weights, metadata={"format": "pt"})
    return settings, weights


class Embedded:
    """TideRL's engine through its public interface."""

    def __init__(self, model: ModelSettings, weights: Path, clock: Clock) -> None:
        self._clock = clock
        self._engine = TorchEngine(
            EngineSettings(
                model=model,
                kv_budget_tokens=2 * MAX_BATCH * MAX_CONTEXT_TOKENS,
                max_batch=MAX_BATCH,
                prefill_tokens_per_step=PREFILL_TOKENS_PER_STEP,
                prefill_tokens_beside_decoding=PREFILL_TOKENS_PER_STEP,
            )
        )
        self._engine.load_weights(WeightHandle(0, str(weights), weights.stat().st_size))
        self._prompts = 0

    @property
    def prefilled_tokens(self) -> int:
        return self._engine.stats().prefilled_tokens

    def _turn(self, task: TaskKey, at: int, ids: np.ndarray, new_tokens: int, temperature: float, retain: bool) -> Turn:
        sampling = Sampling(temperature, new_tokens, stop_ids=(), seed=MAX_BATCH * task.prompt_id + task.member)
        return Turn(task, at, ids, sampling, remaining_tokens=MAX_CONTEXT_TOKENS - len(ids), retain=retain)

    def _new_turns(self, ids: Ids, new_tokens: int, temperature: float = 1.0) -> list[Turn]:
        first = self._prompts
        self._prompts += len(ids)
        return [
            self._turn(TaskKey("train", first + number, 0), 0, row, new_tokens, temperature, False)
            for number, row in enumerate(ids)
        ]

    def _drain(self, turns: Sequence[Turn]) -> list[TurnResult]:
        for turn in turns:
            self._engine.add(turn)
        done: dict[TaskKey, TurnResult] = {}
        while self._engine.has_work():
            for result in self._engine.step():
                assert isinstance(result, TurnResult), result
                done[result.task] = result
        return [done[turn.task] for turn in turns]

    def results(self, ids: Ids, new_tokens: int, temperature: float = 1.0) -> list[TurnResult]:
        return self._drain(self._new_turns(ids, new_tokens, temperature))

    def turns(self, contexts: Mapping[tuple[int, int], np.ndarray], at: int, new_tokens: int) -> dict[Any, TurnResult]:
        """The turn number `at` of the members named by (group, member); their KV is kept."""
        first = 1_000_000  # groups apart from the prompts of the other measurements
        turns = [
            self._turn(TaskKey("train", first + group, member), at, ids, new_tokens, 1.0, True)
            for (group, member), ids in contexts.items()
        ]
        return dict(zip(contexts, self._drain(turns), strict=True))

    def sample(self, ids: np.ndarray, new_tokens: int) -> dict[str, float]:
        engine, turns = self._engine, self._new_turns(ids, new_tokens)
        prefilled_tokens = self.prefilled_tokens + ids.size
        prefilled = False
        full_steps, prefilled_s, decoded_s = 0, 0.0, 0.0
        ended = 0
        started_s = self._clock()
        for turn in turns:
            engine.add(turn)
        while engine.has_work():
            ended += len(engine.step())
            at_s = self._clock()
            if prefilled and not ended:
                full_steps, decoded_s = full_steps + 1, at_s
            elif not prefilled:
                prefilled, prefilled_s = self.prefilled_tokens == prefilled_tokens, at_s
        assert ended == len(ids)
        return {
            "decode": full_steps * len(ids) / (decoded_s - prefilled_s),
            "request": len(ids) * new_tokens / (at_s - started_s),
        }

    def prefill(self, ids: np.ndarray) -> dict[str, float]:
        turns = self._new_turns(ids, 1)
        started_s = self._clock()
        self._drain(turns)
        return {"prefill": ids.size / (self._clock() - started_s)}


class _FirstToken(LogitsProcessor):
    """Notes when the logits of the first new token were there; changes nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at_s = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.at_s = self.at_s or self._clock()
        return scores


class Generate:
    """`generate` of transformers with its default, dynamic cache; and plain forwards as the oracle."""

    def __init__(self, model: ModelSettings, weights: Path, clock: Clock) -> None:
        self.clock = clock
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(SCRATCH_MODEL_TYPE, **scratch_config(model))
        ).eval()
        self.model.load_state_dict(load_file(weights), strict=False)  # the tied head is not in the file
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def _generate(self, ids: np.ndarray, new_tokens: int, **how: Any) -> torch.Tensor:
        tensor = torch.from_numpy(ids.astype(np.int64))
        return self.model.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=new_tokens, pad_token_id=0, **how
        )

    def sample(self, ids: np.ndarray, new_tokens: int) -> dict[str, float]:
        first = _FirstToken(self.clock)
        started_s = self.clock()
        out = self._generate(
            ids,
            new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            logits_processor=LogitsProcessorList([first]),
        )
        at_s = self.clock()
        assert out.shape[1] == ids.shape[1] + new_tokens
        tokens = len(ids) * new_tokens
        return {"decode": tokens / (at_s - first.at_s), "request": tokens / (at_s - started_s)}

    def greedy(self, ids: np.ndarray, new_tokens: int) -> np.ndarray:
        return self._generate(ids, new_tokens, do_sample=False)[:, ids.shape[1] :].numpy()

    @torch.inference_mode()
    def logprobs(self, prompt: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """float32 [len(sampled)] by one forward over everything, without a cache."""
        ids = torch.from_numpy(np.concatenate([prompt, sampled]).astype(np.int64))[None]
        table = torch.log_softmax(self.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1], dim=-1)
        return table.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


class Bare:
    """One forward of the transformers model over the prompts."""

    def __init__(self, generate: Generate) -> None:
        self._model, self._clock = generate.model, generate.clock

    @torch.inference_mode()
    def prefill(self, ids: np.ndarray) -> dict[str, float]:
        started_s = self._clock()
        self._model(torch.from_numpy(ids.astype(np.int64)), use_cache=False, logits_to_keep=1)
        return {"prefill": ids.size / (self._clock() - started_s)}


class Vllm:
    """`vllm_worker.py` in a process of its own, which sleeps while the others are measured."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @staticmethod
    @contextmanager
    def beside(alternatives: dict[str, Any], python: str, folder: Path, clock: str) -> Iterator[None]:
        """Add vLLM where `python` is given or this environment has it."""
        if not python and importlib.util.find_spec("vllm") is None:
            yield
            return
        worker = Path(__file__).parent / "vllm_worker.py"
        process = subprocess.Popen(
            [python or sys.executable, str(worker), str(folder), str(MAX_CONTEXT_TOKENS), str(MAX_BATCH), clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            alternatives["vllm"] = vllm = Vllm(process)
            vllm._answer()
            yield
        finally:
            process.kill()
            process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "vLLM ended; run bench/vllm_worker.py by hand to see why"
        return json.loads(line)

    def _ask(self, ids: np.ndarray, new_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": ids.tolist(), "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def sample(self, ids: np.ndarray, new_tokens: int) -> dict[str, float]:
        answer = self._ask(ids, new_tokens)
        return {"decode": answer["decode_tokens_per_s"], "request": len(ids) * new_tokens / answer["request_s"]}

    def prefill(self, ids: np.ndarray) -> dict[str, float]:
        return {"prefill": ids.size / self._ask(ids, 1)["prefill_s"]}
