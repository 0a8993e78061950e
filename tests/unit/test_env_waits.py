"""Wait profiles: drawn from identity alone, and distributed as they say."""

from __future__ import annotations

import numpy as np

from tiderl.data.records import TaskKey
from tiderl.data.settings import WaitProfile
from tiderl.envs.waits import wait_s

PROFILE = WaitProfile(median_s=0.2, sigma=1.2, tail_fraction=0.1, tail_s=(3.0, 8.0))


def test_a_wait_depends_on_prompt_member_and_turn_but_not_on_the_attempt() -> None:
    first = wait_s(PROFILE, 1, TaskKey("train", 3, 2, 0), 4)
    assert wait_s(PROFILE, 1, TaskKey("train", 3, 2, 5), 4) == first
    others = [
        wait_s(PROFILE, 2, TaskKey("train", 3, 2), 4),
        wait_s(PROFILE, 1, TaskKey("eval", 3, 2), 4),
        wait_s(PROFILE, 1, TaskKey("train", 4, 2), 4),
        wait_s(PROFILE, 1, TaskKey("train", 3, 3), 4),
        wait_s(PROFILE, 1, TaskKey("train", 3, 2), 5),
    ]
    assert len({first, *others}) == 6


def test_waits_have_the_median_and_the_tail_of_their_profile() -> None:
    waits = np.array([wait_s(PROFILE, 0, TaskKey("train", number, 0), 0) for number in range(4000)])
    body = WaitProfile(median_s=0.2, sigma=1.2)
    medians = np.array([wait_s(body, 0, TaskKey("train", number, 0), 0) for number in range(4000)])
    assert 0.18 < np.median(medians) < 0.22
    assert 1.1 < np.log(medians).std() < 1.3
    tail = ((waits >= 3.0) & (waits <= 8.0)).mean()
    assert 0.09 < tail < 0.13  # a tenth, and the few of the lognormal that reach as far: P(z > ln 15 / 1.2) = 0.012


def test_a_profile_without_spread_waits_its_median() -> None:
    assert wait_s(WaitProfile(median_s=0.5, sigma=0.0), 0, TaskKey("train", 0, 0), 0) == 0.5
