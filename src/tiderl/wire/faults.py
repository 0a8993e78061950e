"""Errors across a channel: a `TideError` arrives as the same class, all else as an `InfrastructureFault`.

Only texts cross, never objects, so no code of the sender runs at the receiver.
"""

from __future__ import annotations

import traceback

from tiderl.data.errors import InfrastructureFault, TideError
from tiderl.wire.framing import ErrorText


def describe_error(error: BaseException) -> ErrorText:
    """What is sent for `error`. An unknown exception keeps type, message and its traceback's last line."""
    if isinstance(error, TideError):
        return ErrorText(type(error).__name__, error.what, error.where, error.hint)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return ErrorText(InfrastructureFault.__name__, f"{type(error).__name__}: {error}{place}")


def restore_error(text: ErrorText, peer: str = "") -> TideError:
    """The error as its own class again; `peer` is where it happened unless it says so itself."""
    return _instance(_classes().get(text.type, InfrastructureFault), text.what, text.where or peer, text.hint)


def error_for_reason(reason: str, what: str, where: str = "") -> TideError:
    """The error whose class carries `reason`; an unknown one is an `InfrastructureFault`."""
    by_reason = {kind.reason: kind for kind in reversed(_classes().values())}  # base over heir
    return _instance(by_reason.get(reason, InfrastructureFault), what, where, "")


def _instance(kind: type[TideError], what: str, where: str, hint: str) -> TideError:
    error = kind.__new__(kind)
    TideError.__init__(error, what, where=where, hint=hint)  # some classes take other arguments than these
    return error


def _classes() -> dict[str, type[TideError]]:
    """Every class of the tree by its name, a base before its children."""
    found: dict[str, type[TideError]] = {}
    waiting: list[type[TideError]] = [TideError]
    while waiting:
        kind = waiting.pop(0)
        found.setdefault(kind.__name__, kind)
        waiting.extend(kind.__subclasses__())
    return found
