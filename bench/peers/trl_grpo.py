"""TRL's GRPOTrainer on the shared workload: one arm, one wait, one process; prints one JSON object as its last line.

Run it in a virtual environment of its own, which holds no TideRL:

    python3.11 -m venv trl-venv
    trl-venv/bin/pip install torch==2.13.0
    trl-venv/bin/pip install -r bench/peers/requirements.txt
    trl-venv/bin/python bench/peers/trl_grpo.py --arm lockstep --wait heavy --updates 4 --model FOLDER

`bench/peers/compare.py` makes FOLDER and runs this beside TideRL. The clock goes from the first rollout to the last
optimizer step; loading is outside. Tokens are those that bear loss. Arms:

`lockstep`: `rollout_func`, the workload's own words and weights. Each turn is one `generate` call of transformers over
the open rollouts, with their whole contexts; all environments step at the same time.
`environment_factory`: the environment's action is a tool. Words cannot say tool calls, so this arm has a tokenizer and
a start model of its own (`tools.py`), of the same layers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import lockstep
import torch
import workload
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ARMS = ("lockstep", "environment_factory")


class Account(TrainerCallback):
    """Seconds and loss-bearing tokens of the whole run, by the trainer's own figures."""

    def __init__(self) -> None:
        self.started_s = self.ended_s = 0.0
        self.update_s: list[float] = []
        self.loss_tokens = 0
        self.logged: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.started_s:
            self.started_s = self.ended_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now_s = time.perf_counter()
        self.update_s.append(now_s - self.ended_s)
        self.ended_s = now_s

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        # The trainer counts what the policy sampled (its tool mask or the rollout function's env_mask) per rollout.
        if logs and "completions/mean_length" in logs:
            self.loss_tokens += round(logs["completions/mean_length"] * workload.ROLLOUTS)
            self.logged.append(logs)

    def mean(self, name: str) -> float | None:
        values = [logs[name] for logs in self.logged if name in logs]
        return sum(values) / len(values) if values else None


def settings(folder: str, updates: int, **others: Any) -> GRPOConfig:
    """The workload's objective and batch: one optimizer step over all groups, in one micro-batch, as TideRL packs it.
    What would only cost time here (checkpoints, gradient checkpointing) is off."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=updates,
        per_device_train_batch_size=workload.ROLLOUTS,
        gradient_accumulation_steps=1,
        num_generations=workload.GROUP_SIZE,
        temperature=workload.TEMPERATURE,
        beta=workload.KL_COEF,
        loss_type="dapo",  # the mean over the loss-bearing tokens of the step
        learning_rate=workload.LR,
        lr_scheduler_type="constant",
        max_grad_norm=workload.MAX_GRAD_NORM,
        weight_decay=0.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=workload.SEED,
        **others,
    )


def run_lockstep(model: str, wait: str, updates: int, folder: str) -> dict[str, Any]:
    words = lockstep.renderer()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.convert_ids_to_tokens(list(range(len(words.words)))) != list(words.words):
        raise SystemExit(f"{model}: its tokenizer is not that of the workload")
    prompts = workload.first_prompts(updates * workload.GROUPS)
    played: list[lockstep.Rollout] = []

    def rollout(numbers: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        members = [(int(n), place % workload.GROUP_SIZE, prompts[int(n)]) for place, n in enumerate(numbers)]
        policy = trainer.accelerator.unwrap_model(trainer.model)
        rollouts = lockstep.play(
            members,
            wait=wait,
            words=words,
            generate=lambda contexts: sample(policy, contexts, words.pad_id, list(words.stop_ids)),
            sleep=time.sleep,
        )
        played.extend(rollouts)
        return {
            "prompt_ids": [one.prompt_ids for one in rollouts],
            "completion_ids": [one.completion_ids for one in rollouts],
            "logprobs": None,  # the trainer computes them anew
            "env_mask": [one.mask for one in rollouts],
            "rollout_reward": [one.reward for one in rollouts],
        }

    def reward(rollout_reward: list[float], **_: Any) -> list[float]:
        return rollout_reward

    account = Account()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        rollout_func=rollout,
        args=settings(folder, updates, max_completion_length=workload.MAX_CONTEXT_TOKENS),
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(prompts))]}),
        callbacks=[account],
    )
    trainer.train()
    result = figures(account)
    if result["loss_tokens"] != sum(sum(one.mask) for one in played):
        raise SystemExit("the trainer consumed other tokens than the rollout function gave")
    return result | {
        "prompt_tokens": sum(len(one.prompt_ids) for one in played) / len(played),
        "turns": sum(one.turns for one in played) / len(played),
        "rollout_tokens": sum(len(one.context) for one in played) / len(played),
    }


@torch.no_grad()
def sample(policy: Any, contexts: list[list[int]], pad_id: int, stop_ids: list[int]) -> list[list[int]]:
    """One turn for each context: left-padded, in one call. What follows the first stop token is cut off."""
    longest = max(map(len, contexts))
    ids = torch.tensor([[pad_id] * (longest - len(context)) + context for context in contexts])
    mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
    out = policy.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=workload.TEMPERATURE,
        top_k=0,
        top_p=1.0,
        max_new_tokens=workload.MAX_NEW_TOKENS_PER_TURN,
        eos_token_id=stop_ids,
        pad_token_id=pad_id,
    )
    return [lockstep.until_stop(row, stop_ids) for row in out[:, longest:].tolist()]


def run_environment_factory(model: str, wait: str, updates: int, folder: str) -> dict[str, Any]:
    import tools

    start = tools.start_model(Path(model))
    tokenizer = AutoTokenizer.from_pretrained(start)
    prompts = workload.first_prompts(updates * workload.GROUPS)
    account = Account()
    trainer = GRPOTrainer(
        model=str(start),
        processing_class=tokenizer,
        environment_factory=tools.factory(wait, prompts),
        args=settings(
            folder,
            updates,
            max_completion_length=tools.MAX_COMPLETION_TOKENS,
            max_tool_calling_iterations=workload.MAX_TURNS,
            # Without it every turn may go on to max_completion_length.
            generation_kwargs={"max_new_tokens": tools.MAX_NEW_TOKENS_PER_TURN},
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": ""}]] * len(prompts), "number": list(range(len(prompts)))}
        ),
        callbacks=[account],
    )
    trainer.train()
    shown = [tools.prompt_tokens(tokenizer, prompt) for prompt in prompts]
    return figures(account) | {
        "prompt_tokens": sum(shown) / len(shown),
        "turns": account.mean("tools/call_frequency"),
        "failed_call_fraction": account.mean("tools/failure_frequency"),
    }


def figures(account: Account) -> dict[str, Any]:
    seconds = account.ended_s - account.started_s
    updates = len(account.update_s)
    return {
        "updates": updates,
        "seconds": seconds,
        "update_s": seconds / updates,
        "loss_tokens": account.loss_tokens,
        "tokens_per_s": account.loss_tokens / seconds,
        "rollouts_per_s": updates * workload.ROLLOUTS / seconds,
        "loss_tokens_per_rollout": account.loss_tokens / (updates * workload.ROLLOUTS),
        "reward": account.mean("reward"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--wait", choices=list(workload.WAITS), default="heavy")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--model", required=True, help="the start model's folder, saved by TideRL")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    run = run_lockstep if arguments.arm == "lockstep" else run_environment_factory
    with tempfile.TemporaryDirectory() as folder:
        result = run(arguments.model, arguments.wait, arguments.updates, folder)
    print(json.dumps({"arm": arguments.arm, "wait": arguments.wait, "threads": arguments.threads, **result}))


if __name__ == "__main__":
    main()
