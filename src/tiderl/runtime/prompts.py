"""Which prompt comes next: in training, in the warm start, in evaluation; of one task set, or of several by weight.

A function of the task set, the run's seed and the weights alone, so that a resumed run goes on in the same order.
Knows nothing of environments but the name that a prompt of a mixture carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from tiderl.data.records import Prompt
from tiderl.data.rng import stream
from tiderl.schedule.mix import weighted_order


def prompt_stream(prompts: Sequence[Prompt], seed: int, weights: Mapping[str, float]) -> Iterator[Prompt]:
    """The task set without end, every pass in a new order drawn by the run's seed. `weights`: environment to weight of
    a mixture, each of which passes over its own prompts; empty for one environment."""
    if not weights:
        return _passes(prompts, seed, "prompts")
    return _mixed(prompts, seed, "prompts", weights)


def demonstration_prompts(
    prompts: Sequence[Prompt], count: int, seed: int, weights: Mapping[str, float]
) -> list[Prompt]:
    """What the expert shows: at most `count` different prompts of one task set; by weight of a mixture."""
    if not weights:
        return [prompts[index] for index in stream(seed, "warmup").permutation(len(prompts))[:count]]
    return list(islice(_mixed(prompts, seed, "warmup", weights), min(count, len(prompts))))


def held_out_prompts(prompts: Sequence[Prompt], count: int, weights: Mapping[str, float]) -> list[Prompt]:
    """The first `count` in the task set's own order; of a mixture by weight, until its task sets are used up."""
    if not weights:
        return list(prompts[:count])
    sets = [iter(own) for own in _by_environment(prompts, weights)]
    chosen: list[Prompt] = []
    left = len(prompts)
    for index in weighted_order(list(weights.values())):
        if len(chosen) == count or not left:
            break
        prompt = next(sets[index], None)
        if prompt is not None:
            chosen.append(prompt)
            left -= 1
    return chosen


def _mixed(prompts: Sequence[Prompt], seed: int, name: str, weights: Mapping[str, float]) -> Iterator[Prompt]:
    sets = zip(weights, _by_environment(prompts, weights), strict=True)
    streams = [_passes(own, seed, name, environment) for environment, own in sets]
    for index in weighted_order(list(weights.values())):
        yield next(streams[index])


def _passes(prompts: Sequence[Prompt], seed: int, *path: str) -> Iterator[Prompt]:
    number = 0
    while True:
        for index in stream(seed, *path, number).permutation(len(prompts)):
            yield prompts[index]
        number += 1


def _by_environment(prompts: Sequence[Prompt], weights: Mapping[str, float]) -> list[list[Prompt]]:
    """The prompts of each environment, in the order of the weights."""
    sets: dict[str, list[Prompt]] = {environment: [] for environment in weights}
    for prompt in prompts:
        sets[prompt.environment].append(prompt)
    return list(sets.values())
