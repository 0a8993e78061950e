"""`log.profile` on real runs: every process's spans add up to its time, however the run ends; without it, nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.kills import TINY

from tiderl.api import load_run, resume, train
from tiderl.cli.main import execute
from tiderl.data.events import Event, UpdateCommitted

pytestmark = pytest.mark.live

PROFILED = "log.profile=true"
INLINE = ("cluster.kind=inline", "cluster.ranks=1", "eval.every_updates=0", "train.updates=2")
ENGINE = {"admit", "prefill", "decode", "sample", "retire", "load_weights"}
TRAINER = {"reference", "forward", "backward", "optimizer", "export", "save"}


class AtUpdate:
    """An observer that acts once, at the commit of this update."""

    def __init__(self, update: int, act: Callable[[], None]) -> None:
        self.update, self.act = update, act

    def observe(self, event: Event) -> None:
        if isinstance(event, UpdateCommitted) and event.update == self.update:
            self.act()

    def recall(self, event: Event) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.yaml").write_text(TINY)


def profile_of(name: str, overrides: Sequence[str] = (), observer: Any = None) -> dict[str, Any]:
    train("k.yaml", [f"run={name}", PROFILED, *overrides], observer=observer)
    found = load_run(name).profile
    assert found is not None
    return found


def assert_adds_up(host: dict[str, Any]) -> None:
    assert sum(span["wall_s"] for span in host["spans"].values()) == pytest.approx(host["wall_s"], rel=0.02)
    assert sum(span["cpu_s"] for span in host["spans"].values()) <= host["cpu_s"] + 0.02
    assert all(span["wall_s"] >= 0 and span["count"] >= 0 for span in host["spans"].values())


def test_the_spans_of_every_process_add_up_to_the_window() -> None:
    profile = profile_of("a")
    assert profile["updates"] == 12
    hosts = profile["hosts"]
    assert list(hosts) == ["driver", "environment workers", "rank 0: engine", "rank 1: trainer"]
    for host in hosts.values():
        assert_adds_up(host)
        assert host["processes"] == 1
        assert host["wall_s"] == pytest.approx(profile["wall_s"], rel=0.2, abs=0.3)  # asked a message later
    assert hosts["driver"]["wall_s"] == pytest.approx(profile["wall_s"], rel=0.02)
    assert hosts["rank 0: engine"]["spans"].keys() >= ENGINE
    assert hosts["rank 1: trainer"]["spans"].keys() >= TRAINER
    assert hosts["driver"]["spans"].keys() >= {"idle", "send", "receive", "play tasks", "training loop", "events"}
    assert hosts["driver"]["beside"].keys() == {"journal"}
    assert hosts["environment workers"]["beside"].keys() >= {"reset", "step", "send"}
    assert hosts["rank 1: trainer"]["spans"]["optimizer"]["count"] == 12
    warm_up = hosts["rank 1: trainer"]["spans"].get("warm_up", {"count": 0})
    assert warm_up["count"] == 0  # it came before the first prompt


def test_inline_one_process_has_it_all() -> None:
    profile = profile_of("a", INLINE)
    assert list(profile["hosts"]) == ["driver"]
    driver = profile["hosts"]["driver"]
    assert_adds_up(driver)
    assert driver["spans"].keys() >= ENGINE | TRAINER | {"environment", "journal", "payloads"}
    assert driver["spans"]["backward"]["wall_ms_per_update"] == pytest.approx(
        1000 * driver["spans"]["backward"]["wall_s"] / 2
    )


def test_without_it_nothing_is_written_and_the_result_is_the_same() -> None:
    without = train("k.yaml", ["run=a", *INLINE])
    assert load_run("a").profile is None
    assert not Path("runs/a/profile.json").exists()
    with_it = train("k.yaml", ["run=b", PROFILED, *INLINE])
    assert with_it.to_json().keys() == without.to_json().keys()
    assert with_it["reward_curve"] == without["reward_curve"]


def test_a_profile_of_an_earlier_driver_does_not_stay() -> None:
    profile_of("a", INLINE)
    resume("a", ["log.profile=false", "train.updates=3"])
    assert load_run("a").profile is None


def test_lives_of_a_host_that_is_restarted_add_up() -> None:
    def kill_first_rank() -> None:
        hosts = [child for child in psutil.Process().children() if "tiderl.cluster.host" in child.cmdline()]
        min(hosts, key=lambda host: host.create_time()).kill()

    profile = profile_of("a", observer=AtUpdate(4, kill_first_rank))
    assert profile["updates"] == 12
    assert sum(host["processes"] for host in profile["hosts"].values()) == 5
    for host in profile["hosts"].values():
        assert_adds_up(host)
    twice = next(host for host in profile["hosts"].values() if host["processes"] == 2)
    assert twice["spans"]["start"]["count"] == 1


def test_a_run_that_is_stopped_has_its_profile() -> None:
    profile = profile_of("a", observer=AtUpdate(3, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert 3 <= profile["updates"] < 12
    assert_adds_up(profile["hosts"]["driver"])


def test_a_run_that_fails_has_its_profile() -> None:
    def fail() -> None:
        raise RuntimeError("an observer that breaks")

    with pytest.raises(RuntimeError, match="breaks"):
        train("k.yaml", ["run=a", PROFILED], observer=AtUpdate(3, fail))
    profile = load_run("a").profile
    assert profile is not None and profile["updates"] == 2
    for host in profile["hosts"].values():
        assert_adds_up(host)


def test_the_command_shows_it_and_json_stays_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "k.yaml", *(part for key in (PROFILED, *INLINE) for part in ("-o", key))]
    assert execute([*arguments, "-o", "run=a"]) == 0
    shown = capsys.readouterr()
    assert "where the time went" in shown.out and "backward" in shown.out
    assert execute([*arguments, "-o", "run=b", "--json"]) == 0
    shown = capsys.readouterr()
    assert "where the time went" in shown.err
    assert json.loads(shown.out)["updates"] == 2
