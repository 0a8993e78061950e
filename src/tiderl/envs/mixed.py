"""Several environments as one: the Environments port over those of a mixture, each with its own isolation and deadline.

A prompt's `environment` says whose it is, and its id begins with that name, so ids stay unique. The mixture's weights
are not here: they order prompts, and that is the runtime's. Must not know isolations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Prompt, Split, TaskKey
from tiderl.data.spans import ProcessSpans, Spanned
from tiderl.runtime.ports import EnvironmentHandle, Environments


class MixedEnvironments:
    """`parts`: name in the mixture to its environments. `slots`: environments open at a time, over all of them."""

    def __init__(self, parts: Mapping[str, Environments], *, slots: int) -> None:
        self.parts, self.slots = dict(parts), slots
        self.has_expert = False  # known after `start`

    async def start(self) -> None:
        """Raises the first error of a part."""
        try:
            async with asyncio.TaskGroup() as group:
                for part in self.parts.values():
                    group.create_task(part.start())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        # Only if all have one: else the warm start would teach only some of them.
        self.has_expert = all(part.has_expert for part in self.parts.values())

    async def prompts(self, split: Split) -> Sequence[Prompt]:
        """Those of all, one environment after the other."""
        return [
            msgspec.structs.replace(prompt, id=f"{name}/{prompt.id}", environment=name)
            for name, part in self.parts.items()
            for prompt in await part.prompts(split)
        ]

    async def vocabulary(self) -> tuple[str, ...]:
        """The words of all, each once. Raises `ConfigurationError` where some declare theirs and some do not."""
        words = {name: await part.vocabulary() for name, part in self.parts.items()}
        without = [name for name, own in words.items() if not own]
        if without and len(without) < len(words):
            raise ConfigurationError(
                f"{', '.join(without)} of the mixture declares no vocabulary, the others do",
                where="env",
                hint="the words tokenizer needs the words of all of them",
            )
        return tuple(dict.fromkeys(word for own in words.values() for word in own))

    async def expert(self, prompt: Prompt) -> Sequence[str]:
        return await self.parts[prompt.environment].expert(self._own(prompt))

    async def open(self, key: TaskKey, prompt: Prompt) -> EnvironmentHandle:
        return await self.parts[prompt.environment].open(key, self._own(prompt))

    async def spans(self) -> list[tuple[str, ProcessSpans]]:
        """See `data.spans.Spanned`."""
        parts = [part for part in self.parts.values() if isinstance(part, Spanned)]
        found = await asyncio.gather(*(part.spans() for part in parts))
        return [one for of_part in found for one in of_part]

    async def close(self) -> None:
        """Closes all of them, whatever one of them raises. Idempotent."""
        outcomes = await asyncio.gather(*(part.close() for part in self.parts.values()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _own(self, prompt: Prompt) -> Prompt:
        """The prompt as its environment gave it."""
        own_id = prompt.id.removeprefix(f"{prompt.environment}/")
        return msgspec.structs.replace(prompt, id=own_id, environment="")
