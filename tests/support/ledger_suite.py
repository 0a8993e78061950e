"""What every Ledger promises: rows in order, an update all or nothing, I1 and I2 refused to be broken.

Each function is one promise over an empty open ledger. `reopen` closes it and opens the same journal again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tiderl.data.errors import CheckpointError, InvariantViolation
from tiderl.runtime.ports import CheckpointRow, Ledger, LedgerRow, PromptRow, TrajectoryRow, VersionRow

Reopen = Callable[[Ledger], Awaitable[Ledger]]
Promise = Callable[[Ledger, Reopen], Awaitable[None]]


def ready(number: int, prompt_id: int = 0) -> TrajectoryRow:
    return TrajectoryRow(number, prompt_id, number % 4, 0, "ready", sha256=f"{number:064x}")


def running(number: int, prompt_id: int = 0) -> TrajectoryRow:
    return TrajectoryRow(number, prompt_id, number % 4, 0, "running")


def dropped(number: int, reason: str = "lost") -> TrajectoryRow:
    return TrajectoryRow(number, 0, number % 4, 0, "dropped", reason=reason)


async def refused(ledger: Ledger, row: LedgerRow) -> None:
    """A wrong row is refused at the latest by the call after it: `append` never waits."""

    async def append_and_look() -> None:
        ledger.append([row])
        await ledger.replay()

    with pytest.raises(InvariantViolation):
        await append_and_look()


async def rows_come_back_in_order_of_number(ledger: Ledger, reopen: Reopen) -> None:
    ledger.append([PromptRow(1, "b", 12, 0), PromptRow(0, "a", (1 << 64) - 1, 0)])
    ledger.append([running(2, 1), running(0)])
    ledger.append([VersionRow(1, 1), VersionRow(0, 0)])
    for found in (await ledger.replay(), await (await reopen(ledger)).replay()):
        assert found.prompts == (PromptRow(0, "a", (1 << 64) - 1, 0), PromptRow(1, "b", 12, 0))
        assert found.trajectories == (running(0), running(2, 1))
        assert found.versions == (VersionRow(0, 0), VersionRow(1, 1))
        assert found.updates == () and found.checkpoints == ()


async def later_row_of_a_trajectory_replaces_the_earlier(ledger: Ledger, reopen: Reopen) -> None:
    retried = TrajectoryRow(0, 0, 0, 1, "running")
    ledger.append([running(0), running(1)])
    ledger.append([retried, ready(1)])
    assert (await ledger.replay()).trajectories == (retried, ready(1))


async def commit_trains_in_the_given_order(ledger: Ledger, reopen: Reopen) -> None:
    ledger.append([ready(0), ready(1), ready(2)])
    await ledger.commit(1, [2, 0])
    for found in (await ledger.replay(), await (await reopen(ledger)).replay()):
        assert found.updates == ((1, (2, 0)),)
        assert [(row.status, row.update_no) for row in found.trajectories] == [
            ("trained", 1),
            ("ready", None),
            ("trained", 1),
        ]
        assert found.trajectories[0].sha256 == ready(0).sha256


async def commit_of_what_is_not_ready_changes_nothing(ledger: Ledger, reopen: Reopen) -> None:
    ledger.append([ready(0), running(1), running(2)])
    ledger.append([dropped(2)])
    for wrong in ([0, 1], [0, 2], [0, 9], [0, 0]):
        with pytest.raises(InvariantViolation):
            await ledger.commit(1, wrong)
    found = await ledger.replay()
    assert found.updates == ()
    assert [row.status for row in found.trajectories] == ["ready", "running", "dropped"]
    await ledger.commit(1, [0])


async def trajectory_is_trained_once(ledger: Ledger, reopen: Reopen) -> None:
    ledger.append([ready(0), ready(1)])
    await ledger.commit(1, [0])
    again = await reopen(ledger)
    with pytest.raises(InvariantViolation):
        await again.commit(2, [0, 1])
    assert (await again.replay()).updates == ((1, (0,)),)


async def update_number_is_used_once(ledger: Ledger, reopen: Reopen) -> None:
    ledger.append([ready(0), ready(1)])
    await ledger.commit(1, [0])
    with pytest.raises(InvariantViolation):
        await ledger.commit(1, [1])
    await ledger.commit(2, [1])


async def append_never_trains(ledger: Ledger, reopen: Reopen) -> None:
    for wrong in (
        TrajectoryRow(0, 0, 0, 0, "trained", update_no=1),
        TrajectoryRow(0, 0, 0, 0, "resting"),
        TrajectoryRow(0, 0, 0, 0, "dropped"),
        TrajectoryRow(0, 0, 0, 0, "ready", reason="lost"),
    ):
        with pytest.raises(InvariantViolation):
            ledger.append([wrong])
    assert (await ledger.replay()).trajectories == ()


async def ended_trajectory_stays_ended(ledger: Ledger, reopen: Reopen) -> None:
    ledger.append([running(0)])
    ledger.append([dropped(0)])
    ledger.append([dropped(0)])  # the same once more says nothing new
    await ledger.replay()
    await refused(ledger, ready(0))


async def version_names_one_model(ledger: Ledger, reopen: Reopen) -> None:
    ledger.append([VersionRow(1, 1)])
    ledger.append([VersionRow(1, 1)])
    await ledger.replay()
    await refused(ledger, VersionRow(1, 2))


async def durable_checkpoint_is_listed(ledger: Ledger, reopen: Reopen) -> None:
    await ledger.durable(CheckpointRow("checkpoints/000000", 0))
    ledger.append([ready(0)])
    await ledger.commit(1, [0])
    await ledger.durable(CheckpointRow("checkpoints/000001", 1))
    found = await (await reopen(ledger)).replay()
    assert found.checkpoints == (CheckpointRow("checkpoints/000000", 0), CheckpointRow("checkpoints/000001", 1))


async def closed_ledger_refuses_everything(ledger: Ledger, reopen: Reopen) -> None:
    ledger.append([running(0)])
    await ledger.close()
    await ledger.close()
    with pytest.raises(CheckpointError):
        ledger.append([running(1)])
    with pytest.raises(CheckpointError):
        await ledger.commit(1, [])


PROMISES: tuple[Promise, ...] = (
    rows_come_back_in_order_of_number,
    later_row_of_a_trajectory_replaces_the_earlier,
    commit_trains_in_the_given_order,
    commit_of_what_is_not_ready_changes_nothing,
    trajectory_is_trained_once,
    update_number_is_used_once,
    append_never_trains,
    ended_trajectory_stays_ended,
    version_names_one_model,
    durable_checkpoint_is_listed,
    closed_ledger_refuses_everything,
)


def name_of(promise: Promise) -> str:
    return promise.__name__
