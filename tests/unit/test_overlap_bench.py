"""bench/overlap.py: its ideal ranks against values by hand, and its short form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from overlap import ARMS, Arm, ideal_commits_s, whole_groups  # noqa: E402

from tiderl.data.records import TaskKey  # noqa: E402
from tiderl.data.settings import WaitProfile  # noqa: E402
from tiderl.envs.waits import wait_s  # noqa: E402

ALIKE = WaitProfile(median_s=1.0, sigma=0.0)  # every step waits one second


def ideal(
    arm: Arm, turns: dict[int, int], updates: int, batch_groups: int = 1, waits: WaitProfile = ALIKE
) -> list[float]:
    """Groups of one member; `turns` by prompt."""
    return ideal_commits_s(
        arm,
        {(p, 0): n for p, n in turns.items()},
        waits,
        seed=0,
        updates=updates,
        batch_groups=batch_groups,
        group_size=1,
    )


def test_sync_on_ideal_ranks_is_the_sum_of_the_longest_of_each_batch() -> None:
    turns = {0: 3, 1: 5, 2: 2, 3: 1}
    assert ideal(ARMS[0], turns, updates=2, batch_groups=2) == [5.0, 5.0 + 2.0]


def test_areal_on_ideal_ranks_overlaps_as_many_batches_as_the_bound_allows() -> None:
    # Bound 1, batches of one. 0 and 1 start at 0 s; both are due by the second update: 1 may go first, at 1 s. Then 2
    # starts and is ready at 3 s, but the second update is 0's: it is made at 4 s, and 2 goes at once. 3 and 4 start.
    turns = {0: 4, 1: 1, 2: 2, 3: 2, 4: 9, 5: 9}
    assert ideal(Arm("a", "areal", 1), turns, updates=4) == [1.0, 4.0, 4.0, 6.0]


def test_under_window_a_long_group_holds_nothing_up() -> None:
    turns = {0: 100, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert ideal(Arm("w", "areal", 1, "window"), turns, updates=4) == [1.0, 2.0, 3.0, 4.0]
    strict = ideal(Arm("a", "areal", 1), turns, updates=3)
    assert strict[1] == 100.0


def test_the_ideal_uses_the_waits_of_the_run() -> None:
    heavy = WaitProfile(median_s=0.2, sigma=1.2, tail_fraction=0.03, tail_s=(3, 8))
    expected = sum(wait_s(heavy, 0, TaskKey("train", 0, 0), turn) for turn in range(3))
    assert ideal(ARMS[0], {0: 3}, updates=1, waits=heavy) == [expected]


def test_groups_with_a_member_that_did_not_finish_are_left_out() -> None:
    assert whole_groups({(0, 0): 1, (0, 1): 2, (1, 0): 3}, 2) == {(0, 0): 1, (0, 1): 2}


@pytest.mark.live
@pytest.mark.timeout(300)
def test_the_short_form_runs_every_schedule_within_its_bound(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "overlap.py"), "--short", "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    shown = json.loads(done.stdout)
    assert list(shown) == [arm.name for arm in ARMS]
    for arm in ARMS:
        row = shown[arm.name]
        assert row["staleness_max" if arm.counts == "oldest_token" else "window_staleness_max"] <= arm.max_staleness
        assert row["gap"] > 0, "no run is faster than its waits"
