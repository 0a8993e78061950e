"""`tiderl show`: the last trajectories of a run as readable transcripts, from its journal and payloads.

Reads only, and also while the run goes on.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Annotated

import typer

from tiderl.data.errors import CheckpointError

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)
]
Last = Annotated[int, typer.Option("--last", min=1, metavar="N", help="How many, the newest last.")]

NEWEST = """
select id, status, reason, update_no, sha256 from trajectories
where sha256 is not null order by id desc limit ?
"""


def show(run: RunName, last: Last = 5) -> None:
    """Read what the agent did.

    tiderl show runs/babyai-1 --last 3
    """
    from tiderl.observe.transcripts import transcript
    from tiderl.store.blobs import FileBlobs
    from tiderl.store.rundir import find

    directory = find(run)
    blobs = FileBlobs(directory.blobs)
    shown = 0
    for _, status, reason, update, sha256 in reversed(_newest(directory.journal, last)):
        told = f"trained at update {update}" if update is not None else f"{status}{f': {reason}' if reason else ''}"
        print(transcript(asyncio.run(blobs.get(sha256)), status=told), end="\n\n")
        shown += 1
    if not shown:
        print("no trajectory has finished yet, or their payloads are no longer kept")


def _newest(journal: Path, last: int) -> list[tuple[int, str, str | None, int | None, str]]:
    """Rows of the newest `last` trajectories with a payload, newest first."""
    if not journal.is_file():
        raise CheckpointError("there is no journal", where=str(journal))
    try:
        connection = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
        try:
            return connection.execute(NEWEST, (last,)).fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(journal)) from error
