"""Exactly once over crashes, in virtual time: the driver dies at any journal point, with a lost tail or a torn write,
is
started again over what survived, and dies again. I1 and I2 hold at every stage; the run ends as an uninterrupted
one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.virtual_runs import books_balance, virtual_run

from tiderl.api.virtual import Persisted
from tiderl.data.errors import CheckpointError, InvariantViolation
from tiderl.data.events import MicrobatchFormed
from tiderl.runtime.ports import CheckpointRow, TrajectoryRow
from tiderl.runtime.recovery import recover
from tiderl.sim.loop import run_virtual
from tiderl.store.memory import MemoryLedger

TINY = (
    "train.updates=4",
    "train.global_batch_groups=2",
    "algorithm.group_size=2",
    "eval.every_updates=0",
    "env.wait={kind: lognormal, median_s: 0.2, sigma: 1.0}",
)
PARTS, KILLS_A_PART = 4, 250
"""1,000 kills in each CI run; the runs that are killed have about 30 journal entries each."""


class Killed(BaseException):
    """The driver's process is gone: nothing may catch this."""


class DyingLedger(MemoryLedger):
    """Dies at its n-th write from now."""

    def dies_after(self, writes: int) -> DyingLedger:
        self.left = writes
        return self

    def _apply(self, transaction) -> None:
        if hasattr(self, "left"):
            if self.left == 0:
                raise Killed
            self.left -= 1
        super()._apply(transaction)


def crash_and_resume(seed: int, overrides: tuple[str, ...]) -> tuple[int, Persisted]:
    """Kills at random journal points until the run ends; the number of kills and what is left."""
    rng = random.Random(seed)
    persisted, kills = Persisted(), 0
    while True:
        tail = rng.choice([0, 0, 1, 3, 10])
        reopened = persisted.ledger.reopen(lose_tail_rows=tail, tear=rng.random() < 0.3)
        persisted.ledger = DyingLedger(reopened.snapshot())
        if kills < 6:
            persisted.ledger.dies_after(rng.randrange(1, 60))
        assert books_balance(run_virtual(persisted.ledger.replay)) == []
        try:
            run = virtual_run([*TINY, f"seed={seed}", *overrides], persisted=persisted)
        except Killed:
            kills += 1
            continue
        assert run.outcome.outcome == "done"
        return kills, persisted


STRATEGIES = (
    ("schedule.strategy=sync",),
    ("schedule.max_staleness=1",),
    ("schedule.max_staleness=3",),
    ("schedule.max_staleness=1", "schedule.staleness_counts=window"),
)


def check_many(count: int, first_seed: int) -> int:
    kills, seed = 0, first_seed
    while kills < count:
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        every = f"checkpoint.every_updates={1 + seed % 3}"
        died, persisted = crash_and_resume(seed, (*strategy, every, f"cluster.ranks={2 + seed % 2}"))
        replay = run_virtual(persisted.ledger.replay)
        assert books_balance(replay) == []
        assert [number for number, _ in replay.updates] == [1, 2, 3, 4]
        statuses = [row.status for row in replay.trajectories]
        assert statuses.count("trained") == 4 * 2 * 2
        assert set(statuses) <= {"trained", "dropped"}
        assert {row.reason for row in replay.trajectories if row.status == "dropped"} <= {"lost"}
        kills, seed = kills + died, seed + 1
    return kills


@pytest.mark.parametrize("part", range(PARTS))
def test_books_balance_after_any_series_of_kills(part) -> None:
    assert check_many(KILLS_A_PART, first_seed=1000 * part) >= KILLS_A_PART


def test_a_resume_redoes_committed_updates_without_generating() -> None:
    """Two updates are committed after the last checkpoint, then everything dies: they are computed again, from the
    record."""
    persisted = Persisted()
    first = virtual_run([*TINY, "checkpoint.every_updates=100"], persisted=persisted)
    assert [row.update_no for row in first.replay.checkpoints] == [0, 4]
    log = [t for t in persisted.ledger.snapshot() if t.checkpoint is None or t.checkpoint.update_no == 0]
    persisted.ledger = MemoryLedger(log)
    again = virtual_run([*TINY, "checkpoint.every_updates=100"], persisted=persisted)
    assert again.outcome.updates == 4
    kinds = [type(event).__name__ for event in again.log.events]
    assert _computed(again.log) == _computed(first.log)
    assert "PromptIssued" not in kinds
    assert "UpdateCommitted" not in kinds


def _computed(log) -> Counter[int]:
    """Tokens computed, by update."""
    return sum((Counter({e.update: e.tokens}) for e in log.of(MicrobatchFormed)), Counter())


def test_nothing_ready_is_generated_again() -> None:
    """Payloads that were ready when the driver died are trained by the next one, under their ids."""
    persisted = Persisted()
    persisted.ledger = DyingLedger().dies_after(14)
    with pytest.raises(Killed):
        virtual_run([*TINY], persisted=persisted)
    before = run_virtual(persisted.ledger.reopen().replay)
    ready = {row.id for row in before.trajectories if row.status == "ready"}
    running = {row.id for row in before.trajectories if row.status == "running"}
    assert ready and running
    persisted.ledger = MemoryLedger(persisted.ledger.snapshot())
    after = virtual_run([*TINY], persisted=persisted).replay
    final = {row.id: row for row in after.trajectories}
    assert all(final[i].status == "trained" for i in ready)
    assert all((final[i].status, final[i].reason) == ("dropped", "lost") for i in running)


def test_a_lost_payload_is_issued_again() -> None:
    persisted = Persisted()
    persisted.ledger = DyingLedger().dies_after(14)
    with pytest.raises(Killed):
        virtual_run([*TINY], persisted=persisted)
    replay = run_virtual(persisted.ledger.reopen().replay)
    ready = [row for row in replay.trajectories if row.status == "ready"]
    run_virtual(lambda: persisted.blobs.delete([str(row.sha256) for row in ready[:1]]))
    persisted.ledger = MemoryLedger(persisted.ledger.snapshot())
    after = {row.id: row for row in virtual_run([*TINY], persisted=persisted).replay.trajectories}
    assert after[ready[0].id].reason == "lost"
    assert books_balance(run_virtual(persisted.ledger.replay)) == []


def test_the_previous_checkpoint_serves_when_the_newest_cannot_be_read() -> None:
    persisted = Persisted()
    first = virtual_run([*TINY, "checkpoint.every_updates=2"], persisted=persisted)
    assert [row.update_no for row in first.replay.checkpoints] == [0, 2, 4]
    persisted.ledger = MemoryLedger(persisted.ledger.snapshot())
    persisted.saved = {name: update for name, update in persisted.saved.items() if not name.endswith("4")}
    again = virtual_run([*TINY, "checkpoint.every_updates=2", "train.updates=6"], persisted=persisted)
    assert again.outcome.updates == 6
    assert [event.where for event in again.log.events if type(event).__name__ == "Fault"] == ["restore u000004"]


def test_a_run_without_any_whole_checkpoint_is_refused() -> None:
    persisted = Persisted()
    virtual_run([*TINY], persisted=persisted)
    replay = run_virtual(persisted.ledger.replay)
    with pytest.raises(CheckpointError, match="no checkpoint of this run is whole"):
        recover(replay, lambda name: False)


def test_a_journal_without_checkpoint_starts_again() -> None:
    assert recover(run_virtual(Persisted().ledger.replay), lambda name: True) is None


def test_the_ledger_refuses_to_train_twice() -> None:
    """The mutant of I2: a recovery that commits a redone update again is stopped by the journal itself."""
    ledger = MemoryLedger()
    ledger.append([TrajectoryRow(0, 0, 0, 0, "running"), TrajectoryRow(0, 0, 0, 0, "ready", sha256="a")])

    async def twice() -> None:
        await ledger.commit(1, [0])
        await ledger.durable(CheckpointRow("u000000", 0))
        await ledger.commit(2, [0])

    with pytest.raises(InvariantViolation, match="I2"):
        run_virtual(twice)
