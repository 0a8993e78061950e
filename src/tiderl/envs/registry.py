"""The registry: one line an environment, readable without importing it; and finding a class by name, path or
module.

A name that is no environment is a `ConfigurationError` that says what is wrong with it. Must not know
isolations.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tiderl.data.errors import ConfigurationError, MissingExtraError, TideError
from tiderl.data.settings import WorkloadProfile
from tiderl.envs.base import REQUIRED, missing_methods

WHERE = "env.name"


@dataclass(frozen=True)
class Entry:
    """A registry line. `profile` is how the environment behaves, for virtual time."""

    name: str
    path: str
    extra: str | None
    package: str | None
    summary: str
    profile: WorkloadProfile


DEFAULT_PROFILE = WorkloadProfile(
    turns_median=5.0,
    turns_sigma=0.6,
    first_observation_tokens=100.0,
    observation_tokens=50.0,
    observation_sigma=0.8,
    action_tokens=20.0,
    action_sigma=0.8,
    step_s=0.05,
    step_sigma=1.0,
    reset_s=0.05,
)
"""What virtual time assumes of an environment whose behaviour nobody measured: a small tool-using task."""

# The others are what `tiderl env check NAME` measures: the expert's turns, tokens of the words renderer, seconds.
REGISTRY = {
    entry.name: entry
    for entry in (
        Entry(
            "babyai",
            "tiderl.envs.babyai:BabyAI",
            "babyai",
            "minigrid",
            "BabyAI levels as text: find the named object in a room (minigrid; option level)",
            WorkloadProfile(
                turns_median=5.0,
                turns_sigma=0.5,
                first_observation_tokens=11.0,
                observation_tokens=8.0,
                observation_sigma=0.25,
                action_tokens=2.0,
                action_sigma=0.0,
                step_s=0.0004,
                step_sigma=0.8,
                reset_s=0.0012,
            ),
        ),
        Entry(
            "builtin",
            "tiderl.envs.builtin:Fetch",
            None,
            None,
            "Find and take the named object in a small grid seen from within; no dependencies",
            WorkloadProfile(
                turns_median=5.0,
                turns_sigma=0.5,
                first_observation_tokens=13.0,
                observation_tokens=11.0,
                observation_sigma=0.3,
                action_tokens=2.0,
                action_sigma=0.0,
                step_s=0.00015,
                step_sigma=0.8,
                reset_s=0.0003,
            ),
        ),
        Entry(
            "gym",
            "tiderl.envs.gym:GymText",
            "babyai",
            "gymnasium",
            "Any Gymnasium environment with text observations (options id, actions, kwargs, max_turns)",
            DEFAULT_PROFILE,
        ),
    )
}


def profile(name: str) -> WorkloadProfile:
    """The workload of a registered environment, else `DEFAULT_PROFILE`. Imports nothing."""
    return REGISTRY[name].profile if name in REGISTRY else DEFAULT_PROFILE


def load(name: str) -> type:
    """The environment class behind a registered name, `./file.py:Class` or `package.module:Class`.

    Raises `ConfigurationError`: no such name, file, module or class, a syntax error, a module that fails at
    import, a class that is no environment; `MissingExtraError` when a registered one needs a package that is
    not there.
    """
    if name in REGISTRY:
        return _load_registered(REGISTRY[name])
    source, colon, class_name = name.rpartition(":")
    if not colon or not source or not class_name:
        raise _unknown_name(name)
    is_file = source.endswith(".py") or "/" in source
    module = _import_file(Path(source), name) if is_file else _import_module(source, name)
    return _environment_in(module, class_name, name)


def check_form(name: str) -> None:
    """Refuse at once what can be refused without importing: an unknown name, a file that is not there."""
    if name in REGISTRY:
        return
    source, colon, class_name = name.rpartition(":")
    if not colon or not source or not class_name:
        raise _unknown_name(name)
    if source.endswith(".py") or "/" in source:
        _existing_file(Path(source))


def _load_registered(entry: Entry) -> type:
    module_name, _, class_name = entry.path.partition(":")
    if entry.package is not None and importlib.util.find_spec(entry.package) is None:
        raise MissingExtraError(entry.package, str(entry.extra), where=f"{WHERE} {entry.name}")
    found: type = getattr(importlib.import_module(module_name), class_name)
    return found


def _unknown_name(name: str) -> ConfigurationError:
    close = difflib.get_close_matches(name, REGISTRY, n=1)
    if name.endswith(".py"):
        hint = f"name the class in it: {name}:Mine"
    elif close:
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = f"known: {', '.join(REGISTRY)}; or your own: ./mine.py:Mine, package.module:Class"
    return ConfigurationError(f"no environment is called {name!r}", where=WHERE, hint=hint)


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.py")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"looked in {path.parent.resolve()}"
        raise ConfigurationError(f"there is no file {path}", where=WHERE, hint=hint)
    return path


def _import_file(path: Path, name: str) -> ModuleType:
    path = _existing_file(path).resolve()
    module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file", where=WHERE, hint="its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    sys.modules[module_name] = module  # dataclasses and typing look the module up while it runs
    try:
        _supervised(functools.partial(spec.loader.exec_module, module), name)
    except ConfigurationError:
        del sys.modules[module_name]
        raise
    return module


def _import_module(module_name: str, name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        hint = "a file is named by its path: ./mine.py:Mine"
        raise ConfigurationError(f"there is no module {module_name!r}", where=WHERE, hint=hint)
    _supervised(lambda: importlib.import_module(module_name), name)
    return sys.modules[module_name]


def _supervised(imports: Callable[[], object], name: str) -> None:
    """Run an import of the user's code; whatever it raises is a `ConfigurationError` that names the line."""
    try:
        imports()
    except TideError:
        raise
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise ConfigurationError(f"syntax error: {error.msg}", where=f"{WHERE} {name}", hint=f"at {place}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
        raise ConfigurationError(
            f"importing it raised {type(error).__name__}: {error}",
            where=f"{WHERE} {name}",
            hint=f"at {place}",
        ) from error


def _environment_in(module: ModuleType, class_name: str, name: str) -> type:
    found = getattr(module, class_name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        close = difflib.get_close_matches(class_name, classes, n=1)
        hint = f"did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"it has no class {class_name!r}", where=f"{WHERE} {name}", hint=hint)
    if not isinstance(found, type):
        raise ConfigurationError(f"{class_name!r} is not a class", where=f"{WHERE} {name}")
    missing = missing_methods(found)
    if missing:
        raise ConfigurationError(
            f"{class_name!r} is not an environment: it has no {', '.join(missing)}",
            where=f"{WHERE} {name}",
            hint=f"an environment writes {', '.join(REQUIRED)}",
        )
    return found
