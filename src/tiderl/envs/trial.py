"""Opening an environment outside a run, to check it or to play it: in a worker where that is possible.

An environment written with `async def` runs on the event loop instead. Must not know configurations or runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tiderl.data.errors import ConfigurationError
from tiderl.envs.inprocess import AsyncEnvironments
from tiderl.envs.pool import PoolEnvironments

SLOTS = 4


@contextlib.asynccontextmanager
async def opened(
    name: str, options: Mapping[str, Any], *, workers: int, deadline_s: float
) -> AsyncIterator[AsyncEnvironments | PoolEnvironments]:
    """The started environments; closed at the end. Raises `ConfigurationError` for what is no environment."""
    pool = PoolEnvironments(name, options, workers=workers, slots=SLOTS, deadline_s=deadline_s)
    environments: AsyncEnvironments | PoolEnvironments = pool
    try:
        try:
            await pool.start()
        except ConfigurationError:
            if not pool.description.coroutines:
                raise
            await pool.close()
            environments = AsyncEnvironments(name, options, slots=SLOTS, deadline_s=deadline_s)
            await environments.start()
        yield environments
    finally:
        await environments.close()
