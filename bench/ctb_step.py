"""One rollout step of 1,312 tasks on one simulated H100: CTB beside the request-level cache, uncapped and capped.

    python bench/ctb_step.py [--cases A B …] [--medians 0.05 0.6 3] [--seeds 10] [--json]
    python bench/ctb_step.py --sweep            # concurrency 64 to 2,048
    python bench/ctb_step.py --short

The honest rival is `lru` with the best count cap of a sweep: env.slots is that cap. `infinite` is the same step with a
pool that holds everything: its hit fraction is the structural maximum. All figures are of virtual time: another machine
prints the same. Fixed before the first measurement; never tuned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tiderl.api.virtual import kept, simulated_world
from tiderl.config.machine import prepare

TASKS = 1312
GROUP = 8
CONTEXT = 8192
POOL = 900_000
CAPS = (192, 256, 320, 384, 448, 512, 640)
MEDIANS = (0.05, 0.6, 3.0)
SWEEP = (64, 128, 256, 384, 512, 768, 1024, 1312, 1664, 2048)

CASES: dict[str, dict[str, float]] = {
    "A": {"turns_median": 8.3, "action_tokens": 100, "observation_tokens": 250},  # 9.3 turns on average
    "B": {"turns_median": 8.0, "action_tokens": 50, "observation_tokens": 250},  # 9.0
    "C": {"turns_median": 11.5, "action_tokens": 150, "observation_tokens": 300},  # 12
    "D": {"turns_median": 6.3, "action_tokens": 60, "observation_tokens": 150},  # 7.2
    "E": {"turns_median": 8.3, "action_tokens": 100, "observation_tokens": 250},  # as A, with shared prompts
}
SHARED = ("E",)
"""Cases in which the engine keeps what a group begins with, 400 of 500 tokens being the same for all, once."""


def config(case: str, median_s: float, seed: int, tasks: int) -> dict[str, Any]:
    """The file of one step; targets: 1 H100, a 7B model, WebShop-like tasks."""
    return {
        "seed": seed,
        "model": {"path": "scratch"},
        "warmup": {"demos": 0},
        "env": {
            "name": "builtin",
            "deadline_s": 300,
            "wait": {"kind": "lognormal", "median_s": 1e-4, "sigma": 0.0, "tail_fraction": 0.002, "tail_s": [30, 120]},
        },
        "rollout": {
            "max_turns": 20,
            "max_context_tokens": CONTEXT,
            "max_new_tokens_per_turn": 512,
            "kv_budget_tokens": POOL,
        },
        "algorithm": {"group_size": GROUP, "kl_coef": 0.0},
        "train": {"updates": 1, "global_batch_groups": tasks // GROUP, "micro_batch_tokens": 65536},
        "schedule": {"strategy": "sync"},
        "cluster": {"ranks": 1},
        "eval": {"every_updates": 0},
        "sim": {
            "hardware": "H100",
            "model": "Qwen2.5-7B",
            "workload": {
                **CASES[case],
                "turns_sigma": 0.55,
                "group_correlation": 0.6,
                "first_observation_tokens": 500,
                "observation_sigma": 0.0,
                "action_sigma": 0.0,
                "step_s": median_s,
                "step_sigma": 1.0,
                "reset_s": 2.0,
                "system_tokens": 400 if case in SHARED else 32,
            },
            "cost": {
                "iteration_s": 7.5e-3,
                "sequence_s": 40e-6,
                "context_token_s": 29e-9,
                "prefill_token_s": 35e-6,
                "reference_token_s": 0.0,
                "forward_token_s": 1e-9,
                "backward_token_s": 0.0,
                "optimizer_s": 0.0,
                "publish_s": 0.0,
                "load_s": 0.0,
                "max_batch": 256,
            },
        },
    }


def step(case: str, policy: str, median_s: float, seed: int, *, tasks: int = TASKS, cap: int = 0) -> dict[str, Any]:
    """One arm. `policy`: lru, ctb or infinite; `cap`: tasks in flight at most, 0 for all."""
    values = config(case, median_s, seed, tasks)
    values["rollout"]["kv_policy"] = "ctb" if policy == "ctb" else "lru"
    if cap:
        values["env"]["slots"] = cap
    if policy == "infinite":
        values["rollout"]["kv_budget_tokens"] = tasks * CONTEXT
        values["sim"]["cost"]["kv_capacity_tokens"] = tasks * CONTEXT
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.yaml")
        path.write_text(yaml.safe_dump(values))
        resolved = prepare(str(path), [], command="sim")
        world = simulated_world(resolved)
        if case not in SHARED:  # nothing is: as with an engine that hashes no prompts
            world = replace(world, engine=msgspec.structs.replace(world.engine, min_shared_tokens=CONTEXT))
        found: dict[str, Any] = kept(resolved, world, None, lambda run: run.result(0.0, {})).to_json()
    return {
        "seconds": found["clock_s"],
        "hit": found["kv_hit_fraction"],
        "tokens_per_s": found["goodput_tokens_per_s"],
        "retention_ratio": found.get("kv_retention_ratio"),
    }


def compared(case: str, median_s: float, seeds: Sequence[int]) -> dict[str, Any]:
    """All arms of one case, means over the seeds; the best cap is that of the least mean."""

    def mean(policy: str, cap: int = 0) -> dict[str, float]:
        runs = [step(case, policy, median_s, seed, cap=cap) for seed in seeds]
        return {key: statistics.fmean(run[key] for run in runs) for key in ("seconds", "hit", "tokens_per_s")}

    arms = {"lru": mean("lru"), "ctb": mean("ctb"), "infinite": mean("infinite")}
    caps = {cap: mean("lru", cap) for cap in CAPS}
    best = min(caps, key=lambda cap: caps[cap]["seconds"])
    return {
        "case": case,
        "median_s": median_s,
        "seeds": len(seeds),
        **arms,
        "best_cap": best,
        "capped": caps[best],
        "hit_of_structural": arms["ctb"]["hit"] / arms["infinite"]["hit"],
        "seconds_of_lru": arms["ctb"]["seconds"] / arms["lru"]["seconds"],
        "seconds_of_capped": arms["ctb"]["seconds"] / caps[best]["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--medians", nargs="+", type=float, default=list(MEDIANS), help="of the environment, seconds")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sweep", action="store_true", help="tokens per second over the number of tasks offered")
    parser.add_argument("--short", action="store_true", help="one small step of each arm")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.short:
        rows = [{"policy": policy, **step("B", policy, 0.6, 0, tasks=160)} for policy in ("lru", "ctb")]
    elif args.sweep:
        for tasks in SWEEP:
            arms = {policy: step("B", policy, 0.6, 0, tasks=tasks) for policy in ("lru", "ctb")}
            rows.append({"tasks": tasks, **{f"{p}_{k}": v for p, arm in arms.items() for k, v in arm.items()}})
            print(rows[-1], file=sys.stderr)
    else:
        for case in args.cases:
            for median_s in args.medians:
                rows.append(compared(case, median_s, range(args.seeds)))
                print(rows[-1], file=sys.stderr)
    print(json.dumps(rows, indent=1) if args.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
