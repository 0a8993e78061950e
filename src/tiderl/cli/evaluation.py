"""`tiderl eval`: how good is a model on held-out prompts, how sure is that, and what do its failures look like."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer

from tiderl.cli.options import AsJson, Overrides, print_json

Source = Annotated[str, typer.Argument(metavar="CONFIG|RUN", help="Configuration file, or a run.", show_default=False)]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="DIR", help="Model folder or hub id; a run's own model/ otherwise.", show_default=False
    ),
]
Samples = Annotated[int, typer.Option("--samples", min=1, metavar="N", help="Episodes for each prompt: best of N.")]
Show = Annotated[int, typer.Option("--show", min=0, metavar="N", help="Transcripts to print, failures first.")]

LABEL = 16


def evaluate(
    source: Source,
    model: Model = None,
    override: Overrides = None,
    samples: Samples = 1,
    show: Show = 0,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out prompts, without training.

    tiderl eval runs/babyai-1 --show 3

    tiderl eval examples/babyai.yaml --model runs/babyai-1/model-best -o eval.prompts=500 --samples 4
    """
    from tiderl.api import evaluate as judge

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = judge(source, override or [], model=model, samples=samples, show=show)
    if as_json:
        print_json(result)
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    from tiderl.observe.evaluation import lines

    for transcript in result["transcripts"]:
        print(transcript, end="\n\n")
    for label, text in lines(result):
        print(f"{label.ljust(LABEL)}{text}")
    for text in result["no_effect"]:
        print(f"note: {text}")
