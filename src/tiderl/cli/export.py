"""`tiderl export`: a checkpoint of a run as a model folder that transformers and vLLM load."""

from __future__ import annotations

from typing import Annotated

import typer

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)
]
Update = Annotated[
    int | None,
    typer.Option("--update", min=0, metavar="N", help="After which update; the newest checkpoint otherwise."),
]
To = Annotated[str, typer.Option("--to", metavar="DIR", help="A folder that does not exist yet.", show_default=False)]


def export(run: RunName, to: To, update: Update = None) -> None:
    """Write a checkpoint as a Hugging Face folder.

    tiderl export runs/babyai-1 --to my-model

    tiderl export runs/babyai-1 --update 40 --to my-model-40

    A run that ended has model/ already, and model-best/ with the best held-out success.
    """
    from tiderl.api import export as write

    number = write(run, to, update=update)
    print(f"the model after update {number} is in {to}")
