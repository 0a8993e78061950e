"""`tiderl show`: the last trajectories of a run as readable transcripts, from its journal and payloads.

Reads only, and also while the run goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiderl.data.errors import CheckpointError, ConfigurationError

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)
]
Last = Annotated[int, typer.Option("--last", min=1, metavar="N", help="How many, the newest last.")]

FINISHED_NEWEST_FIRST = """
select status, reason, update_no, sha256 from trajectories where sha256 is not null order by id desc
"""

Row = tuple[str, str | None, int | None, str]


def show(run: RunName, last: Last = 5) -> None:
    """Read what the agent did.

    tiderl show runs/babyai-1 --last 3
    """
    import asyncio

    from tiderl.observe.transcripts import transcript
    from tiderl.store.blobs import FileBlobs
    from tiderl.store.rundir import find

    directory = find(run)
    if directory.is_simulation:
        raise ConfigurationError(
            "this is a saved simulation, whose turns have no texts",
            where=str(directory.root),
            hint="its events and summary are there; a trained run has transcripts",
        )
    blobs = FileBlobs(directory.blobs)
    rows = _newest_kept(directory.journal, directory.blobs, last)
    for status, reason, update, sha256 in reversed(rows):
        told = f"trained at update {update}" if update is not None else f"{status}{f': {reason}' if reason else ''}"
        print(transcript(asyncio.run(blobs.get(sha256)), status=told), end="\n\n")
    if not rows:
        print("no trajectory has finished yet, or their payloads are no longer kept")


def _newest_kept(journal: Path, blobs: Path, last: int) -> list[Row]:
    """The newest `last` trajectories whose payload is still there (those of durable updates may go), newest first."""
    import sqlite3

    from tiderl.store.blobs import blob_path

    if not journal.is_file():
        raise CheckpointError("there is no journal", where=str(journal))
    rows: list[Row] = []
    try:
        connection = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
        try:
            for row in connection.execute(FINISHED_NEWEST_FIRST):
                if (blobs / blob_path(row[-1])).is_file():
                    rows.append(row)
                if len(rows) == last:
                    break
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(journal)) from error
    return rows
