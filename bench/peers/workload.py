"""One workload for every trainer compared: the same prompts in the same order, waits, turns, batch and objective.

Keeps the comparison fair: what is equal is said here once, and both sides read it. Imports no torch, so that the other
trainer's virtual environment needs of TideRL only msgspec and numpy. Must not know who trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from tiderl.data.records import Observation, Prompt, TaskKey
from tiderl.data.settings import WaitProfile
from tiderl.envs.builtin import Fetch
from tiderl.envs.waits import wait_s
from tiderl.runtime.prompts import prompt_stream
from tiderl.text.words import WordsRenderer

SEED = 0
GROUPS, GROUP_SIZE = 8, 8
ROLLOUTS = GROUPS * GROUP_SIZE
"""Of one update."""
MAX_TURNS, MAX_CONTEXT_TOKENS, MAX_NEW_TOKENS_PER_TURN = 16, 384, 4
TEMPERATURE = 1.0
LR, KL_COEF, MAX_GRAD_NORM = 3.0e-4, 0.01, 1.0
DEADLINE_S = 30.0
"""Longer than any wait of the profiles below but one of many thousands."""

MODEL = {"path": "scratch", "tokenizer": "words", "layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2}
WARMUP = {"demos": 60, "updates": 40, "lr": 1.0e-3}
"""A weak start, about a quarter of the tasks: long and short trajectories in each batch."""

WAITS: dict[str, WaitProfile | None] = {
    "0": None,
    "50ms": WaitProfile(median_s=0.05, sigma=0.0),
    "500ms": WaitProfile(median_s=0.5, sigma=0.0),
    "heavy": WaitProfile(median_s=0.2, sigma=1.2, tail_fraction=0.03, tail_s=(3.0, 8.0)),
}
"""By name on the command line. Sigma 0 is a constant wait."""


def prompts() -> Iterator[Prompt]:
    """Endless, in the order in which a run with `SEED` issues them."""
    return prompt_stream(Fetch.prompts("train"), SEED, {})


def first_prompts(count: int) -> list[Prompt]:
    return list(islice(prompts(), count))


def waited_s(wait: str, prompt_id: int, member: int, turn: int) -> float:
    """Seconds that this step's environment takes: what a run with `SEED` waits at the same place."""
    profile = WAITS[wait]
    return 0.0 if profile is None else wait_s(profile, SEED, TaskKey("train", prompt_id, member), turn)


def wait_key(wait: str) -> str | dict[str, Any]:
    """The configuration's `env.wait`."""
    profile = WAITS[wait]
    if profile is None:
        return "none"
    return {
        "kind": "lognormal",
        "median_s": profile.median_s,
        "sigma": profile.sigma,
        "tail_fraction": profile.tail_fraction,
        "tail_s": list(profile.tail_s),
    }


def configuration(
    *, wait: str, updates: int, strategy: str, ranks: int, model: str | None, cluster: str = "process"
) -> dict[str, Any]:
    """TideRL's configuration. `model`: the folder that every trainer starts from; None makes one, by warm-up."""
    return {
        "seed": SEED,
        "model": MODEL if model is None else {"path": model, "tokenizer": "words"},
        "warmup": WARMUP if model is None else {"demos": 0, "updates": 0},
        "env": {
            "name": "builtin",
            "isolation": "pool",
            "workers": 1,
            "deadline_s": DEADLINE_S,
            "wait": wait_key(wait),
        },
        "rollout": {
            "max_turns": MAX_TURNS,
            "max_context_tokens": MAX_CONTEXT_TOKENS,
            "max_new_tokens_per_turn": MAX_NEW_TOKENS_PER_TURN,
            "temperature": TEMPERATURE,
        },
        "algorithm": {"advantage": "group", "group_size": GROUP_SIZE, "kl_coef": KL_COEF},
        "train": {"updates": updates, "global_batch_groups": GROUPS, "micro_batch_tokens": 4096, "lr": LR},
        "schedule": {"strategy": strategy, "max_staleness": 1},
        "cluster": {"kind": cluster, "ranks": ranks},
        "checkpoint": {"every_updates": updates},
        "eval": {"every_updates": 0},
    }


def prompt_tokens(updates: int) -> float:
    """Tokens of the first observation in the workload's words, mean over the prompts of so many updates."""
    words = WordsRenderer.from_vocabulary(Fetch.vocabulary())
    firsts = [Observation.text(Fetch().reset(prompt)) for prompt in first_prompts(updates * GROUPS)]
    return sum(len(words.begin(first)) for first in firsts) / len(firsts)
