"""Files and folders that appear whole or not at all: written under another name, flushed to disk, then renamed.

A reader, or a process started after a crash, never sees half of one. Knows nothing of what is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

from tiderl.data.errors import CheckpointError


@contextmanager
def whole_folder(directory: str) -> Iterator[Path]:
    """A new empty folder to fill; at the end it takes the place of `directory`. On an error nothing changes.

    Raises `CheckpointError` where the disk refuses.
    """
    target = Path(directory)
    partial = target.with_name(f".{target.name}.{uuid4().hex[:8]}.partial")
    replaced = partial.with_suffix(".replaced")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.iterdir(), partial]:
            _flush(path)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write: {error}", where=directory) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
