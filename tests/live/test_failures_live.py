"""Failures of environments in a run that goes on (architecture §8): each a typed outcome in the journal, none trained,
retried and refilled as promised; what was dropped is in the summary by reason and by length. In virtual time:
tests/sim/test_runtime.py; of ranks and drivers: test_kills.py."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from support import failing_env
from support.failing_env import ALWAYS_FAILING, FAILS_AT_STEP, GOOD
from support.kills import TINY

from tiderl.api import train
from tiderl.data.events import Dropped, Event, Fault, TaskAdmitted
from tiderl.observe.summary import summary_lines
from tiderl.store.audit import audit

pytestmark = pytest.mark.live

UPDATES, GROUPS, GROUP_SIZE = 4, 4, 4
MEMBERS_FAILED = 4
"""The member that fails, and three refills of the group; then it is dropped."""
SAME_PROCESS = [name for name in (*GOOD, *ALWAYS_FAILING) if name not in ("hangs", "kills-once")]
"""What an environment may do that shares its process with the driver."""


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        self.events.append(event)

    def recall(self, event: Event) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_every_failure_has_its_typed_outcome_and_the_run_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    marks = tmp_path / "marks"
    marks.mkdir()
    names = SAME_PROCESS if kind == "inline" else (*GOOD, *ALWAYS_FAILING)
    Path("k.yaml").write_text(TINY)
    log = Log()
    result = train(
        "k.yaml",
        [
            "run=k",
            f"env.name={failing_env.__file__}:Failing",
            f"env.options={{marks: {marks}, only: [{', '.join(names)}]}}",
            "env.deadline_s=3",
            f"cluster.kind={kind}",
            f"train.updates={UPDATES}",
            f"train.global_batch_groups={GROUPS}",
            f"algorithm.group_size={GROUP_SIZE}",
            "rollout.max_new_tokens_per_turn=2",  # few malformed calls, which the runtime answers by itself
            "eval.prompts=1",
        ],
        observer=log,
    )
    assert (result["outcome"], result["updates"]) == ("done", UPDATES)
    journal = Path("runs/k/journal.sqlite")
    assert audit(journal, "runs/k/blobs") == []
    db = sqlite3.connect(journal)
    rows = db.execute(
        "SELECT task_id, prompt_id, member, attempt, status, reason FROM trajectories JOIN prompts USING (prompt_id)"
    ).fetchall()
    db.close()

    for name, reason in ALWAYS_FAILING.items():
        of_prompt = [row for row in rows if row[0] == name]
        if name in names:
            assert of_prompt, f"{name} was never issued"
        assert "trained" not in {row[4] for row in of_prompt}, f"{name} was trained"
        groups = {row[1] for row in of_prompt}
        for group in groups:
            reasons = Counter(row[5] for row in of_prompt if row[1] == group and row[4] == "dropped")
            reasons.pop("infrastructure", None)  # the killed worker took them along: refilled without limit
            if len(reasons) > 1 or sum(reasons.values()) >= GROUP_SIZE:  # not one that the run's end interrupted
                assert reasons.pop("group_dropped") == GROUP_SIZE - 1
                assert reason in reasons and sum(reasons.values()) == MEMBERS_FAILED, (name, reasons)
                # One kill takes along whatever else its worker held: that may be the last straw.
                assert kind == "process" or set(reasons) == {reason}, (name, reasons)
    for name in ("prints", "floods"):
        assert {row[4] for row in rows if row[0] == name} >= {"trained"}, name
        assert not [row for row in rows if row[0] == name and row[5] in ALWAYS_FAILING.values()], name
    once = [row for row in rows if row[0] == "raises-once"]
    assert max(row[3] for row in once) >= 1, "the fault was retried"
    if kind == "inline":
        assert not [row for row in once if row[5]], "and under the same id"

    kinds = Counter(event.what for event in log.events if isinstance(event, Fault))
    assert kinds["EnvironmentRaised"] and kinds["EnvironmentNonsense"]
    if kind == "process":
        assert kinds["EnvironmentTimeout"]
        assert (marks / "kills-once").exists()
        assert "trained" in {row[4] for row in rows if row[0] == "kills-once"}
        assert len(list(Path("runs/k/logs").glob("env-*.log"))) > 1, "a killed worker is replaced"
    _summary_says_what_was_dropped(result.to_json(), log)
    shown = capfd.readouterr()
    assert "hello" not in shown.out + shown.err and "xxxx" not in shown.out + shown.err


def _summary_says_what_was_dropped(result: dict, log: Log) -> None:
    dropped = [event for event in log.events if isinstance(event, Dropped)]
    assert result["dropped"] == dict(Counter(event.reason for event in dropped))
    known = [event.tokens for event in dropped if event.tokens]
    assert result["dropped_tokens_mean"] == pytest.approx(sum(known) / len(known))
    assert 0 < result["dropped_tokens_mean"] < result["trained_tokens_mean"], f"cut at step {FAILS_AT_STEP}"
    lines = dict(summary_lines(result))
    assert "environment raised" in lines["dropped"] and "group dropped" in lines["dropped"]
    assert "environment raised" in lines["lengths"]


def test_a_failure_costs_its_own_member_two_starts_at_most_before_its_id_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.yaml").write_text(TINY)
    log = Log()
    options = f"env.options={{marks: {tmp_path}, only: [good-1, good-2, raises]}}"
    train(
        "k.yaml",
        [
            "run=k",
            f"env.name={failing_env.__file__}:Failing",
            options,
            "cluster.kind=inline",
            "train.updates=2",
            "rollout.max_new_tokens_per_turn=2",
        ],
        observer=log,
    )
    starts = Counter(e.trajectory_id for e in log.events if isinstance(e, TaskAdmitted) and e.split == "train")
    failed = {e.trajectory_id for e in log.events if isinstance(e, Dropped) and e.reason == "environment_raised"}
    assert failed
    assert {starts[number] for number in failed} == {2}
