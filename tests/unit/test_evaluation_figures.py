"""What an evaluation says, by hand: intervals, best of n, failures; and what is shown first."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tiderl.data.records import TaskKey, Trajectory, TurnSpan
from tiderl.observe.evaluation import best_of, judge, lines, wilson, worth_showing


def episode(prompt: int, member: int, success: bool, ending: str = "terminated") -> Trajectory:
    """Three tokens of context, two sampled, in one turn."""
    return Trajectory(
        id=-1,
        key=TaskKey("eval", prompt, member),
        ids=np.arange(5, dtype=np.int32),
        loss_mask=np.array([False, False, False, True, True]),
        logprobs=np.zeros(5, np.float32),
        versions=np.zeros(5, np.int32),
        turns=(TurnSpan(3, 5, float(success), "go", "stop"),),
        reward=float(success),
        success=success,
        ending=ending,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("mean", "trials", "low", "high"),
    [
        # solved by hand from |p - mean| = 1.959964 * sqrt(p * (1 - p) / n)
        (0.5, 100, 0.403832, 0.596168),
        (0.9, 10, 0.595850, 0.982124),
        (0.0, 10, 0.0, 0.277533),
        (1.0, 10, 0.722467, 1.0),
    ],
)
def test_the_interval_holds_the_probabilities_that_the_estimate_does_not_refute(
    mean: float, trials: int, low: float, high: float
) -> None:
    assert wilson(mean, trials) == pytest.approx((low, high), abs=1e-5)
    for edge in wilson(mean, trials):
        if 1e-9 < edge < 1 - 1e-9:
            assert abs(edge - mean) == pytest.approx(1.959964 * (edge * (1 - edge) / trials) ** 0.5)


def test_without_trials_nothing_is_known() -> None:
    assert wilson(0.0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "samples"), [(0, 4), (1, 4), (2, 5), (5, 5)])
def test_best_of_k_is_the_share_of_choices_that_hold_a_success(successes: int, samples: int) -> None:
    outcomes = [True] * successes + [False] * (samples - successes)
    for k in range(1, samples + 1):
        choices = list(combinations(outcomes, k))
        assert best_of(successes, samples, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_figures_count_prompts_samples_and_endings() -> None:
    episodes = [
        *(episode(0, member, member == 0) for member in range(4)),
        *(episode(1, member, True) for member in range(4)),
        episode(2, 0, False, "budget_turns"),  # its other three were lost to faults
    ]
    found = judge(episodes, samples=4)
    assert (found["prompts"], found["episodes"], found["successes"]) == (3, 9, 5)
    assert found["success"] == pytest.approx((0.25 + 1.0 + 0.0) / 3)
    assert found["failures"] == {"budget_turns": 1, "terminated": 3}
    assert found["best_of"] == {
        "1": pytest.approx(found["success"]),
        "2": pytest.approx((0.5 + 1.0) / 2),  # C(3, 2) of 6 pairs of the first prompt hold no success
        "4": 1.0,
    }
    assert (found["success_low"], found["success_high"]) == wilson(found["success"], 3)
    assert (found["turns_mean"], found["tokens_mean"], found["sampled_tokens_mean"]) == (1.0, 5.0, 2.0)


def test_an_evaluation_that_lost_every_episode_has_no_success_but_says_so() -> None:
    found = judge([], samples=1)
    assert (found["success"], found["success_low"], found["success_high"]) == (None, 0.0, 1.0)
    told = dict(
        lines({**found, "model": "m", "env": "e", "failed": 3, "faults": {"EnvironmentRaised": 6}, "wall_s": 1})
    )
    assert told["lost to faults"] == "3" and told["faults"] == "6 EnvironmentRaised"


def test_failures_are_shown_first() -> None:
    episodes = [episode(0, 0, True), episode(1, 0, False), episode(2, 0, False)]
    assert [t.key.prompt_id for t in worth_showing(episodes, 2)] == [1, 2]
    assert [t.key.prompt_id for t in worth_showing(episodes, 9)] == [1, 2, 0]
