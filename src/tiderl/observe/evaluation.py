"""What an evaluation says of a model: success with its uncertainty, best of n, and what failures were like.

Pure arithmetic over finished trajectories. Uncertainty counts prompts, never samples of one prompt: those are not
independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tiderl.data.records import Trajectory
from tiderl.observe.words import count, duration, fraction, number

FAILURES = {
    "terminated": "ended without success",
    "truncated": "cut short by the environment",
    "budget_turns": "out of turns",
    "budget_tokens": "out of tokens",
}
Z_95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


def wilson(mean: float, trials: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a success probability whose estimate over `trials` prompts is `mean`.

    With several samples a prompt `mean` is the mean of the prompts' pass rates; their variance is at most that of a
    single trial, so the interval is then wider than need be. (0, 1) without trials.
    """
    if trials == 0:
        return 0.0, 1.0
    z2 = Z_95**2
    centre = (mean + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 / (1 + z2 / trials) * math.sqrt(mean * (1 - mean) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def best_of(successes: int, samples: int, k: int) -> float:
    """Probability that k of a prompt's samples, drawn without replacement, hold a success: 1 − C(n − c, k) ÷ C(n, k)
    (the unbiased estimate of arXiv 2107.03374)."""
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def judge(trajectories: Sequence[Trajectory], *, samples: int) -> dict[str, Any]:
    """Figures over finished episodes; those lost to faults are in none. A prompt with fewer than k episodes left is
    not in `best_of[k]`."""
    by_prompt: dict[int, list[bool]] = {}
    for trajectory in trajectories:
        by_prompt.setdefault(trajectory.key.prompt_id, []).append(trajectory.success)
    rates = [sum(outcomes) / len(outcomes) for outcomes in by_prompt.values()]
    success = _mean(rates)
    low, high = wilson(success or 0.0, len(rates))
    failures = Counter(trajectory.ending for trajectory in trajectories if not trajectory.success)
    return {
        "prompts": len(rates),
        "samples": samples,
        "episodes": len(trajectories),
        "successes": sum(trajectory.success for trajectory in trajectories),
        "success": success,
        "success_low": low,
        "success_high": high,
        "best_of": {str(k): _best_of(by_prompt.values(), k) for k in _powers(samples)},
        "failures": dict(sorted(failures.items())),
        "reward_mean": _mean([trajectory.reward for trajectory in trajectories]),
        "turns_mean": _mean([len(trajectory.turns) for trajectory in trajectories]),
        "tokens_mean": _mean([trajectory.tokens for trajectory in trajectories]),
        "sampled_tokens_mean": _mean([trajectory.loss_tokens for trajectory in trajectories]),
    }


def worth_showing(trajectories: Sequence[Trajectory], amount: int) -> list[Trajectory]:
    """The first `amount`, failures before successes, each in the order of the prompts."""
    return sorted(trajectories, key=lambda t: (t.success, t.key.prompt_id, t.key.member))[:amount]


def lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of what a person is told."""
    found = [
        ("model", str(result["model"])),
        ("environment", f"{result['env']}, {count(result['prompts'], 'held-out prompt')}"),
        (
            "success",
            f"{fraction(result['success'])} (95 %: {fraction(result['success_low'])} to "
            f"{fraction(result['success_high'])}), {result['successes']:,} of {count(result['episodes'], 'episode')}",
        ),
        ("best of", ", ".join(f"{k}: {fraction(value)}" for k, value in result["best_of"].items() if k != "1")),
        (
            "failures",
            ", ".join(f"{amount:,} {FAILURES[ending]}" for ending, amount in result["failures"].items()),
        ),
        ("lost to faults", f"{result['failed']:,}" if result["failed"] else ""),
        ("faults", ", ".join(f"{amount:,} {name}" for name, amount in result["faults"].items())),
        (
            "means",
            f"reward {number(result['reward_mean'])}, {number(result['turns_mean'])} turns, "
            f"{number(result['tokens_mean'])} tokens, {number(result['sampled_tokens_mean'])} of them sampled",
        ),
        ("time", duration(result["wall_s"])),
    ]
    return [(label, text) for label, text in found if text]


def _best_of(outcomes: Any, k: int) -> float | None:
    return _mean([best_of(sum(each), len(each), k) for each in outcomes if len(each) >= k])


def _powers(samples: int) -> list[int]:
    """1, 2, 4 … and `samples` itself."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()) if 2**power <= samples)})


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
