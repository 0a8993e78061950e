"""What `tiderl env play` does: a person takes the policy's place, in text, through the given read and write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiderl.data.errors import EnvironmentFault
from tiderl.data.records import Action, Prompt, Split, TaskKey
from tiderl.envs.inprocess import AsyncEnvironments
from tiderl.envs.pool import PoolEnvironments
from tiderl.envs.trial import opened

HELP = "say an action; ? shows what the expert would do from the start, next takes another prompt, quit ends"

Read = Callable[[str], str]
Write = Callable[[str], None]


def play(
    name: str,
    options: Mapping[str, Any],
    read: Read,
    write: Write,
    *,
    split: Split = "train",
    first_prompt: int = 0,
    deadline_s: float = 30.0,
) -> float:
    """Episodes until `read` says `quit` or raises `EOFError`; the rewards of all, summed. `read` gets the text to ask
    with. Raises `ConfigurationError` for what is no environment; an environment fault ends its episode only."""
    return asyncio.run(_play(name, options, read, write, split, first_prompt, deadline_s))


async def _play(
    name: str,
    options: Mapping[str, Any],
    read: Read,
    write: Write,
    split: Split,
    first_prompt: int,
    deadline_s: float,
) -> float:
    total = 0.0
    async with opened(name, options, workers=1, deadline_s=deadline_s) as environments:
        prompts = await environments.prompts(split)
        write(HELP)
        number = first_prompt
        while True:
            prompt = prompts[number % len(prompts)]
            try:
                reward, go_on = await _episode(environments, number, prompt, read, write)
            except EnvironmentFault as fault:
                write(f"the environment failed: {fault}")
                reward, go_on = 0.0, True
            total += reward
            if not go_on:
                return total
            number += 1


async def _episode(
    environments: AsyncEnvironments | PoolEnvironments, number: int, prompt: Prompt, read: Read, write: Write
) -> tuple[float, bool]:
    """One prompt: its reward, and whether the player goes on."""
    handle = await environments.open(TaskKey("eval", number, 0), prompt)
    total = 0.0
    try:
        write(f"\n[{prompt.id}]")
        write((await handle.reset()).as_text())
        while True:
            try:
                said = read("> ").strip()
            except EOFError:
                return total, False
            if said == "quit":
                return total, False
            if said == "next":
                return total, True
            if said == "?":
                write(await _advice(environments, prompt))
                continue
            step = await handle.step(Action(said, malformed="" if said else "nothing was said"))
            total += step.reward
            assert not isinstance(step.observation, str)  # the port's promise
            write(step.observation.as_text())
            if step.terminated or step.truncated:
                success = step.info.get("success", total > 0)
                write(f"{'over' if step.terminated else 'cut short'}: reward {total:g}, {_verdict(success)}")
                return total, True
    finally:
        await handle.close()


async def _advice(environments: AsyncEnvironments | PoolEnvironments, prompt: Prompt) -> str:
    actions: Sequence[str] = await environments.expert(prompt) if environments.has_expert else ()
    return " ".join(actions) or "this environment has no expert"


def _verdict(success: bool) -> str:
    return "solved" if success else "not solved"
