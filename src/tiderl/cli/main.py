"""The `tiderl` command: its entry, and the boundary where every failure becomes one or two lines and an exit code.

0 done; 1 failed run; 2 bad usage or configuration; 130 stopped by Ctrl-C or SIGTERM. Imports stay light: what a command
needs beyond parsing is imported when it runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from tiderl.cli import compare, doctor, env, evaluation, export, init, run, show
from tiderl.data.errors import ConfigurationError, RunStopped, TideError

DONE, FAILED, BAD_USAGE, STOPPED = 0, 1, 2, 130
DEBUG = "TIDERL_DEBUG"
"""Set to anything: a failure shows its traceback."""

# typer brings its own copy of click's exceptions in some versions: the classes are taken from its public subclass.
CommandError: type[Exception] = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """Ctrl-C in any command is told by the boundary below: typer itself would end without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise RunStopped("stopped") from None


app = typer.Typer(
    name="tiderl",
    cls=Commands,
    help="Train LLM agents with reinforcement learning, on real or on virtual time.",
    epilog="Start with: tiderl doctor; tiderl train examples/builtin.yaml. Failures in full: TIDERL_DEBUG=1.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.train)
app.command()(run.sim)
app.command()(compare.compare)
app.command("eval")(evaluation.evaluate)
app.command()(export.export)
app.command()(show.show)
app.add_typer(env.app, name="env")
app.command()(init.init)
app.command()(doctor.doctor)


def _version(shown: bool) -> None:
    if shown:
        from tiderl import __version__

        print(f"tiderl {__version__}")
        raise typer.Exit


@app.callback()
def _tiderl(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Train LLM agents with reinforcement learning, on real or on virtual time."""


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Raises `SystemExit` with the exit code."""
    raise SystemExit(execute(sys.argv[1:] if argv is None else argv))


def execute(argv: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = app(args=list(argv), prog_name="tiderl", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return _say(KeyboardInterrupt("stopped"), "stopped", STOPPED)
    except CommandError as error:
        return _bad_usage(error)
    except RunStopped as error:
        return _say(error, str(error), STOPPED)
    except ConfigurationError as error:
        return _say(error, str(error), BAD_USAGE)
    except TideError as error:
        return _say(error, str(error), FAILED)
    except Exception as error:  # noqa: BLE001 - the outermost boundary: the type is named, the traceback is a variable away
        return _say(error, f"{type(error).__name__}: {error}\n  a fault of TideRL; {DEBUG}=1 shows where", FAILED)
    return code if isinstance(code, int) else DONE


def _say(error: BaseException, text: str, code: int) -> int:
    """At most two lines on stderr."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    first, _, rest = text.partition("\n")
    lines = [f"tiderl: {first}", *([f"  {' '.join(rest.split())}"] if rest.strip() else [])]
    print("\n".join(lines), file=sys.stderr)
    return code


def _bad_usage(error: Exception) -> int:
    """What is wrong and where to read on; the help itself where nothing was asked."""
    message = getattr(error, "format_message", lambda: str(error))()
    if message.startswith("Usage:"):
        print(message, file=sys.stderr)
        return BAD_USAGE
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "tiderl"
    return _say(error, f"{message.rstrip('.')}\n  try: {command} --help", BAD_USAGE)


if __name__ == "__main__":
    main()
