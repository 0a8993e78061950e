"""Checkpoint folders of a run, by name; and the same without files, for virtual time.

The trainer writes a folder whole, by rename; here it is only located, judged and deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

MARK = "state.json"
"""In every folder that a trainer wrote; folders appear whole, so its presence says enough."""


class FileCheckpoints:
    """Folders under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def path(self, name: str) -> str:
        return str(self.root / name)

    def whole(self, name: str) -> bool:
        return (self.root / name / MARK).is_file()

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            shutil.rmtree(self.root / name, ignore_errors=True)

    async def keep_only(self, names: Collection[str]) -> None:
        for folder in self.root.glob("*"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)


class MemoryCheckpoints:
    """Names only: in virtual time the trainer has no state to lose."""

    def __init__(self) -> None:
        self.deleted: set[str] = set()

    def path(self, name: str) -> str:
        self.deleted.discard(name)
        return name

    def whole(self, name: str) -> bool:
        return name not in self.deleted

    async def delete(self, names: Sequence[str]) -> None:
        self.deleted.update(names)

    async def keep_only(self, names: Collection[str]) -> None:
        """Nothing to do: a simulated trainer leaves nothing half-written."""
