"""`export`: a checkpoint of a run as a Hugging Face folder, written by the trainer's own code.

Needs neither the environment nor the start model's tokenizer anew: `policy.json` of the run says the vocabulary. Reads
the run only, also while it goes on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tiderl.api.records import read_policy
from tiderl.config.machine import prepare
from tiderl.data.errors import CheckpointError, ConfigurationError
from tiderl.store.checkpoints import FileCheckpoints
from tiderl.store.rundir import RunDirectory, find
from tiderl.store.sqlite import read_checkpoints


def export(run: str | Path, to: str | Path, *, update: int | None = None) -> int:
    """Writes the model after `update` (None: the newest checkpoint) to the new folder `to`; returns the update.

    Raises `ConfigurationError` for a folder that exists and for an update without a checkpoint, `CheckpointError` where
    the run cannot be read or the disk refuses.
    """
    directory, target = find(run), Path(to)
    if directory.is_simulation:
        raise ConfigurationError("this is a saved simulation, which has no model", where=str(directory.root))
    if target.exists():
        raise ConfigurationError("exists already", where=f"--to {target}", hint="name a folder that does not exist")
    number, name = _choose(directory, update)
    policy = read_policy(directory)
    if policy is None:
        raise CheckpointError("the run does not say its vocabulary", where=str(directory.policy))
    resolved = prepare(directory.config, command="train")
    # The start model is where it is on this machine; the reference is of no use here.
    path = "scratch" if resolved.model_folder is None else str(resolved.model_folder.absolute())
    settings = resolved.trainer_settings(msgspec.structs.replace(policy, path=path, device="cpu"))
    from tiderl.trainers.torch_trainer import build

    trainer = build(msgspec.structs.replace(settings, kl_coef=0.0))
    try:
        trainer.restore(FileCheckpoints(directory.checkpoints).path(name))
        trainer.save_model(str(target.absolute()))
    finally:
        trainer.close()
    return number


def _choose(directory: RunDirectory, update: int | None) -> tuple[int, str]:
    checkpoints = FileCheckpoints(directory.checkpoints)
    kept = {number: name for number, name in read_checkpoints(directory.journal) if checkpoints.whole(name)}
    if not kept:
        raise CheckpointError("the run has no checkpoint yet", where=str(directory.root))
    chosen = max(kept) if update is None else update
    if chosen not in kept:
        raise ConfigurationError(
            f"there is no checkpoint of update {chosen}",
            where=f"--update {chosen}",
            hint=f"kept are: {', '.join(map(str, sorted(kept)))} (checkpoint.keep says how many)",
        )
    return chosen, kept[chosen]
