"""The last words of a run: what it reached, what was dropped and why, what to do next.

Made from the result's figures only, so that a person and `--json` are told the same. Reads no file of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tiderl.cost.bound import RHO, RHO_ORDER
from tiderl.observe.books import INTERRUPTED
from tiderl.observe.curves import sparkline
from tiderl.observe.kv import BY_TASK
from tiderl.observe.prediction import prediction_lines
from tiderl.observe.words import count, duration, fraction, number

LABEL = 18
DROPPED_LIMIT = 0.2
"""Above this share of trajectories that the run itself dropped, a person should look at the environment before trusting
the figures."""
BIAS_FRACTION = 0.01
"""Of the issued trajectories: fewer dropped ones say nothing about the others."""
MIN_CURVE_POINTS = 3
"""First and last are said in figures already."""
DRIVER_LOAD_LIMIT = 0.5
"""Above this share of its time the driver's own work would limit the run (docs/architecture.md)."""


def summary_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each line; what the result does not have is left out."""
    lines = [
        ("updates", f"{result['updates']} ({result['strategy']}, seed {result['seed']})"),
        ("held-out success", _from_to(result, "eval_success", fraction) + _spark(result, "eval_success", 0.0, 1.0)),
        ("reward", _from_to(result, "reward", number) + _spark(result, "reward")),
        *((name, _environment(figures)) for name, figures in (result.get("environments") or {}).items()),
        ("goodput", _goodput(result)),
        ("staleness", _staleness(result)),
        ("waits", _waits(result)),
        ("KV by task", _kv(result)),
        ("trajectories", _trajectories(result)),
        ("dropped", _by_name(result.get("dropped"))),
        ("lengths", _lengths(result)),
        ("faults", _by_name(result.get("faults"))),
        ("log-prob gap", _gap(result)),
        ("time", _times(result)),
        ("simulation", _simulation(result)),
        ("bound", _bound(result)),
        ("", _ratio(result, "rho", RHO)),
        ("", _ratio(result, "rho_order", RHO_ORDER)),
        *prediction_lines(result),
        ("written to", str(result.get("run_dir") or "")),
    ]
    return [(label, text) for label, text in lines if text]


def warnings(result: Mapping[str, Any], no_effect: Sequence[object] = ()) -> list[str]:
    """What a reader of the figures must know."""
    found = [str(item) for item in no_effect]
    load = result.get("driver_load_fraction")
    if load is not None and load > DRIVER_LOAD_LIMIT:
        found.append(f"the driver was busy for {load:.0%} of the time: one driver would be the bottleneck of this run")
    if _favours_short(result):
        found.append(
            "what was dropped was longer than what was trained: the rewards are those of short trajectories too often; "
            "raise env.deadline_s if time-outs are the reason"
        )
    dropped, issued = _failed(result)
    if issued and dropped > DROPPED_LIMIT * issued:
        found.append(
            f"{dropped / issued:.0%} of the issued trajectories were dropped: look at what fails before you trust the "
            "figures"
        )
    if result.get("logprob_gap_alarms"):
        found.append(f"engine and trainer disagreed beyond rounding in {count(result['logprob_gap_alarms'], 'update')}")
    return found


def render_summary(
    result: Mapping[str, Any], *, no_effect: Sequence[object] = (), next_commands: Sequence[str] = ()
) -> RenderableType:
    """Figures, warnings, and the commands that come next."""
    parts: list[RenderableType] = [Text(_headline(result), style="bold")]
    parts += [Text.assemble((label.ljust(LABEL), "dim"), text) for label, text in summary_lines(result)]
    parts += [Text(f"note: {text}", style="yellow") for text in warnings(result, no_effect)]
    parts += [Text(f"next: {command}") for command in next_commands]
    return Group(*parts)


def _headline(result: Mapping[str, Any]) -> str:
    outcome = {"done": "done", "stopped": "stopped on request", "failed": "failed"}.get(
        str(result.get("outcome")), "done"
    )
    return f"{outcome} after {count(result['updates'], 'update')}"


def _from_to(result: Mapping[str, Any], name: str, shown: Any) -> str:
    first, last = result.get(f"{name}_first"), result.get(f"{name}_last")
    return "" if last is None else f"{shown(first)} at first, {shown(last)} at last"


def _environment(figures: Mapping[str, Any]) -> str:
    """One environment of a mixture."""
    parts = [
        _labelled("success ", _from_to(figures, "eval_success", fraction)),
        _labelled("reward ", _from_to(figures, "reward", number)),
        f"{figures['trained']:,} trained",
        _labelled("dropped: ", _by_name(figures["dropped"])),
    ]
    return "; ".join(part for part in parts if part)


def _labelled(label: str, text: str) -> str:
    return label + text if text else ""


def _spark(result: Mapping[str, Any], name: str, low: float | None = None, high: float | None = None) -> str:
    """The curve as blocks, from two points on; between its own ends where none are given."""
    values = [value for _, value in result.get(f"{name}_curve") or () if value is not None]
    if len(values) < MIN_CURVE_POINTS:
        return ""
    return "  " + sparkline(values, low=min(values) if low is None else low, high=max(values) if high is None else high)


def _goodput(result: Mapping[str, Any]) -> str:
    if result.get("goodput_tokens_per_s") is None:
        return ""
    return (
        f"{number(result['goodput_tokens_per_s'])} tokens/s, "
        f"{number(result.get('goodput_tokens_per_rank_s'))} for each rank, "
        f"{number(result.get('consumed_groups_per_s'))} groups/s"
    )


def _staleness(result: Mapping[str, Any]) -> str:
    if result.get("staleness_max") is None:
        return ""
    mean = f"{number(result.get('staleness_mean_tokens'))} mean over tokens"
    if result.get("staleness_counts") == "window":
        waited = result.get("window_staleness_max")
        by_age = f"by token age {mean}, {result['staleness_max']} at most"
        return f"at most {waited} updates between ready and trained (window); {by_age}"
    return f"{mean}, {result['staleness_max']} at most (updates)"


def _waits(result: Mapping[str, Any]) -> str:
    if result.get("twt_s") is None:
        return ""
    return f"trainer {duration(result['twt_s'])}, rollout {duration(result.get('rwt_s'))}"


def _kv(result: Mapping[str, Any]) -> str:
    """One line where the schedule decides what KV stays."""
    if result.get("kv_policy") != BY_TASK:
        return ""
    ratio, weights = result.get("kv_retention_ratio"), result.get("kv_priority_weights") or {}
    order = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    parts = [
        f"{fraction(result.get('kv_hit_fraction'))} of context tokens hit",
        f"{result['tasks_paused']:,} paused ({duration(result['paused_s'])})",
        f"{result['tasks_migrated']:,} migrated",
        "" if ratio is None else f"waits cost {ratio:.2f} x a clairvoyant's",
        _labelled("weights: ", order),
    ]
    return ", ".join(part for part in parts if part)


def _trajectories(result: Mapping[str, Any]) -> str:
    dropped = sum(result["dropped"].values())
    return (
        f"{result['issued']:,} issued = {result['trained']:,} trained + {dropped:,} dropped + "
        f"{result['in_flight']:,} in flight"
    )


def _lengths(result: Mapping[str, Any]) -> str:
    """Trained against dropped: a bias to short trajectories shows here."""
    if result.get("dropped_tokens_mean") is None or result.get("trained_tokens_mean") is None:
        return ""
    reasons = result.get("dropped_tokens_mean_by_reason") or {}
    each = ", ".join(f"{reason.replace('_', ' ')} {number(mean, 0)}" for reason, mean in reasons.items())
    return (
        f"trained {number(result['trained_tokens_mean'], 0)} tokens mean, "
        f"dropped {number(result['dropped_tokens_mean'], 0)} when they were dropped ({each})"
    )


def _failed(result: Mapping[str, Any]) -> tuple[int, int]:
    """Dropped and issued trajectories, without those that an interruption of the run cost."""
    dropped: Mapping[str, int] = result.get("dropped") or {}
    interrupted = dropped.get(INTERRUPTED, 0)
    return sum(dropped.values()) - interrupted, (result.get("issued") or 0) - interrupted


def _favours_short(result: Mapping[str, Any]) -> bool:
    """Dropped ones were cut short, so a larger mean of theirs is no chance of where they were cut."""
    dropped, trained = result.get("dropped_tokens_mean"), result.get("trained_tokens_mean")
    if dropped is None or trained is None:
        return False
    failed, issued = _failed(result)
    if failed < BIAS_FRACTION * issued:
        return False
    return bool(dropped > trained)


def _by_name(counts: Mapping[str, int] | None) -> str:
    return ", ".join(f"{amount:,} {name.replace('_', ' ')}" for name, amount in (counts or {}).items())


def _gap(result: Mapping[str, Any]) -> str:
    gap = result.get("logprob_gap_mean")
    return "" if gap is None else f"{gap:.1e} mean between engine and trainer"


def _times(result: Mapping[str, Any]) -> str:
    wall = result.get("wall_s")
    clock = f"{duration(result.get('clock_s'))} on the run's clock, {duration(result.get('setup_s'))} of it set-up"
    return clock if wall is None else f"{duration(wall)} in all; {clock}"


def _simulation(result: Mapping[str, Any]) -> str:
    if result.get("log_sha256") is None:
        return ""
    return f"{result['events']:,} events, log SHA-256 {result['log_sha256']}"


def _bound(result: Mapping[str, Any]) -> str:
    best = result.get("bound_tokens_per_s")
    return "" if best is None else f"{best:,.0f} tokens/s for any schedule; {result['binding']} binds"


def _ratio(result: Mapping[str, Any], name: str, definition: str) -> str:
    value = result.get(name)
    return "" if value is None else f"{name} {value:.2f} ({definition})"
