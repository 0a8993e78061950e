"""`tiderl train` and `tiderl sim`: the same file, on real or on virtual time.

Shows the run on stderr while it goes, its summary at the end; with `--json`, stdout has the result and nothing else.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tiderl.cli.options import AsJson, Overrides, print_json
from tiderl.cli.swarm import run_swarm
from tiderl.data.errors import ConfigurationError

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved file with the origin of every key; run nothing.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete a run of this name first.")]
MaybeConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="Configuration file (YAML).", show_default=False)
]
Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="RUN", help="Go on with this run, by name or folder.", show_default=False),
]
Save = Annotated[
    str | None,
    typer.Option(
        "--save", metavar="NAME", help="Keep events, configuration and result under runs/NAME.", show_default=False
    ),
]


Swarm = Annotated[
    int | None,
    typer.Option("--swarm", metavar="N", min=1, help="Run N small instances with faults.", show_default=False),
]
SwarmSeed = Annotated[
    int | None,
    typer.Option("--seed", metavar="S", min=0, help="Of the first of a swarm's instances.", show_default=False),
]

Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="RUN|FILE", help="Replay a recorded workload.", show_default=False),
]
CalibratedBy = Annotated[
    str | None,
    typer.Option("--calibrate", metavar="RUN", help="Costs fitted to this recorded run.", show_default=False),
]


def train(
    config: MaybeConfigFile = None,
    resume: Resume = None,
    override: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Train an agent, or go on with a run.

    tiderl train examples/babyai.yaml -o seed=1 -o train.updates=20

    tiderl train --resume runs/babyai-1

    Ctrl-C stops after the update in progress, with a checkpoint; a second one stops at once.
    """
    overrides = override or []
    _check_usage(config, resume, dry_run, overwrite)
    if dry_run:
        assert config is not None
        _dry_run(config, overrides, "train", as_json)
        return
    from tiderl import api
    from tiderl.observe.live import LiveView

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    view = LiveView()
    try:
        if resume is not None:
            result = api.resume(resume, overrides, observer=view).to_json()
        else:
            assert config is not None
            result = api.train(config, overrides, overwrite=overwrite, observer=view).to_json()
    finally:
        view.close()
    profile = None if (run_dir := result.get("run_dir")) is None else api.load_run(run_dir).profile
    _finish(result, as_json, _after_training(result), profile)


def _check_usage(config: Path | None, resume: str | None, dry_run: bool, overwrite: bool) -> None:
    if (config is None) == (resume is None):
        raise ConfigurationError(
            "give a configuration file, or --resume RUN, not both", hint="try: tiderl train --help"
        )
    if resume is not None and (dry_run or overwrite):
        option = "--dry-run" if dry_run else "--overwrite"
        raise ConfigurationError(f"{option} does not go with --resume", hint="try: tiderl train --help")


def sim(
    config: MaybeConfigFile = None,
    override: Overrides = None,
    dry_run: DryRun = False,
    save: Save = None,
    trace: Trace = None,
    calibrate: CalibratedBy = None,
    swarm: Swarm = None,
    seed: SwarmSeed = None,
    as_json: AsJson = False,
) -> None:
    """Run the same configuration on a virtual clock, with simulated ranks.

    tiderl sim examples/babyai.yaml -o cluster.ranks=64 -o schedule.strategy=sync

    The same file and seed give the same events, byte for byte: their SHA-256 is in the result.

    tiderl sim examples/builtin.yaml --swarm 200 --seed 7

    A swarm runs as many small instances of the file, each with its own sizes and faults, and checks every rule in each.

    tiderl sim --trace runs/r1

    A trace is a recorded run, or a CSV file of turns: its workload is played again, with costs fitted to the run, and
    what is predicted is compared with what was measured.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    overrides = override or []
    _check_sim_usage(config, trace, dry_run=dry_run, swarm=swarm, calibrate=calibrate, save=save, seed=seed)
    if trace is not None:
        from tiderl.api.trace import replay

        result = replay(trace, overrides, config=config, calibrated_by=calibrate, save=save, progress=_say).to_json()
        _finish(result, as_json, [])
        return
    assert config is not None
    if swarm is not None:
        run_swarm(config, overrides, swarm, seed or 0, as_json, given=dry_run or save is not None)
        return
    if dry_run:
        _dry_run(config, overrides, "sim", as_json)
        return
    from tiderl.api import simulate

    result = simulate(config, overrides, save=save, calibrated_by=calibrate, progress=_say).to_json()
    _finish(result, as_json, [])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_sim_usage(
    config: Path | None,
    trace: str | None,
    *,
    dry_run: bool,
    swarm: int | None,
    calibrate: str | None,
    save: str | None,
    seed: int | None,
) -> None:
    hint = "try: tiderl sim --help"
    if config is None and trace is None:
        raise ConfigurationError("give a configuration file, or --trace with a recorded run", hint=hint)
    if trace is not None and (dry_run or swarm is not None):
        raise ConfigurationError("--dry-run and --swarm do not go with --trace", hint=hint)
    if calibrate is not None and (dry_run or swarm is not None):
        raise ConfigurationError("--dry-run and --swarm do not go with --calibrate", hint=hint)
    if save is not None and dry_run:
        raise ConfigurationError("--save does not go with --dry-run, which runs nothing", hint=hint)
    if seed is not None and swarm is None:
        raise ConfigurationError("--seed goes with --swarm", hint="the seed of one run is -o seed=N")


def _dry_run(config: Path, overrides: Sequence[str], command: Literal["train", "sim"], as_json: bool) -> None:
    from tiderl.config.load import dump
    from tiderl.config.machine import prepare
    from tiderl.config.render import render_dry_run
    from tiderl.envs.registry import check_form

    resolved = prepare(config, overrides, command=command)
    for env in resolved.config.environments.values():
        check_form(env.name)
    if as_json:
        no_effect = [str(item) for item in resolved.no_effect]
        print_json({"config": dump(resolved.config), "origins": dict(resolved.origins), "no_effect": no_effect})
        return
    sys.stdout.write(render_dry_run(resolved))


def _finish(
    result: dict[str, Any], as_json: bool, next_commands: Sequence[str], profile: dict[str, Any] | None = None
) -> None:
    """Profile and summary go to stdout, or to stderr where stdout is the JSON object's. A stopped run ends with code
    130."""
    from rich.console import Console

    from tiderl.observe.profile import render_profile
    from tiderl.observe.summary import render_summary

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    if profile is not None:
        console.print(render_profile(profile))
    console.print(render_summary(result, no_effect=result.get("no_effect") or (), next_commands=next_commands))
    if as_json:
        print_json(result)
    if result.get("outcome") == "stopped":
        raise typer.Exit(130)


def _after_training(result: dict[str, Any]) -> list[str]:
    run_dir = result.get("run_dir")
    if not run_dir:
        return []
    resume = [f"tiderl train --resume {run_dir}"] if result.get("outcome") == "stopped" else []
    return [*resume, f"tiderl show {run_dir} --last 3"]
