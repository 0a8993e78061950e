"""Exactly once on real processes: any process is killed at any moment, the run is resumed, and in the end it is as one
that nobody disturbed (I1, I2). Also what a person asks to stop: a checkpoint, exit 130, the command that goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kills import TINY, WHO, KilledRun, finish, kill_again_and_again, stop

pytestmark = pytest.mark.live

UPDATES, GROUPS, GROUP_SIZE = 12, 4, 4
LONG_KILLS = int(os.environ.get("TIDERL_KILLS", "100"))
LONG_SEED = int(os.environ.get("TIDERL_KILLS_SEED", "0"))
KILLS_A_RUN = 8
FULL_SPEED_WITHIN_S = 20.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[KilledRun]:
    run = KilledRun(tmp_path)
    try:
        yield run
    finally:
        run.end()


def test_a_run_survives_the_death_of_a_rank_and_of_everything(run: KilledRun) -> None:
    """The short version: trainer and rollout die under a driver that lives, then everything at once."""
    run.start()
    run.wait(lambda: run.updates >= 2)
    run.kill("trainer")
    run.kill("rollout")
    run.wait(lambda: run.updates >= 5)
    run.kill("all")
    run.expect_gone()
    run.expect_right_books()
    run.start(resume=True)
    finish(run)
    result = run.expect_done(updates=UPDATES, groups=GROUPS, group_size=GROUP_SIZE)
    assert result["ranks_lost"] == 2
    assert set(result["dropped"]) <= {"lost", "rank_lost", "infrastructure"}


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_hundred_kills_at_random_moments(tmp_path: Path) -> None:
    """`TIDERL_KILLS` and `TIDERL_KILLS_SEED` choose how many and which; each run takes some and must end right."""
    rng = random.Random(LONG_SEED)
    made, number = 0, 0
    while made < LONG_KILLS:
        folder = tmp_path / str(number)
        folder.mkdir()
        options = rng.choice([(), ("checkpoint.every_updates=3",), ("schedule.strategy=sync",), ("cluster.ranks=1",)])
        run = KilledRun(folder, config=TINY.replace("updates: 12", "updates: 30"), overrides=options)
        try:
            made += kill_again_and_again(run, min(KILLS_A_RUN, LONG_KILLS - made), rng, WHO)
            finish(run)
            run.expect_done(updates=30, groups=GROUPS, group_size=GROUP_SIZE)
        finally:
            run.end()
        number += 1
        print(f"{made} kills in {number} runs; the last, {options}: {'; '.join(run.story)}", flush=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "ctrl-c"])
def test_a_stop_writes_a_checkpoint_and_names_the_command_that_goes_on(number: signal.Signals, run: KilledRun) -> None:
    run.overrides = ("checkpoint.every_updates=100",)  # so that only the stop writes one
    run.start()
    run.wait(lambda: run.updates >= 3)
    assert stop(run, number) == 130, run.tell()
    run.expect_gone()
    run.expect_right_books()
    done = run.updates
    assert 3 <= done < UPDATES
    assert run.count("SELECT max(update_no) FROM checkpoints") == done
    assert (run.run / "checkpoints" / f"u{done:06d}" / "state.json").is_file()
    assert json.loads((run.folder / "stdout.txt").read_text())["outcome"] == "stopped"
    command = next(line for line in run.stderr.splitlines() if "--resume" in line)
    assert command == "next: tiderl train --resume runs/k"

    run.start(resume=True)
    finish(run)
    run.expect_done(updates=UPDATES, groups=GROUPS, group_size=GROUP_SIZE)


def test_a_second_signal_ends_at_once_and_keeps_what_was_committed(run: KilledRun) -> None:
    run.config = TINY.replace("updates: 12", "updates: 400")
    run.start()
    run.wait(lambda: run.updates >= 2)
    assert run.driver is not None
    run.driver.send_signal(signal.SIGINT)
    time.sleep(0.02)
    assert stop(run, signal.SIGINT) == 130
    run.expect_gone()
    run.expect_right_books()
    assert "tiderl train --resume" in run.stderr


@pytest.mark.slow
def test_a_resumed_run_is_back_to_full_speed_within_20_s(run: KilledRun) -> None:
    """From the command to the first new update committed after an update's usual time; the machine should be idle."""
    run.config = TINY.replace("updates: 12", "updates: 200")
    run.start()
    run.wait(lambda: run.updates >= 60)
    run.kill("all")
    run.expect_gone()
    before = run.updates
    started = time.monotonic()
    run.start(resume=True)
    run.wait(lambda: run.updates >= before + 2)
    seconds = time.monotonic() - started
    print(f"back to full speed {seconds:.1f} s after the command, {before} updates in the journal")
    assert seconds < FULL_SPEED_WITHIN_S
