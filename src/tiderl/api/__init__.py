"""Builds ports from a configuration and runs them: what the command line and a Python program call.

`train`, `simulate` and `compare` return what `--json` prints from `to_json()`; `load_run` reads a finished run,
`evaluate` judges a model, `export` makes a model folder of a checkpoint.
"""

from tiderl.api.compare import Comparison, compare
from tiderl.api.evaluate import evaluate
from tiderl.api.export import export
from tiderl.api.live import resume, train
from tiderl.api.records import RecordedRun, load_run
from tiderl.api.result import Result
from tiderl.api.virtual import simulate

__all__ = [
    "Comparison",
    "RecordedRun",
    "Result",
    "compare",
    "evaluate",
    "export",
    "load_run",
    "resume",
    "simulate",
    "train",
]
