"""The run directory: where everything of a run lies, under names that this file alone knows.

Paths inside are relative to it, so a copied run works elsewhere. Knows layout, not content.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tiderl.data.errors import CheckpointError, ConfigurationError

RUNS = Path("runs")
MARK = "config.yaml"
"""The file that makes a folder a run; written first."""


@dataclass(frozen=True)
class RunDirectory:
    root: Path

    @property
    def config(self) -> Path:
        return self.root / MARK

    @property
    def config_lock(self) -> Path:
        """What `config` said when a driver last accepted it, so that an edit by hand is noticed."""
        return self.root / "config.lock.json"

    @property
    def journal(self) -> Path:
        return self.root / "journal.sqlite"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def best_model(self) -> Path:
        return self.root / "model-best"

    @property
    def candidates(self) -> Path:
        return self.root / "model-candidates"

    @property
    def policy(self) -> Path:
        """The model's vocabulary and special ids: what makes a folder of a checkpoint, without the environment."""
        return self.root / "policy.json"

    @property
    def curves(self) -> Path:
        return self.root / "curves.html"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def profile(self) -> Path:
        """Where the time of each process went, with `log.profile`."""
        return self.root / "profile.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def is_run(self) -> bool:
        return self.config.is_file()

    @property
    def is_simulation(self) -> bool:
        """A saved one, which has no journal; a run that trains writes its lock before anything else."""
        return self.is_run and not self.config_lock.exists() and not self.journal.exists()


def write_whole(path: Path, text: str) -> None:
    """The file has either its old content or this one, whenever the process dies. Raises `CheckpointError`."""
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"cannot be written: {error.strerror}", where=str(path)) from error


def choose(run: str | None, stem: str, runs: Path = RUNS) -> RunDirectory:
    """The directory that a run of this name gets: a path if it looks like one, else under `runs/`; without a name
    `<stem>-<number>` with the first free number."""
    if run is not None:
        path = Path(run)
        return RunDirectory(path if path.is_absolute() or len(path.parts) > 1 else runs / run)
    number = 1
    while (runs / f"{stem}-{number}").exists():
        number += 1
    return RunDirectory(runs / f"{stem}-{number}")


def find(run: str | Path, runs: Path = RUNS) -> RunDirectory:
    """An existing run by path or by its name under `runs/`. Raises `ConfigurationError` when there is none."""
    for candidate in (Path(run), runs / run):
        if RunDirectory(candidate).is_run:
            return RunDirectory(candidate)
    known = sorted((p.parent for p in runs.glob(f"*/{MARK}")), key=lambda p: p.stat().st_mtime)
    hint = f"the newest runs here: {', '.join(str(p) for p in known[-3:])}" if known else "there are no runs here"
    raise ConfigurationError("no such run", where=str(run), hint=hint)


def create(directory: RunDirectory, *, simulated: bool = False) -> None:
    """Makes the folder. Raises `ConfigurationError` for one that exists, with what to do then."""
    root = directory.root
    another = "choose another name for --save" if simulated else "choose another name with -o run=NAME"
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        if not directory.is_run:
            raise ConfigurationError("exists and is not a run", where=f"run {root}", hint=another)
        raise ConfigurationError(
            "this run exists",
            where=f"run {root}",
            hint=another if simulated else f"{another}, go on with --resume, or give --overwrite",
        )
    try:
        for folder in (root, directory.blobs, directory.checkpoints, directory.events, directory.logs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the run directory: {error.strerror}", where=str(root)) from error


def clear(directory: RunDirectory) -> None:
    """Forgets everything that a run did, but not its configuration: for one that never reached its first checkpoint."""
    for folder in (directory.blobs, directory.checkpoints, directory.events):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    for path in (directory.metrics, directory.summary, *directory.root.glob(f"{directory.journal.name}*")):
        path.unlink(missing_ok=True)
