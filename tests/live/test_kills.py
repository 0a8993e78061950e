"""Exactly once on real processes: any process is killed at any moment, the run is resumed, and in the end it is as one
that nobody disturbed (I1, I2). Also what a person asks to stop: a checkpoint, exit 130, the command that goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kills import TINY, KilledRun, finish, kill_again_and_again

pytestmark = pytest.mark.live

UPDATES, GROUPS, GROUP_SIZE = 12, 4, 4


@pytest.fixture
def run(tmp_path: Path) -> Iterator[KilledRun]:
    run = KilledRun(tmp_path)
    try:
        yield run
    finally:
        run.end()


def test_a_run_survives_kills_of_a_rank_and_of_everything(run: KilledRun) -> None:
    """The short version: the trainer's rank dies, then everything at once; what is resumed ends right."""
    run.start()
    run.wait(lambda: run.updates >= 2)
    run.kill("trainer")
    run.wait(lambda: run.updates >= 5)
    run.kill("all")
    run.expect_gone()
    run.expect_right_books()
    run.start(resume=True)
    finish(run)
    result = run.expect_done(updates=UPDATES, groups=GROUPS, group_size=GROUP_SIZE)
    assert result["ranks_lost"] == 1
