"""Curves as a page and as a line of blocks; the tracker for TensorBoard read back by TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiderl.data.events import EvalFinished, RunStarted, UpdateCommitted
from tiderl.observe.curves import binned, read_rows, sparkline, write_curves
from tiderl.observe.metrics import RunMetrics
from tiderl.observe.trackers import TensorboardTracker, check_trackers


def committed(update: int, reward: float) -> UpdateCommitted:
    return UpdateCommitted(
        t_s=float(update),
        update=update,
        groups=2,
        trajectories=4,
        loss_tokens=8,
        tokens=20,
        reward_mean=reward,
        success_fraction=reward,
        staleness_max=0,
        staleness_mean_tokens=0.0,
        window_staleness_max=0,
        seconds=0.5,
        metrics={"loss": -reward, "grad_norm": float("nan")},
    )


def evaluated(version: int, successes: int) -> EvalFinished:
    return EvalFinished(
        t_s=float(version),
        version=version,
        prompts=10,
        successes=successes,
        failed=0,
        reward_mean=successes / 10,
        turns_mean=4.0,
        seconds=1.0,
    )


def test_a_sparkline_is_a_block_a_value_between_its_ends() -> None:
    assert sparkline([0.0, 0.5, 1.0], low=0.0, high=1.0) == "▁▅█"
    assert sparkline([-1.0, 2.0], low=0.0, high=1.0) == "▁█"
    assert sparkline([], low=0.0, high=1.0) == ""
    assert sparkline([3.0, 3.0], low=3.0, high=3.0) == "▁▁"


def test_more_values_than_blocks_are_averaged_in_equal_shares() -> None:
    assert binned([1, 2, 3, 4, 5], 2) == [1.5, 4.0]
    assert binned([1, 2], 9) == [1.0, 2.0]
    assert binned([], 3) == []
    assert len(sparkline([0.5] * 1000, low=0, high=1, width=30)) == 30


def rows(*values: dict) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


UPDATES = [{"kind": "update", "update": number, "reward_mean": number / 10} for number in (1, 2, 3)]
EVALS = [{"kind": "eval", "version": v, "success": s, "successes": 0, "prompts": 9} for v, s in ((0, 0.5), (3, None))]


def test_rows_are_read_once_each_also_of_a_resumed_run_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    again = {**UPDATES[1], "reward_mean": 0.9}
    path.write_text(rows(*UPDATES, *EVALS, again) + '{"kind": "upda', encoding="utf-8")
    updates, evals = read_rows(path)
    assert [row["reward_mean"] for row in updates] == [0.1, 0.9, 0.3]
    assert [row["version"] for row in evals] == [0, 3]


def test_the_page_is_complete_in_itself_and_holds_the_values(tmp_path: Path) -> None:
    metrics, page = tmp_path / "metrics.jsonl", tmp_path / "curves.html"
    metrics.write_text(rows(*UPDATES, *EVALS), encoding="utf-8")
    write_curves(metrics, page, title="a run")
    text = page.read_text(encoding="utf-8")
    assert "<script src=" not in text and "a run" in text and "held-out success" in text


def test_a_run_without_an_update_has_no_page(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("", encoding="utf-8")
    write_curves(metrics, tmp_path / "curves.html", title="")
    assert not (tmp_path / "curves.html").exists()


def test_tensorboard_reads_back_what_the_run_was(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = RunMetrics()
    metrics.observe(
        RunStarted(
            t_s=0.0,
            strategy="areal",
            seed=0,
            ranks=2,
            replicas=1,
            updates=2,
            global_batch_groups=2,
            group_size=2,
            max_staleness=1,
            staleness_counts="oldest_token",
        )
    )
    tracker = TensorboardTracker(tmp_path, metrics)
    for event in (evaluated(0, 4), committed(1, 0.25), committed(2, 0.5), evaluated(2, 8)):
        metrics.observe(event)
        tracker.observe(event)
    tracker.close()
    read = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0, "scalars": 0}).Reload()

    def values(tag: str) -> list[tuple[int, float]]:
        from tensorboard.util.tensor_util import make_ndarray

        return [(point.step, float(make_ndarray(point.tensor_proto))) for point in read.Tensors(tag)]

    assert values("train/reward_mean") == [(1, 0.25), (2, 0.5)]
    assert values("train/loss") == [(1, -0.25), (2, -0.5)]
    assert values("eval/success") == [(0, pytest.approx(0.4)), (2, pytest.approx(0.8))]
    assert "train/grad_norm" not in read.Tags()["tensors"]  # it was not finite


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra() -> None:
    from tiderl.data.errors import MissingExtraError

    check_trackers([])
    with pytest.raises(MissingExtraError, match="not_a_package") as caught:
        check_trackers(["not_a_package"])
    assert "tiderl[track]" in str(caught.value)
