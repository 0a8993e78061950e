"""Waits that an environment's step really waits: lognormal with a heavy tail, for trying schedules on slow
worlds.

A wait is a function of (seed, prompt, member, turn), never of the attempt or of call order: the same
trajectory waits alike under every strategy.
"""

from __future__ import annotations

import asyncio
import math

from tiderl.data.errors import EnvironmentTimeout
from tiderl.data.records import TaskKey
from tiderl.data.rng import stream
from tiderl.data.settings import WaitProfile


def wait_s(profile: WaitProfile, seed: int, key: TaskKey, turn: int) -> float:
    """Seconds: with probability `tail_fraction` uniform in `tail_s`, else lognormal around `median_s`."""
    random = stream(seed, "env.wait", key.split, key.prompt_id, key.member, turn)
    if random.random() < profile.tail_fraction:
        return float(random.uniform(*profile.tail_s))
    return profile.median_s * math.exp(profile.sigma * float(random.standard_normal()))


async def wait(profile: WaitProfile | None, seed: int, key: TaskKey, turn: int, deadline_s: float) -> float:
    """Wait the turn's seconds; the seconds that are left for the step itself.

    Raises `EnvironmentTimeout`, after `deadline_s`, when the wait alone is longer: as a slow world would.
    """
    if profile is None:
        return deadline_s
    seconds = wait_s(profile, seed, key, turn)
    await asyncio.sleep(min(seconds, deadline_s))
    if seconds >= deadline_s:
        raise EnvironmentTimeout(f"step waited longer than env.deadline_s = {deadline_s:g}", where=str(key))
    return deadline_s - seconds
