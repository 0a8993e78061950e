"""The ports of a run on real time, built from its configuration: environments, renderer, rank hosts.

Shared by training and evaluation, so that both see the same environment through the same tokens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from tiderl.cluster.inline import InlineCluster
from tiderl.cluster.process import ProcessCluster
from tiderl.cluster.specs import HostSpec
from tiderl.config.check import check_first_observation
from tiderl.config.resolve import Resolved, wait_profile
from tiderl.config.schema import EnvConfig
from tiderl.data.errors import ConfigurationError, EnvironmentFault, InfrastructureFault, TideError
from tiderl.data.records import Observation, Prompt, TaskKey
from tiderl.data.settings import ModelSettings
from tiderl.engines.vllm_setup import check_installed
from tiderl.envs.mixed import MixedEnvironments
from tiderl.envs.pool import build_environments
from tiderl.runtime.ports import Cluster, Environments
from tiderl.text.chat import ChatRenderer
from tiderl.text.words import WordsRenderer

TextRenderer = WordsRenderer | ChatRenderer
T = TypeVar("T")


def is_inline(resolved: Resolved) -> bool:
    return resolved.config.cluster.kind == "inline"


def make_environments(resolved: Resolved, logs: Path, *, profile: bool = False) -> Environments:
    """The Environments port, not started. `profile`: its processes count where their time goes."""

    def build(env: EnvConfig, folder: Path) -> Environments:
        # `inline` is one process for everything: worker processes would make the order of arrival a matter of chance.
        isolation = "async" if is_inline(resolved) and env.isolation == "pool" else env.isolation
        return build_environments(
            isolation,
            env.name,
            env.options,
            workers=env.workers,
            slots=int(env.slots),
            deadline_s=env.deadline_s,
            wait=wait_profile(env),
            seed=resolved.config.seed,
            log_dir=str(folder),
            profile=profile,
        )

    env = resolved.config.env
    if isinstance(env, EnvConfig):
        return build(env, logs)
    parts = {
        name: build(part, logs / f"mix-{place}")
        for place, (name, part) in enumerate(resolved.config.environments.items(), start=1)
    }
    return MixedEnvironments(parts, slots=resolved.slots)


FIRST_PROMPTS = 8
"""Of each environment, whose first observations are looked at before anything starts: their lengths differ."""


async def make_renderer(
    resolved: Resolved, environments: Environments, *, say: Callable[[str], None] = lambda text: None
) -> TextRenderer:
    """The renderer of `model.tokenizer` for these environments, tried on their first observations. Raises
    `ConfigurationError` where model, tokenizer and environment do not fit; `say` hears of words without a token."""
    renderer: TextRenderer
    if resolved.config.model.tokenizer == "chat":
        assert resolved.model_folder is not None  # `scratch` with `chat` is refused
        renderer = ChatRenderer(resolved.model_folder)
    else:
        vocabulary = await _usable(resolved, environments.vocabulary())
        if not vocabulary:
            raise ConfigurationError(
                "the words tokenizer needs an environment that declares its vocabulary",
                where=f"env.name {environment_names(resolved)}",
                hint="give the class a `vocabulary` method that returns all words of its observations and actions",
            )
        if resolved.model_folder is None:
            renderer = WordsRenderer.from_vocabulary(vocabulary)
        else:
            renderer = WordsRenderer.from_folder(resolved.model_folder, vocabulary)
    await _check_first_observations(resolved, environments, renderer)
    if isinstance(renderer, WordsRenderer) and renderer.unknown_words:
        say(
            f"the vocabulary lacks {renderer.unknown_words} of the words that the first observations show: "
            f"the model cannot tell them apart; tiderl env check lists them"
        )
    return renderer


def policy(resolved: Resolved, renderer: TextRenderer) -> ModelSettings:
    """The model for a renderer's ids."""
    return resolved.model_settings(
        vocab_size=renderer.vocab_size, pad_id=renderer.pad_id, stop_ids=renderer.stop_ids, words=renderer.words
    )


def host_specs(
    resolved: Resolved, model: ModelSettings, *, weights_dir: str = "", profile: bool = False
) -> list[HostSpec]:
    """What each rank holds, by the layout of the strategy. `weights_dir`: where versions are exported to; `profile`:
    its process counts where its time goes."""
    layout = resolved.layout
    engines = {rank for ranks in layout.engine_ranks.values() for rank in ranks}
    return [
        HostSpec(
            rank=rank,
            engine=resolved.engine_settings(model) if rank in engines else None,
            engine_core=ENGINE_CORES[resolved.config.rollout.engine],
            trainer=resolved.trainer_settings(model, weights_dir=weights_dir) if rank in layout.actor_ranks else None,
            profile=profile,
        )
        for rank in range(resolved.config.cluster.ranks)
    ]


ENGINE_CORES = {"torch": "tiderl.engines.torch_engine:build", "vllm": "tiderl.engines.vllm_engine:build"}
"""By `rollout.engine`: named, not imported."""


def check_engine(resolved: Resolved) -> None:
    """Raises `MissingExtraError` where the engine's package is not installed; imports nothing."""
    if resolved.config.rollout.engine == "vllm":
        check_installed(resolved.device)


def check_trainable(cluster: Cluster) -> None:
    """Raises `ConfigurationError` for an engine whose turns cannot be trained on: the loss needs each sampled token's
    log-prob, and staleness its weight version."""
    for replica, engine in sorted(cluster.engines.items()):
        can = {"log-probs": engine.capabilities.logprobs, "weight versions": engine.capabilities.token_versions}
        if missing := [name for name, has in can.items() if not has]:
            raise ConfigurationError(
                f"the engine of replica {replica} returns no {' and no '.join(missing)} of its tokens",
                where="rollout.engine",
                hint="train with an engine that does: torch or vllm",
            )


def make_cluster(resolved: Resolved, specs: list[HostSpec], logs: Path) -> Cluster:
    """The rank hosts, not started."""
    if is_inline(resolved):
        return InlineCluster(specs, report=_report)
    return ProcessCluster(specs, logs, report=_report)


async def _check_first_observations(resolved: Resolved, environments: Environments, renderer: TextRenderer) -> None:
    """Resets a few of each environment: one at least must work, and all that do must fit, before anything else starts.
    A reset that fails here and there is a fault of its own episode, as in training."""
    prompts = await _usable(resolved, environments.prompts("train"))
    await _usable(resolved, environments.prompts("eval"))
    firsts: dict[str, list[tuple[int, Prompt]]] = {}
    for number, prompt in enumerate(prompts):
        of_environment = firsts.setdefault(prompt.environment, [])
        if len(of_environment) < FIRST_PROMPTS:
            of_environment.append((number, prompt))
    for of_environment in firsts.values():
        tried = await asyncio.gather(*(_first_observation(environments, *first) for first in of_environment))
        observations = [observation for observation in tried if isinstance(observation, Observation)]
        if not observations:
            await _usable(resolved, _first_observation(environments, *of_environment[0], raises=True))
        for observation in observations:
            check_first_observation(resolved.loaded, len(renderer.begin(observation)))


async def _first_observation(
    environments: Environments, number: int, prompt: Prompt, *, raises: bool = False
) -> Observation | None:
    """None where the environment fails, unless `raises`."""
    handle = await environments.open(TaskKey("warmup", number, 0), prompt)
    try:
        return await handle.reset()
    except (EnvironmentFault, InfrastructureFault):
        if raises:
            raise
        return None
    finally:
        await handle.close()


def environment_names(resolved: Resolved) -> str:
    """For people: the environment, or those of the mixture."""
    return ", ".join(dict.fromkeys(env.name for env in resolved.config.environments.values()))


async def _usable(resolved: Resolved, answer: Awaitable[T]) -> T:
    """The environment's answer to what is asked before anything starts; its faults are still the user's to mend."""
    try:
        return await answer
    except ConfigurationError:
        raise
    except TideError as error:
        name = environment_names(resolved)
        raise ConfigurationError(
            error.what, where=error.where or f"env.name {name}", hint=f"try it alone: tiderl env check {name}"
        ) from error


def _report(line: str) -> None:
    print(f"tiderl: {line}", file=sys.stderr)
