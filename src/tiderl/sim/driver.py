"""The driver's own work in virtual time: it takes up the turns that end one after the other, as one event loop does.

Costs nothing unless a calibration says so. Knows no engine: seconds come from the caller's cost model.
"""

from __future__ import annotations

import asyncio


class SimDriver:
    """Of one cluster. `turn_s`: for each turn that ends."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._free_s = 0.0

    async def take_up(self) -> None:
        """Returns when the driver is done with this turn, after all that ended before it."""
        if self._turn_s:
            now_s = asyncio.get_running_loop().time()
            self._free_s = max(now_s, self._free_s) + self._turn_s
            await asyncio.sleep(self._free_s - now_s)
