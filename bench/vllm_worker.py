"""vLLM in a process of its own, for `bench/engine.py --vllm PYTHON`: in-process engine, eager, one thread.

    PYTHON bench/vllm_worker.py MODEL_FOLDER MAX_CONTEXT_TOKENS MAX_BATCH wall|cpu

Reads one JSON object a line, `{"prompts": [[id, …], …], "new_tokens": n}`, and answers each with one line: seconds to
the first tokens of all, seconds in all, and tokens per second while all decode. Knows nothing of TideRL: it runs in an
environment that may not have it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

KV_BLOCK_TOKENS = 32  # the smallest that vLLM's attention takes on a CPU


def engine(folder: str, max_context_tokens: int, max_batch: int) -> Any:
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the others are not bound to a core either
    from vllm import LLM

    return LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=max_context_tokens,
        max_num_seqs=max_batch,
        enforce_eager=True,
        block_size=KV_BLOCK_TOKENS,
        distributed_executor_backend="uni",  # with the environment above: one process, no channel
        disable_log_stats=True,
    ).llm_engine


def measure(
    llm_engine: Any, clock: Any, prompts: list[list[int]], new_tokens: int, first_name: int
) -> dict[str, float]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    started_s = clock()
    for number, ids in enumerate(prompts):
        llm_engine.add_request(str(first_name + number), {"prompt_token_ids": ids}, sampling)
    begun: set[str] = set()
    prefilled_s = decoded_s = 0.0
    full_steps = 0  # in which every prompt got a token and none ended
    ended = False
    while llm_engine.has_unfinished_requests():
        outputs = llm_engine.step()
        now_s = clock() - started_s
        ended = ended or any(output.finished for output in outputs)
        if len(begun) == len(prompts) and not ended:
            full_steps, decoded_s = full_steps + 1, now_s
        elif len(begun) < len(prompts):
            begun.update(output.request_id for output in outputs)
            prefilled_s = now_s
    return {
        "prefill_s": prefilled_s,
        "request_s": clock() - started_s,
        "decode_tokens_per_s": full_steps * len(prompts) / (decoded_s - prefilled_s) if full_steps else 0.0,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not an answer
    folder, max_context_tokens, max_batch, clock_name = sys.argv[1:]
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[clock_name]
    llm_engine = engine(folder, int(max_context_tokens), int(max_batch))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    names = 0
    for line in sys.stdin:
        asked = json.loads(line)
        answer = measure(llm_engine, clock, asked["prompts"], asked["new_tokens"], names)
        names += len(asked["prompts"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
