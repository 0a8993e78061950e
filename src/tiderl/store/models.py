"""The best model so far of a run: each evaluated version is a candidate until its evaluation is judged.

The trainer's rank writes a candidate whole, as a Hugging Face folder, before the version is published; here it is only
located, moved or deleted. What the best one reached is in its folder, so a resumed run goes on from there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tiderl.data.errors import CheckpointError

VERDICT = "evaluation.json"


class FileModels:
    """`best` is the folder that people take away; `candidates` holds those that wait."""

    def __init__(self, best: Path, candidates: Path) -> None:
        self.best, self.candidates = best.absolute(), candidates.absolute()
        self._replaced = self.best.with_name(f".{self.best.name}.replaced")
        if self._replaced.exists() and not self.best.exists():  # killed between two renames
            self._replaced.rename(self.best)
        self.close()
        self.best_success = self._kept_success()

    def path(self, version: int) -> str:
        return str(self.candidates / f"v{version:06d}")

    def judge(self, version: int, successes: int, prompts: int) -> None:
        """The version's evaluation is done: a success above all before makes it the best, else it is deleted. A
        candidate that could not be written changes nothing. Raises `CheckpointError` where the disk refuses."""
        candidate = Path(self.path(version))
        if not candidate.is_dir():
            return
        if not prompts or successes / prompts <= self.best_success:
            shutil.rmtree(candidate, ignore_errors=True)
            return
        success = successes / prompts
        verdict = {"version": version, "success": success, "successes": successes, "prompts": prompts}
        try:
            (candidate / VERDICT).write_text(json.dumps(verdict), encoding="utf-8")
            if self.best.exists():
                self.best.rename(self._replaced)
            candidate.rename(self.best)
        except OSError as error:
            raise CheckpointError(f"the best model cannot be kept: {error.strerror}", where=str(self.best)) from error
        self.best_success = success
        shutil.rmtree(self._replaced, ignore_errors=True)

    def close(self) -> None:
        """Deletes what waits for a judgement that does not come any more."""
        shutil.rmtree(self.candidates, ignore_errors=True)
        if self.best.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)

    def _kept_success(self) -> float:
        try:
            return float(json.loads((self.best / VERDICT).read_text(encoding="utf-8"))["success"])
        except (OSError, ValueError, KeyError, TypeError):
            return -1.0
