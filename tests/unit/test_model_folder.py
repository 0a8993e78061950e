"""`model.path`: what is taken, what is refused, and what a hub says, from a hub of our own on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tiderl.config.load import load_config
from tiderl.config.machine import prepare
from tiderl.config.model_folder import model_folder
from tiderl.data.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
SIZES = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 1024,
}


def write_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | changes), encoding="utf-8")
    save_file({"a": np.zeros((64, 64), np.float32)}, folder / "model.safetensors")
    return folder


def write_config(tmp_path: Path, path: object, more: str = "") -> Path:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: {json.dumps(str(path))}}}\n{more}", encoding="utf-8")
    return config


def refusal(tmp_path: Path, path: object, *, whole: bool = True) -> str:
    with pytest.raises(ConfigurationError) as caught:
        model_folder(load_config(write_config(tmp_path, path)), whole=whole)
    message = str(caught.value)
    assert "model.path: " in message and len(message.splitlines()) <= 2
    return message


def test_scratch_has_no_folder_and_a_folder_is_itself(tmp_path: Path) -> None:
    assert model_folder(load_config(write_config(tmp_path, "scratch")), whole=True) is None
    folder = write_folder(tmp_path / "model")
    assert model_folder(load_config(write_config(tmp_path, folder)), whole=True) == folder


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path, "./nowhere")
    assert "no such folder" in refusal(tmp_path, "a/b/c")
    (tmp_path / "file").touch()
    assert "no such folder" in refusal(tmp_path, tmp_path / "file")
    assert "no config.json" in refusal(tmp_path, tmp_path)
    folder = write_folder(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert "is damaged" in refusal(tmp_path, folder)
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(tmp_path, folder)
    assert model_folder(load_config(write_config(tmp_path, folder)), whole=False) == folder  # a dry run needs none


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, write_folder(tmp_path / "model", max_position_embeddings=100))
    with pytest.raises(ConfigurationError, match=r"512 is more than the 100 positions[\s\S]*at most 100"):
        prepare(config, command="train", needs_weights=True)
    assert prepare(config, ["rollout.max_context_tokens=100"], command="train").shape.layers == 2


# ------------------------------------------------------------------------------------------ a hub


class Hub(BaseHTTPRequestHandler):
    """`org/open` has a model, `org/gated` is gated, everything else is not there; files and headers as the hub's."""

    files: dict[str, bytes] = {}  # noqa: RUF012 set once by the fixture
    commit = "0" * 40

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def do_GET(self, *, head: bool = False) -> None:
        path = self.path.partition("?")[0]
        if "/gated" in path:
            self._answer(403, b"gated", head, {"X-Error-Code": "GatedRepo"})
        elif "/open" not in path:
            self._answer(404, b"none", head, {"X-Error-Code": "RepoNotFound"})
        elif "/api/" in path and "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in self.files.items()]
            self._answer(200, json.dumps(tree).encode(), head, {"Content-Type": "application/json"})
        elif "/api/" in path:
            siblings = [{"rfilename": name} for name in self.files]
            about = {"id": "org/open", "sha": self.commit, "siblings": siblings}
            self._answer(200, json.dumps(about).encode(), head, {"Content-Type": "application/json"})
        else:
            name = path.rpartition("/")[2]
            self._answer(200, self.files[name], head, {"ETag": f'"{name}"', "X-Repo-Commit": self.commit})

    def _answer(self, status: int, body: bytes, head: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    folder = write_folder(tmp_path / "served")
    Hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


FOLDER_OF = """
import sys
from tiderl.config.load import load_config
from tiderl.config.model_folder import model_folder
from tiderl.data.errors import ConfigurationError
try:
    folder = model_folder(load_config(sys.argv[1]), whole=sys.argv[2] == "whole")
    print(*sorted(path.name for path in folder.iterdir()))
except ConfigurationError as error:
    print(error)
"""


def ask(tmp_path: Path, name: str, endpoint: str, *, whole: bool = True, offline: bool = False) -> str:
    """In a process of its own: the hub's library reads its environment once."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {
        "HF_HOME": str(tmp_path / "cache"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    arguments = [sys.executable, "-c", FOLDER_OF, str(write_config(tmp_path, name)), "whole" if whole else "part"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert 1 <= len(lines) <= 2, done.stdout
    return "\n".join(lines)


@pytest.mark.live
def test_a_hub_id_is_fetched_once_and_found_offline_later(tmp_path: Path, hub: str) -> None:
    assert ask(tmp_path, "org/open", hub, whole=False) == "config.json"  # a dry run fetches no weights
    assert "not in the local cache and HF_HUB_OFFLINE is set" in ask(tmp_path, "org/open", hub, offline=True)
    assert ask(tmp_path, "org/open", hub) == "config.json model.safetensors"
    assert ask(tmp_path, "org/open", hub, offline=True) == "config.json model.safetensors"


@pytest.mark.live
def test_gated_missing_and_unreachable_models_are_told_apart(tmp_path: Path, hub: str) -> None:
    gated = ask(tmp_path, "org/gated", hub)
    assert "org/gated is gated" in gated and "accept its terms" in gated
    assert "neither a folder here nor a model of the hub" in ask(tmp_path, "org/missing", hub)
    nobody = ask(tmp_path, "org/open", "http://127.0.0.1:9")
    assert "not in the local cache and the hub cannot be reached" in nobody


def test_a_model_family_that_the_engine_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", model_type="gpt2")
    with pytest.raises(ConfigurationError, match=r"model\.path: .*'gpt2'.* not yet supported"):
        prepare(write_config(tmp_path, folder), command="train")
