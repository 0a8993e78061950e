"""`model.path` to a folder on this machine: a folder as it is, a hub id through the Hugging Face cache.

What is no model is refused here, before anything starts. HF_HUB_OFFLINE, HF_TOKEN and HF_HOME count as everywhere.
Reads headers only; nothing is loaded and no torch imported.
"""

from __future__ import annotations

import re
from pathlib import Path

from tiderl.config.load import Loaded
from tiderl.data.errors import MissingExtraError

KEY = "model.path"
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
DESCRIPTION = ("*.json", "*.jinja")
"""What sizes and tokenizer are read from: a few MB at most."""
WEIGHTS = "*.safetensors"


def model_folder(loaded: Loaded, *, whole: bool) -> Path | None:
    """The folder of `model.path`; None for `scratch`. `whole`: with the weights, which a dry run and `sim` do not need.

    Raises `ConfigurationError` for what is no model, is gated, missing or not in the cache while offline.
    """
    path = loaded.config.model.path
    if path == "scratch":
        return None
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.exists() or path.startswith((".", "/", "~")) or not HUB_ID.fullmatch(path):
            raise loaded.refuse(KEY, f"no such folder: {path}", "give `scratch`, a Hugging Face folder, or a hub id")
        folder = _from_hub(loaded, path, whole)
    if not (folder / "config.json").is_file():
        raise loaded.refuse(KEY, f"{path} is no model: it has no config.json")
    if whole:
        _check_weights(loaded, folder)
    return folder


def _from_hub(loaded: Loaded, name: str, whole: bool) -> Path:
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ModuleNotFoundError as missing:
        raise MissingExtraError("huggingface_hub", "train", where=f"{KEY} {name}") from missing
    try:
        return Path(snapshot_download(name, allow_patterns=[*DESCRIPTION, *([WEIGHTS] if whole else [])]))
    except GatedRepoError as error:
        hint = "accept its terms on its page of the hub, then give HF_TOKEN or `hf auth login`"
        raise loaded.refuse(KEY, f"{name} is gated", hint) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        what = f"{name} is neither a folder here nor a model of the hub"
        raise loaded.refuse(KEY, what, "check the name; a private model needs HF_TOKEN or `hf auth login`") from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            what, hint = "and HF_HUB_OFFLINE is set", "unset it, or fetch the model before: hf download"
        else:
            what, hint = "and the hub cannot be reached", "check the network, or fetch the model before: hf download"
        raise loaded.refuse(KEY, f"{name} is not in the local cache {what}", f"{hint} {name}") from error
    except OSError as error:  # the hub's other answers, and a full disk
        raise loaded.refuse(KEY, f"{name} cannot be fetched: {str(error).splitlines()[0]}") from error


def _check_weights(loaded: Loaded, folder: Path) -> None:
    """Weights are there and whole: a file that was cut does not have the length that its header says."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise loaded.refuse(KEY, f"{folder} is no model: it has no {WEIGHTS}", "save it with save_pretrained")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise loaded.refuse(KEY, f"{file} is damaged: {error}") from error
