"""The clairvoyant bound of a run on real time: the trajectories it consumed, at costs fitted to its own events.

A bound must not come from a mean that half of the work beats, so the fitted seconds of engine and trainer are cut to
what all but one in a hundred pieces of work took, and what was measured as means only (optimizer, publishing, loading)
counts as nothing. Environment seconds are taken as they were. It says how far the schedule is from the best one on this
very run, not how fast the machine could be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tiderl.api.bound import bound_figures, consumed_bound
from tiderl.api.result import Result
from tiderl.api.trace import recorded
from tiderl.config.resolve import Resolved
from tiderl.cost.calibrate import ENGINE, TRAINER, calibrate
from tiderl.cost.catalog import THIS_CPU, cost_model
from tiderl.data.errors import TideError
from tiderl.data.settings import ModelSettings
from tiderl.runtime.ports import Replay
from tiderl.sim.replay import TracedWorkload, groups_of_run
from tiderl.store.rundir import RunDirectory
from tiderl.store.sqlite import read_journal

MOST_EVENTS = 500_000
"""Beyond, reading them all again would take longer than the figure is worth: none is given."""
UNKNOWN = 1 << 30
"""Positions that fit a rank here: the engine's budget counts, not the memory of a described machine."""


def with_bound(result: Result, resolved: Resolved, directory: RunDirectory) -> Result:
    """The result with `bound_tokens_per_s`, `rho`, `rho_order` and `binding`; as it is where the run says too little:
    under `window`, before some turns and an update, and beyond `MOST_EVENTS`."""
    if resolved.settings.staleness_counts != "oldest_token" or result["events"] > MOST_EVENTS or not result["updates"]:
        return result
    try:
        found = _figures(resolved, directory, result["goodput_tokens_per_s"])
    except TideError:  # too few turns to fit, a group without a whole record: then there is no figure
        return result
    return Result({**result.values, **found})


def _figures(resolved: Resolved, directory: RunDirectory, goodput_tokens_per_s: float | None) -> Mapping[str, Any]:
    where = str(directory.root)
    recording = recorded(where).recording
    fitted = calibrate(recording, where=where)
    rollout = resolved.config.rollout
    workload = TracedWorkload(
        groups_of_run(recording, fitted, group_size=resolved.settings.group_size)["train"],
        {},
        where=where,
        max_turns=rollout.max_turns,
        max_context_tokens=rollout.max_context_tokens,
        max_new_tokens_per_turn=rollout.max_new_tokens_per_turn,
        # Which prompts begin alike is not looked at; engines find it out. So none need have been computed, or be held.
        system_tokens=rollout.max_context_tokens,
    )
    replay = read_journal(directory.journal)
    if replay is None or workload.recycled(_trained(replay)):
        return bound_figures(None, None)  # a consumed group whose record is not whole
    model = _model(resolved, directory)
    cost = cost_model(THIS_CPU, model).with_constants(
        {
            "kv_capacity_tokens": UNKNOWN,
            **{name: fitted.constants[name] * fitted.residuals["engine iterations"].low for name in ENGINE},
            **{name: fitted.constants[name] * fitted.residuals["trainer passes"].low for name in TRAINER},
            **dict.fromkeys(("pass_s", "optimizer_s", "publish_s", "load_s", "turn_s"), 0.0),
        }
    )
    bound = consumed_bound(resolved, replay, workload, cost, resolved.engine_settings(model))
    return bound_figures(bound, goodput_tokens_per_s)


def _trained(replay: Replay) -> list[int]:
    return [row.prompt_id for row in replay.trajectories if row.status == "trained"]


def _model(resolved: Resolved, directory: RunDirectory) -> ModelSettings:
    """Only its sizes count here, which are not fitted."""
    policy = json.loads(directory.policy.read_text(encoding="utf-8"))
    return resolved.model_settings(
        vocab_size=policy["vocab_size"], pad_id=policy["pad_id"], stop_ids=tuple(policy["stop_ids"])
    )
