"""How fast the embedded engine samples, beside `generate` of transformers, a bare forward, and vLLM.

    OMP_NUM_THREADS=1 python bench/engine.py [--rounds 5] [--only NAME …] [--vllm PYTHON] [--clock cpu]
                                            [--json]
    python bench/engine.py --short

One thread, float32, random Qwen3 models of 0.9 M and 5.8 M parameters from one weight file, temperature 1.0, no stop
ids. All alternatives run in turn, on prompts new in each round; figures are medians over the rounds (min to max).
The engine is driven by `add` and `step`, so its scheduler, requests and log-probs are included. Three figures:

    decode    tokens per second while the whole batch decodes: after the last first token, before the first end
    request   new tokens per second from the first `add` (the call of `generate`) to the last token, prefill included
    prefill   prompt tokens per second to the first tokens of all (max_new_tokens 1); the bare forward computes the
              logits of the last position only, and keeps no KV

`--clock cpu` counts the process's own seconds, for a busy machine; on an idle one they are the same.
vLLM: eager, in one process, log-probs on; `--vllm PYTHON` runs it by another environment's Python.
`--short` takes seconds and checks numbers, not speed: ids and log-probs are those of transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from alternatives import CLOCKS, MODELS, Bare, Embedded, Generate, Vllm, write_model

BATCHES = (1, 8, 32, 64)
CONTEXTS = (32, 512)
NEW_TOKENS = 64
PREFILLS = ((1, 32), (8, 32), (32, 32), (1, 512), (8, 512))  # (sequences, tokens of each)
LOGPROB_TOLERANCE = 1e-5
GROUPS, MEMBERS, TURNS, PROMPT_TOKENS, OBSERVATION_TOKENS, TURN_TOKENS = 8, 8, 4, 200, 30, 24
CACHED_LIMIT = 0.95  # of the old context, in later turns
LIMITS = {"generate": 1.0, "bare": 0.9, "long": 0.5}  # what the engine must reach, as a ratio

Figures = dict[str, dict[str, list[float]]]  # case -> "alternative figure" -> one value a round


def prompts(rng: np.random.Generator, batch: int, tokens: int, vocab_size: int) -> np.ndarray:
    """int32 [batch, tokens]; new ones each time, so that nobody finds an old prefix."""
    return rng.integers(2, vocab_size, (batch, tokens), dtype=np.int32)


def cases(alternatives: dict[str, Any], rng: np.random.Generator, vocab_size: int) -> Iterator[tuple[str, str, Any]]:
    """(case, alternative, its measurement), in the order of one round."""
    for context in CONTEXTS:
        for batch in BATCHES:
            ids = prompts(rng, batch, context, vocab_size)
            for name in ("engine", "generate", "vllm"):
                if name in alternatives:
                    yield f"decode {context} {batch}", name, lambda a=alternatives[name], i=ids: a.sample(i, NEW_TOKENS)
    for batch, tokens in PREFILLS:
        ids = prompts(rng, batch, tokens, vocab_size)
        for name in ("engine", "bare", "vllm"):
            if name in alternatives:
                yield f"prefill {tokens} {batch}", name, lambda a=alternatives[name], i=ids: a.prefill(i)


def measure(alternatives: dict[str, Any], vocab_size: int, rounds: int, report: Callable[[str], None]) -> Figures:
    """One unmeasured round, then `rounds`."""
    figures: Figures = defaultdict(lambda: defaultdict(list))
    rng = np.random.default_rng(0)
    for number in range(-1, rounds):
        started_s = time.perf_counter()
        for case, name, run in cases(alternatives, rng, vocab_size):
            for figure, value in run().items():
                if number >= 0:
                    figures[case][f"{name} {figure}"].append(value)
        report(f"round {number + 1} of {rounds}: {time.perf_counter() - started_s:.0f} s")
    return figures


def agents(engine: Embedded, vocab_size: int) -> dict[str, float]:
    """Groups of agents over several turns without memory pressure: what of their contexts was prefilled again."""
    rng = np.random.default_rng(1)
    contexts = {
        (group, member): shared
        for group, shared in enumerate(prompts(rng, GROUPS, PROMPT_TOKENS, vocab_size))
        for member in range(MEMBERS)
    }
    before, old_tokens, cached_tokens, prompt_prefilled_tokens = engine.prefilled_tokens, 0, 0, 0
    for turn in range(TURNS):
        results = engine.turns(contexts, turn, TURN_TOKENS)
        if turn == 0:
            prompt_prefilled_tokens = engine.prefilled_tokens - before
        else:
            old_tokens += sum(len(ids) - OBSERVATION_TOKENS for ids in contexts.values())
            cached_tokens += sum(result.cached_tokens for result in results.values())
        for key, result in results.items():
            observation = prompts(rng, 1, OBSERVATION_TOKENS, vocab_size)[0]
            contexts[key] = np.concatenate([contexts[key], result.ids, observation])
    return {
        "cached_fraction_of_old_context": cached_tokens / old_tokens,
        "prompt_prefills_per_group": prompt_prefilled_tokens / (GROUPS * PROMPT_TOKENS),
    }


def check_numbers(engine: Embedded, generate: Generate, vocab_size: int) -> float:
    """Raises `AssertionError` unless greedy ids are those of `generate` and every log-prob that of a forward without a
    cache. Returns the largest difference of a log-prob."""
    rng = np.random.default_rng(2)
    worst = 0.0
    for batch, tokens in ((1, 32), (8, 32), (3, 300)):
        ids = prompts(rng, batch, tokens, vocab_size)
        greedy = engine.results(ids, 16, temperature=0.0)
        expected = generate.greedy(ids, 16)
        assert np.array_equal([result.ids for result in greedy], expected), f"greedy ids differ at {batch} x {tokens}"
        uneven = [row[: tokens - 3 * number] for number, row in enumerate(ids)]
        for prompt, result in zip(uneven, engine.results(uneven, 16), strict=True):
            gap = np.abs(generate.logprobs(prompt, result.ids) - result.logprobs).max()
            assert gap <= LOGPROB_TOLERANCE, f"a log-prob differs by {gap} at {batch} x {tokens}"
            worst = max(worst, float(gap))
    return worst


def summary(figures: Figures) -> dict[str, dict[str, Any]]:
    """Per case: median, least and greatest of each figure, and the engine's median over each alternative's."""
    table: dict[str, dict[str, Any]] = {}
    for case, values in figures.items():
        row: dict[str, Any] = {
            name: [statistics.median(v), min(v), max(v)] for name, v in values.items() if statistics.median(v) > 0
        }
        for name in tuple(row):
            alternative, figure = name.split(" ")
            if alternative != "engine":
                row[f"engine / {name}"] = row[f"engine {figure}"][0] / row[name][0]
        table[case] = row
    return table


def missed(table: dict[str, dict[str, Any]]) -> list[str]:
    """Which of the limits this machine did not see kept."""
    found = []
    for case, row in table.items():
        kind, tokens, batch = case.split(" ")
        if kind == "prefill" and row["engine / bare prefill"] < LIMITS["bare"]:
            found.append(f"{case}: {row['engine / bare prefill']:.2f} x the bare forward")
        if kind == "decode" and batch in ("8", "32"):
            found += [
                f"{case}: {row[f'engine / generate {figure}']:.2f} x generate ({figure})"
                for figure in ("decode", "request")
                if row[f"engine / generate {figure}"] < LIMITS["generate"]
            ]
        if kind == "decode" and tokens == "512":
            share = row["engine decode"][0] / table[f"decode 32 {batch}"]["engine decode"][0]
            if share < LIMITS["long"]:
                found.append(f"{case}: {share:.2f} of the rate at 32")
    return found


def show(model: str, table: dict[str, dict[str, Any]]) -> None:
    print(f"\n{model}")
    for case, row in table.items():
        for name, value in row.items():
            if isinstance(value, list):
                print(f"  {case:14}  {name:18} {value[0]:9.0f}  ({value[1]:.0f} to {value[2]:.0f})")
            else:
                print(f"  {case:14}  {name:32} {value:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=tuple(MODELS))
    parser.add_argument("--vllm", metavar="PYTHON", default="", help="Python of an environment with vLLM")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    for model in arguments.only:
        with tempfile.TemporaryDirectory(prefix="tiderl-bench-") as folder:
            settings, weights = write_model(model, Path(folder))
            clock = CLOCKS[arguments.clock]
            engine, generate = Embedded(settings, weights, clock), Generate(settings, weights, clock)
            vocab_size = settings.vocab_size
            one = out[model] = {"logprob_gap": check_numbers(engine, generate, vocab_size)}
            one["agents"] = agents(engine, vocab_size)
            assert one["agents"]["cached_fraction_of_old_context"] >= CACHED_LIMIT, one["agents"]
            if arguments.short:
                continue
            alternatives = {"engine": engine, "generate": generate, "bare": Bare(generate)}
            with Vllm.beside(alternatives, arguments.vllm, Path(folder), arguments.clock):
                figures = measure(alternatives, vocab_size, arguments.rounds, lambda t: print(t, file=sys.stderr))
            one["speed"] = summary(figures)
            one["missed"] = missed(one["speed"])
    if arguments.json or arguments.short:
        print(json.dumps(out))
        return
    for model, one in out.items():
        show(model, one["speed"])
        print(f"  agents: {one['agents']}\n  largest log-prob difference: {one['logprob_gap']:.1e}")
        print(f"  below a limit: {', '.join(one['missed']) or 'nothing'}")


if __name__ == "__main__":
    main()
