"""The journal that kills its driver, and what a crash leaves of the one in memory."""

from __future__ import annotations

import pytest

from tiderl.runtime.ports import CheckpointRow, PromptRow, TrajectoryRow
from tiderl.sim.crashes import CrashingLedger, DriverKilled
from tiderl.sim.loop import run_virtual
from tiderl.store.memory import MemoryLedger


def rows(number: int) -> list[PromptRow | TrajectoryRow]:
    return [PromptRow(number, f"p{number}", 0, 0), TrajectoryRow(number, number, 0, 0, "ready", sha256="x")]


def test_the_driver_dies_before_its_next_write_and_the_earlier_ones_are_there() -> None:
    async def main() -> tuple[int, int]:
        journal = MemoryLedger()
        dying = CrashingLedger(journal, writes=2)
        dying.append(rows(0))
        await dying.commit(1, [0])
        with pytest.raises(DriverKilled):
            dying.append(rows(1))
        with pytest.raises(DriverKilled):
            await dying.durable(CheckpointRow("one", 1))
        left = await journal.replay()
        return len(left.prompts), len(left.updates)

    assert run_virtual(main) == (1, 1)


def test_a_crash_loses_a_tail_or_a_torn_write_but_nothing_durable() -> None:
    async def main() -> list[tuple[int, int]]:
        journal = MemoryLedger()
        journal.append(rows(0))
        await journal.commit(1, [0])
        await journal.durable(CheckpointRow("one", 1))
        journal.append(rows(1))
        journal.append(rows(2))
        crashed = [
            journal.reopen(),
            journal.reopen(tear=True),
            journal.reopen(lose_tail_rows=3),
            journal.reopen(lose_tail_rows=100),
        ]
        return [(len(left.prompts), len(left.updates)) for left in [await ledger.replay() for ledger in crashed]]

    assert run_virtual(main) == [(3, 1), (2, 1), (1, 1), (1, 1)]
