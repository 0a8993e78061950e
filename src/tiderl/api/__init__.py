"""Builds ports from a configuration and runs them: what the command line and a Python program call.

`train` and `simulate` return the result whose `to_json()` is what `--json` prints; `load_run` reads a finished run.
"""

from tiderl.api.live import resume, train
from tiderl.api.records import RecordedRun, load_run
from tiderl.api.result import Result
from tiderl.api.virtual import simulate

__all__ = ["RecordedRun", "Result", "load_run", "resume", "simulate", "train"]
