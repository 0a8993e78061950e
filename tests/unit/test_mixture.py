"""Environments mixed by weight: order, names, routing, figures."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.config.load import dump, load_config
from tiderl.config.resolve import resolve
from tiderl.config.schema import Config
from tiderl.data.errors import ConfigurationError
from tiderl.data.events import (
    Dropped,
    EvalFinished,
    EvalShare,
    PromptIssued,
    TaskFinished,
    UpdateCommitted,
)
from tiderl.data.records import Prompt, Split, TaskKey
from tiderl.envs.mixed import MixedEnvironments
from tiderl.observe.metrics import RunMetrics, eval_row
from tiderl.runtime.prompts import demonstration_prompts, held_out_prompts, prompt_stream
from tiderl.schedule.mix import weighted_order


def prompts(**sizes: int) -> list[Prompt]:
    return [Prompt(f"{name}/{n}", n, environment=name) for name, size in sizes.items() for n in range(size)]


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5), st.integers(1, 200))
def test_after_every_n_turns_each_has_its_share(weights: list[float], turns: int) -> None:
    dealt = Counter(islice(weighted_order(weights), turns))
    for index, weight in enumerate(weights):
        share = turns * weight / sum(weights)
        assert abs(dealt[index] - share) < (1.0001 if len(weights) <= 2 else 2.0)


def test_three_to_one_is_dealt_evenly() -> None:
    assert list(islice(weighted_order([3, 1]), 8)) == [0, 0, 1, 0, 0, 0, 1, 0]


def test_each_environment_passes_over_its_own_prompts_in_an_order_of_the_seed() -> None:
    mixed = list(islice(prompt_stream(prompts(a=3, b=2), 7, {"a": 3, "b": 1}), 24))
    of_a = [prompt.id for prompt in mixed if prompt.environment == "a"]
    of_b = [prompt.id for prompt in mixed if prompt.environment == "b"]
    assert (len(of_a), len(of_b)) == (18, 6)
    assert all(set(of_a[start : start + 3]) == {"a/0", "a/1", "a/2"} for start in range(0, 18, 3))
    assert all(set(of_b[start : start + 2]) == {"b/0", "b/1"} for start in range(0, 6, 2))
    assert mixed == list(islice(prompt_stream(prompts(a=3, b=2), 7, {"a": 3, "b": 1}), 24))
    assert mixed != list(islice(prompt_stream(prompts(a=3, b=2), 8, {"a": 3, "b": 1}), 24))


def test_held_out_prompts_are_mixed_until_a_set_is_used_up() -> None:
    weights = {"a": 1.0, "b": 1.0}
    chosen = held_out_prompts(prompts(a=10, b=2), 6, weights)
    assert [prompt.id for prompt in chosen] == ["a/0", "b/0", "a/1", "b/1", "a/2", "a/3"]
    assert len(held_out_prompts(prompts(a=3, b=2), 100, weights)) == 5
    assert held_out_prompts(prompts(a=3), 2, {}) == prompts(a=2)


def test_demonstrations_are_mixed_and_without_a_mixture_are_different_prompts() -> None:
    mixed = demonstration_prompts(prompts(a=50, b=50), 8, 0, {"a": 3.0, "b": 1.0})
    assert Counter(prompt.environment for prompt in mixed) == {"a": 6, "b": 2}
    alone = demonstration_prompts(prompts(a=5), 9, 0, {})
    assert sorted(prompt.id for prompt in alone) == [f"a/{n}" for n in range(5)]


class Part:
    """An environment that answers with its own name."""

    slots = 1

    def __init__(self, name: str, *, expert: bool = True, words: tuple[str, ...] = ("go",)) -> None:
        self.name, self.has_expert, self.words, self.closed = name, expert, words, 0

    async def start(self) -> None: ...

    async def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}-{n}", n) for n in range(2)]

    async def vocabulary(self) -> tuple[str, ...]:
        return self.words

    async def expert(self, prompt: Prompt) -> list[str]:
        return [self.name, prompt.id, prompt.environment]

    async def open(self, key: TaskKey, prompt: Prompt) -> Any:
        return (self.name, prompt.id, prompt.environment)

    async def close(self) -> None:
        self.closed += 1


def test_a_prompt_goes_to_its_environment_as_that_one_gave_it() -> None:
    async def scenario() -> None:
        parts = {"a": Part("A", words=("go", "left")), "b#2": Part("B", words=("go", "right"))}
        mixed = MixedEnvironments(parts, slots=4)  # type: ignore[arg-type]
        await mixed.start()
        train = await mixed.prompts("train")
        assert [(p.id, p.environment) for p in train[1:3]] == [("a/train-1", "a"), ("b#2/train-0", "b#2")]
        assert await mixed.open(TaskKey("train", 0, 0), train[2]) == ("B", "train-0", "")
        assert await mixed.expert(train[1]) == ["A", "train-1", ""]
        assert await mixed.vocabulary() == ("go", "left", "right")
        assert mixed.has_expert
        await mixed.close()
        assert [part.closed for part in parts.values()] == [1, 1]

    asyncio.run(scenario())


def test_a_mixture_has_an_expert_and_a_vocabulary_only_if_all_have() -> None:
    async def scenario() -> None:
        mixed = MixedEnvironments({"a": Part("A"), "b": Part("B", expert=False, words=())}, slots=4)  # type: ignore[dict-item]
        await mixed.start()
        assert not mixed.has_expert
        with pytest.raises(ConfigurationError, match="b of the mixture declares no vocabulary"):
            await mixed.vocabulary()

    asyncio.run(scenario())


def test_the_configuration_names_and_weighs_them(tmp_path: Any) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(
        "env:\n"
        " - {name: babyai, options: {level: BabyAI-GoToObj-v0}, weight: 3}\n"
        " - {name: babyai, options: {level: BabyAI-GoToLocal-v0}}\n"
        " - {name: ./some/mine.py:Mine, weight: 0.5, slots: 7, deadline_s: 2}\n"
    )
    resolved = resolve(load_config(path), command="train")
    assert resolved.settings.environment_weights == {"babyai#1": 3.0, "babyai#2": 1.0, "mine.py:Mine": 0.5}
    assert [env.slots for env in resolved.config.environments.values()] == [128, 128, 7]
    assert resolved.slots == 128
    assert resolved.no_effect == ()
    assert Config.model_validate(dump(resolved.config)) == resolved.config


def test_one_key_of_a_list_cannot_be_overridden_and_the_list_can(tmp_path: Any) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text("env: [{name: builtin}, {name: babyai}]\n")
    with pytest.raises(ConfigurationError, match="env is a list"):
        load_config(path, ["env.workers=2"])
    assert load_config(path, ["env={name: builtin}"]).config.environments.keys() == {"builtin"}


def test_a_weight_without_a_mixture_has_no_effect_and_says_so(tmp_path: Any) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("env: {name: builtin, weight: 2}\n")
    assert [item.key for item in resolve(load_config(path), command="train").no_effect] == ["env.weight"]


def test_figures_are_kept_by_environment() -> None:
    metrics = RunMetrics()
    for number, name in enumerate(("a", "b", "a")):
        metrics.observe(
            PromptIssued(t_s=0.0, prompt_id=number, task_id=f"{name}/x", start_version=0, replica=0, environment=name)
        )
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 0.5, (2, 0): 1.0, (2, 1): 1.0}
    for (prompt_id, member), reward in rewards.items():
        metrics.observe(_finished(prompt_id, member, reward))
    metrics.observe(Dropped(t_s=1.0, trajectory_id=9, prompt_id=1, member=0, reason="environment_raised", tokens=3))
    metrics.observe(_finished(1, 0, 1.0))  # its refill
    for update, prompt_ids in ((1, (0, 1)), (2, (2,))):
        committed = msgspec.structs.replace(_committed(update), prompt_ids=prompt_ids)
        metrics.observe(committed)
        if update == 1:
            assert metrics.update_row(committed)["environments"] == {
                "a": {"groups": 1, "reward_mean": 0.5, "success_fraction": 0.5},
                "b": {"groups": 1, "reward_mean": 0.75, "success_fraction": 1.0},
            }
    evaluated = EvalFinished(
        t_s=3.0, version=2, prompts=3, successes=2, failed=1, reward_mean=0.5, turns_mean=1.0, seconds=1.0,
        by_environment={"a": EvalShare(2, 1, 0, 0.5), "b": EvalShare(1, 1, 1, 0.5)},
    )  # fmt: skip
    metrics.observe(evaluated)
    figures = metrics.summary()["environments"]
    assert figures == {
        "a": {"trained": 4, "dropped": {}, "reward_first": 0.5, "reward_last": 1.0,
              "eval_success_first": 0.5, "eval_success_last": 0.5},
        "b": {"trained": 2, "dropped": {"environment_raised": 1}, "reward_first": 0.75, "reward_last": 0.75,
              "eval_success_first": 1.0, "eval_success_last": 1.0},
    }  # fmt: skip
    assert eval_row(evaluated)["environments"]["b"] == {
        "prompts": 1, "successes": 1, "failed": 1, "success": 1.0, "reward_mean": 0.5,
    }  # fmt: skip


def _finished(prompt_id: int, member: int, reward: float) -> TaskFinished:
    return TaskFinished(
        t_s=1.0, split="train", trajectory_id=0, prompt_id=prompt_id, member=member, attempt=0, ending="terminated",
        reward=reward, success=reward > 0, turns=1, tokens=4, loss_tokens=1, oldest_version=0,
    )  # fmt: skip


def _committed(update: int) -> UpdateCommitted:
    return UpdateCommitted(
        t_s=2.0 + update, update=update, groups=1, trajectories=2, loss_tokens=2, tokens=8, reward_mean=0.0,
        success_fraction=0.0, staleness_max=0, staleness_mean_tokens=0.0, window_staleness_max=0, seconds=1.0,
        metrics={},
    )  # fmt: skip
