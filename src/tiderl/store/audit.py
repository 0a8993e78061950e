"""Proves I1 and I2 from a run's documented tables, or lists what is wrong: `python -m tiderl.store.audit RUN`.

Written against the documentation, not against the rest of TideRL: plain sqlite3 and hashlib, and nothing of ours, so
that it can be read, copied and trusted by somebody who trusts no trainer.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def audit(journal: Path | str, blobs: Path | str) -> list[str]:
    """Every violation in one line; empty when the journal is right. `blobs` is the folder of the payload files."""
    db = sqlite3.connect(f"{Path(journal).resolve().as_uri()}?mode=ro", uri=True)
    try:
        trajectories = db.execute(
            "SELECT id, prompt_id, member, attempt, status, reason, update_no, sha256 FROM trajectories ORDER BY id"
        ).fetchall()
        updates = [
            (number, json.loads(ids))
            for number, ids in db.execute("SELECT update_no, trajectory_ids FROM updates ORDER BY update_no")
        ]
        prompts = [number for (number,) in db.execute("SELECT prompt_id FROM prompts ORDER BY prompt_id")]
        versions = db.execute("SELECT version, update_no FROM versions ORDER BY version").fetchall()
        checkpoints = db.execute("SELECT checkpoint, update_no FROM checkpoints").fetchall()
    finally:
        db.close()
    return [
        *_statuses(trajectories),
        *_trained_once(trajectories, updates),
        *_prompts(prompts, trajectories),
        *_versions(versions, updates, checkpoints),
        *_payloads(trajectories, Path(blobs)),
    ]


def _statuses(trajectories: list[Any]) -> list[str]:
    """I1: each trajectory has one status, and what belongs to it."""
    found = []
    for number, count in Counter(row[0] for row in trajectories).items():
        if count > 1:
            found.append(f"trajectory {number} has {count} rows")
    kept = Counter(row[1:3] for row in trajectories if row[4] != "dropped")
    for (prompt, member), count in kept.items():
        if count > 1:
            found.append(f"member {member} of prompt {prompt} has {count} trajectories that are not dropped")
    for number, _, _, _, status, reason, update, _ in trajectories:
        if status not in ("running", "ready", "trained", "dropped"):
            found.append(f"trajectory {number} has the unknown status {status!r}")
        if (status == "dropped") != bool(reason):
            found.append(f"trajectory {number} is {status} with reason {reason!r}")
        if (status == "trained") != (update is not None):
            found.append(f"trajectory {number} is {status} with update {update!r}")
    return found


def _trained_once(trajectories: list[Any], updates: list[tuple[int, list[int]]]) -> list[str]:
    """I2: no trajectory in two updates, and both tables say the same."""
    found = []
    update_of: dict[int, int] = {}
    for number, ids in updates:
        for trajectory in ids:
            if trajectory in update_of:
                found.append(f"trajectory {trajectory} is trained in update {update_of[trajectory]} and in {number}")
            update_of[trajectory] = number
    rows = {row[0]: row for row in trajectories}
    for trajectory, number in update_of.items():
        if trajectory not in rows:
            found.append(f"update {number} trained trajectory {trajectory}, which was never issued")
        elif rows[trajectory][4] != "trained" or rows[trajectory][6] != number:
            status, claimed = rows[trajectory][4], rows[trajectory][6]
            found.append(f"update {number} trained trajectory {trajectory}, whose row says {status} in {claimed}")
    for trajectory, row in rows.items():
        if row[4] == "trained" and trajectory not in update_of:
            found.append(f"trajectory {trajectory} is trained in update {row[6]}, which does not name it")
    return found


def _prompts(prompts: list[int], trajectories: list[Any]) -> list[str]:
    """Prompts are numbered 0 … n - 1 as they were issued, and every trajectory belongs to one."""
    found = []
    if prompts != list(range(len(prompts))):
        missing = sorted(set(range(max(prompts) + 1)) - set(prompts))
        found.append(f"prompt ids have holes: {missing[:5]}" if missing else f"prompt ids start at {prompts[0]}")
    known = set(prompts)
    for number, prompt, *_ in trajectories:
        if prompt not in known:
            found.append(f"trajectory {number} belongs to prompt {prompt}, which was never issued")
    return found


def _versions(versions: list[Any], updates: list[Any], checkpoints: list[Any]) -> list[str]:
    """I2: a version names one model, made by a committed update (0: the start); so does a checkpoint."""
    found = []
    for version, count in Counter(version for version, _ in versions).items():
        if count > 1:
            found.append(f"version {version} names {count} models")
    committed = {number for number, _ in updates} | {0}
    for version, update in versions:
        if version != update:
            found.append(f"version {version} is said to be made by update {update}")
        if update not in committed:
            found.append(f"version {version} was published without the commit of update {update}")
    for name, update in checkpoints:
        if update not in committed:
            found.append(f"checkpoint {name} holds update {update}, which is not committed")
    return found


def _payloads(trajectories: list[Any], blobs: Path) -> list[str]:
    """Every finished trajectory names its payload; where the file is still kept, it is the one that was named."""
    found = []
    for number, _, _, _, status, _, _, sha256 in trajectories:
        if status in ("ready", "trained") and not sha256:
            found.append(f"trajectory {number} is {status} without a payload")
        if not sha256:
            continue
        path = blobs / sha256[:2] / f"{sha256}.safetensors"
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            found.append(f"the payload of trajectory {number} is not the one that was recorded: {path.name}")
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not (Path(arguments[0]) / "journal.sqlite").exists():
        print("usage: python -m tiderl.store.audit RUN   (a run directory with journal.sqlite)", file=sys.stderr)
        return 2
    run = Path(arguments[0])
    try:
        violations = audit(run / "journal.sqlite", run / "blobs")
    except (sqlite3.Error, ValueError, TypeError, OSError) as error:
        print(f"{run / 'journal.sqlite'}: cannot be read as a journal: {error}", file=sys.stderr)
        print("hint: give a run directory of TideRL whose journal is whole", file=sys.stderr)
        return 2
    for line in violations:
        print(line)
    print(f"{len(violations)} violations" if violations else "I1 and I2 hold")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
