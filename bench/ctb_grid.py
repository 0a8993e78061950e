"""Continuous task batching beside request-level LRU over pools and waits, in virtual time: the grid of `bench/ctb.py`.

    python bench/ctb_grid.py [--seeds 5] [--json]          about two minutes on one core
    python bench/ctb_grid.py --short                       one cell, one seed

A small engine on a CPU (`COST`): every iteration costs 3 ms and 0.37 ms for each sequence, a token of context 33 us, as
was measured of the `tiny` model there. 128 tasks in 16 groups, about 8 turns, prompts of 128 tokens, waits lognormal
(sigma 1.2) with 3 % of 15 to 40 times the median. Figures are exact, and another machine prints the same; the spread
over seeds says how much of a difference is luck: one task that starts late and waits long moves a step by several
percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tiderl.api.virtual import kept, simulated_world
from tiderl.config.machine import prepare

POOLS = (2.0, 1.0, 1 / 3, 1 / 6, 1 / 12)
MEDIANS_S = (0.02, 0.1, 0.3, 1.0)
CONTEXT, GROUPS, GROUP = 608, 16, 8
NEED_TOKENS = GROUPS * GROUP * 487
POLICIES = ("lru", "ctb")
WORST = 1.02
COST = {
    "iteration_s": 3.0e-3,
    "sequence_s": 3.7e-4,
    "context_token_s": 0.0,
    "prefill_token_s": 33e-6,
    "kv_reload_token_s": 0.0,
    "reference_token_s": 0.0,
    "forward_token_s": 1e-9,
    "backward_token_s": 0.0,
    "optimizer_s": 0.0,
    "publish_s": 0.0,
    "load_s": 0.0,
    "max_batch": 64,
}


def config(pool: float, median_s: float, seed: int, policy: str) -> dict[str, Any]:
    """One step of one policy."""
    wait = {"kind": "lognormal", "median_s": median_s, "sigma": 1.2, "tail_fraction": 0.03}
    return {
        "seed": seed,
        "model": {"path": "scratch"},
        "warmup": {"demos": 0},
        "env": {
            "name": "builtin",
            "deadline_s": 3000,
            "wait": {**wait, "tail_s": [15 * median_s, 40 * median_s]},
        },
        "rollout": {
            "max_turns": 10,
            "max_context_tokens": CONTEXT,
            "max_new_tokens_per_turn": 16,
            "kv_budget_tokens": max(2 * CONTEXT, int(NEED_TOKENS * pool)),
            "kv_policy": policy,
        },
        "algorithm": {"group_size": GROUP, "kl_coef": 0.0},
        "train": {"updates": 1, "global_batch_groups": GROUPS, "micro_batch_tokens": 65536},
        "schedule": {"strategy": "sync"},
        "cluster": {"ranks": 1},
        "eval": {"every_updates": 0},
        "sim": {
            "hardware": "H100",
            "model": "Qwen2.5-7B",
            "workload": {
                "turns_median": 7.5,
                "turns_sigma": 0.18,
                "action_tokens": 16,
                "action_sigma": 0.0,
                "observation_tokens": 32,
                "observation_sigma": 0.0,
                "first_observation_tokens": 96,
                "system_tokens": 32,
                "group_correlation": 0.0,
                "step_s": 1e-4,
                "step_sigma": 0.0,
                "reset_s": 1e-4,
            },
            "cost": COST,
        },
    }


def step(pool: float, median_s: float, seed: int, policy: str) -> tuple[float, float]:
    """Seconds of the step, and the hit fraction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.yaml")
        path.write_text(yaml.safe_dump(config(pool, median_s, seed, policy)))
        resolved = prepare(str(path), [], command="sim")
        found = kept(resolved, simulated_world(resolved), None, lambda run: run.result(0.0, {})).to_json()
    return found["clock_s"], found["kv_hit_fraction"]


def cell(pool: float, median_s: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Means over the seeds; `ratios`: ctb / lru of each."""
    runs = {policy: [step(pool, median_s, seed, policy) for seed in seeds] for policy in POLICIES}
    means = {
        policy: [statistics.fmean(run[part] for run in found) for part in (0, 1)] for policy, found in runs.items()
    }
    return {
        "pool": pool,
        "median_s": median_s,
        **{f"{policy}_s": means[policy][0] for policy in POLICIES},
        **{f"{policy}_hit": means[policy][1] for policy in POLICIES},
        "ratio": means["ctb"][0] / means["lru"][0],
        "ratios": [ctb[0] / lru[0] for lru, ctb in zip(*(runs[policy] for policy in POLICIES), strict=True)],
    }


def row(found: dict[str, Any]) -> str:
    both = "   ".join(f"{policy} {found[f'{policy}_s']:7.2f} s ({found[f'{policy}_hit']:.2f})" for policy in POLICIES)
    spread = f"{min(found['ratios']):.2f} to {max(found['ratios']):.2f}"
    mark = "" if found["ratio"] <= WORST else f"   above {WORST}"
    return f"{found['pool']:6.3f} {found['median_s']:5.2f} s   {both}   {found['ratio']:.3f} ({spread}){mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    cells = [(1 / 6, 0.1)] if given.short else [(pool, median_s) for pool in POOLS for median_s in MEDIANS_S]
    found = []
    for pool, median_s in cells:
        found.append(cell(pool, median_s, range(1 if given.short else given.seeds)))
        if not given.json:
            print(row(found[-1]), flush=True)
    if given.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
