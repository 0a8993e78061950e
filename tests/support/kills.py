"""A run on real processes that is killed on purpose: start, wait for a moment, kill, prove the books, resume.

Works on `tiderl train` as a user starts it, in a subprocess and a folder of its own. Processes are found by their
command lines, progress by the journal's tables: nothing of the runtime is asked.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tiderl.store.audit import audit

ROOT = Path(__file__).parents[2]
LONGEST_S = 240.0
"""Until a run that goes on is called hung: start-up on a machine with ten busy neighbours takes a minute."""
GONE_WITHIN_S = 5.0
"""A killed driver's processes must end by themselves; the design says 2 s, a busy machine gets some more."""
SHARED_MEMORY = Path("/dev/shm")

TINY = """\
seed: 0
model: {path: scratch, tokenizer: words, layers: 1, hidden: 32, heads: 2, kv_heads: 1}
warmup: {demos: 40, updates: 60, lr: 5.0e-3}
env: {name: builtin, options: {size: 2}, isolation: pool, workers: 1, deadline_s: 10}
rollout: {max_turns: 6, max_context_tokens: 160, max_new_tokens_per_turn: 4, temperature: 1.0}
algorithm: {advantage: group, group_size: 4, kl_coef: 0.01}
train: {updates: 12, global_batch_groups: 4, micro_batch_tokens: 2048, lr: 3.0e-4}
schedule: {strategy: areal, max_staleness: 1}
cluster: {kind: process, ranks: 2}
eval: {every_updates: 6, prompts: 8, temperature: 1.0}
"""
"""Some thousand weights on the smallest built-in grid: an update takes 0.1 s, and a quarter of the rewards is 1."""

Who = str  # driver | rollout | trainer | worker | all
WHO: tuple[Who, ...] = ("driver", "rollout", "trainer", "worker", "all")


def tiderl(*arguments: str, cwd: Path, timeout_s: float = LONGEST_S, **environment: str) -> subprocess.CompletedProcess:
    """The command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tiderl.cli.main", *arguments],
        cwd=cwd,
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def child_environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


@dataclass
class KilledRun:
    """One run directory `runs/k` under `folder`, and the driver that works on it now."""

    folder: Path
    config: str = TINY
    overrides: Sequence[str] = ()
    driver: subprocess.Popen | None = None
    pids: set[int] = field(default_factory=set)
    """Every process that ever belonged to the run."""
    story: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "k"

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text()

    def start(self, *, resume: bool = False, more: Sequence[str] = ()) -> None:
        """A new driver; its output is appended to `stdout.txt` and `stderr.txt`."""
        if not resume:
            (self.folder / "k.yaml").write_text(self.config)
        what = ["--resume", str(self.run)] if resume else ["k.yaml", *(f"-o{o}" for o in ("run=k", *self.overrides))]
        with (self.folder / "stdout.txt").open("a") as out, (self.folder / "stderr.txt").open("a") as err:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "tiderl.cli.main", "train", *what, *more, "--json"],
                cwd=self.folder,
                env=child_environment(),
                stdout=out,
                stderr=err,
            )
        self.pids.add(self.driver.pid)

    # ---- what can be seen from outside

    def processes(self) -> dict[Who, psutil.Process]:
        """The living processes of the current driver: rank hosts by what they do, one environment worker."""
        found: dict[Who, psutil.Process] = {}
        assert self.driver is not None
        with suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.driver.pid)
            for process in driver.children(recursive=True):
                self.pids.add(process.pid)
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    line = " ".join(process.cmdline())
                    if "tiderl.envs.worker" in line:
                        found["worker"] = process
                    elif "tiderl.cluster.host" in line:
                        found["trainer" if self._log_of(process) == "rank-1.log" else "rollout"] = process
            found["driver"] = driver
        return found

    def _log_of(self, process: psutil.Process) -> str:
        return next((Path(file.path).name for file in process.open_files() if file.path.endswith(".log")), "")

    def count(self, query: str) -> int:
        """A figure of the journal; 0 while there is none."""
        journal = self.run / "journal.sqlite"
        if not journal.is_file():
            return 0
        try:
            db = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True, timeout=10)
        except sqlite3.Error:
            return 0
        try:
            return int(db.execute(query).fetchone()[0] or 0)
        except sqlite3.Error:
            return 0  # its tables are being made
        finally:
            db.close()

    @property
    def updates(self) -> int:
        return self.count("SELECT max(update_no) FROM updates")

    @property
    def finished(self) -> int:
        """Trajectories that reached an end, and updates: grows steadily while the run does."""
        return self.count("SELECT count(*) FROM trajectories WHERE status != 'running'") + self.updates

    def running(self) -> bool:
        return self.driver is not None and self.driver.poll() is None

    def wait(self, until: Callable[[], bool] = lambda: False, *, longest_s: float = LONGEST_S) -> int | None:
        """Until the condition holds (None) or the driver ended (its exit code). Raises where neither comes."""
        assert self.driver is not None
        limit = time.monotonic() + longest_s
        while time.monotonic() < limit:
            if (code := self.driver.poll()) is not None:
                return code
            if until():
                return None
            time.sleep(0.01)
        raise AssertionError(f"nothing happened for {longest_s:g} s: {self.tell()}")

    # ---- what is done to it

    def kill(self, who: Who) -> bool:
        """SIGKILL. False when there is no such process now."""
        found = self.processes()
        victims = list(found.values()) if who == "all" else [found[who]] if who in found else []
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.story.append(f"{who} at {self.finished} finished, {self.updates} updates" + ("" if victims else " (none)"))
        return bool(victims)

    def end(self) -> None:
        """Whatever goes on, it ends: for a test that failed."""
        if self.running():
            self.kill("all")
            assert self.driver is not None
            self.driver.wait(10)

    def expect_gone(self) -> None:
        """The driver is dead: so is, shortly, everything that it started."""
        assert self.driver is not None
        self.driver.wait(LONGEST_S)
        limit = time.monotonic() + GONE_WITHIN_S
        while (left := [pid for pid in self.pids if alive(pid)]) and time.monotonic() < limit:
            time.sleep(0.02)
        assert not left, f"processes outlived their driver: {left}: {self.tell()}"

    # ---- what must be true

    def expect_right_books(self) -> None:
        journal = self.run / "journal.sqlite"
        if journal.is_file() and self.count("SELECT count(*) FROM sqlite_master WHERE name = 'checkpoints'"):
            assert audit(journal, self.run / "blobs") == [], self.tell()

    def expect_done(self, *, updates: int, groups: int, group_size: int) -> Mapping[str, object]:
        """The run ended as one that nobody disturbed: the figures, the books, no leftovers anywhere."""
        self.expect_gone()
        self.expect_right_books()
        result = json.loads((self.folder / "stdout.txt").read_text().strip().splitlines()[-1])
        told = self.tell()
        assert (result["outcome"], result["updates"]) == ("done", updates), told
        assert result["trained"] == updates * groups * group_size, told
        assert result["in_flight"] == 0 and result["issued"] == result["trained"] + sum(result["dropped"].values()), (
            told
        )
        assert self.count("SELECT count(*) FROM updates") == updates
        numbers = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        assert [row["update"] for row in numbers if row["kind"] == "update"] == list(range(1, updates + 1)), told
        self.expect_no_leftovers()
        return result

    def expect_no_leftovers(self) -> None:
        known = [name for (name,) in self._rows("SELECT checkpoint FROM checkpoints ORDER BY update_no DESC LIMIT 2")]
        folders = {path.name for path in (self.run / "checkpoints").iterdir()}
        assert folders <= set(known) and known[0] in folders, self.tell()
        named = {sha for (sha,) in self._rows("SELECT sha256 FROM trajectories WHERE status = 'trained'")}
        files = {path.name for path in (self.run / "blobs").rglob("*") if path.is_file()}
        assert files <= {f"{sha}.safetensors" for sha in named}, self.tell()
        aside = [path.name for path in self.run.iterdir() if path.name.startswith(".") or path.suffix == ".part"]
        assert not aside, aside
        assert not list((self.run / "journal.sqlite").parent.glob("journal.sqlite-*")), "the journal was not closed"
        if SHARED_MEMORY.is_dir():
            mine = [p.name for p in SHARED_MEMORY.glob("*tiderl-weights-*") if int(p.name.split("-")[2]) in self.pids]
            assert not mine, f"weights were left in shared memory: {mine}"

    def _rows(self, query: str) -> list[tuple]:
        db = sqlite3.connect(self.run / "journal.sqlite")
        try:
            return db.execute(query).fetchall()
        finally:
            db.close()

    def tell(self) -> str:
        """For a failure's message: what was killed when, and the driver's last words."""
        return f"\nkills: {'; '.join(self.story)}\nstderr ends with:\n{self.stderr[-3000:]}"


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill_again_and_again(run: KilledRun, kills: int, rng: random.Random, who: Sequence[Who] = WHO) -> int:
    """Kills at random moments and resumes, until `kills` were made or the run is over; the number of kills made.

    A moment is so many finished trajectories and updates after the stage began and up to half a second, or, one time
    in five, any moment of the start. After each stage the books must be right and nothing may be left alive.
    """
    made = 0
    run.start()
    while made < kills:
        goal = run.finished + rng.randrange(0, 40)
        if rng.random() < 0.2:
            limit = time.monotonic() + rng.uniform(0.0, 10.0)
            code = run.wait(lambda at=limit: time.monotonic() > at)
        else:
            code = run.wait(lambda at=goal: run.finished > at)
            time.sleep(rng.uniform(0.0, 0.5))
        victim = rng.choice(who)
        if code is None:
            made += run.kill(victim)
        if victim in ("driver", "all") or code is not None:
            if code == 0:
                return made
            run.expect_gone()
            run.expect_right_books()
            run.start(resume=run.run.joinpath("config.yaml").is_file())
    return made


def finish(run: KilledRun, *, tries: int = 5) -> None:
    """Undisturbed to the end. A driver whose rank died at a moment from which only a resume helps is resumed."""
    for _ in range(tries):
        code = run.wait()
        if code == 0:
            return
        assert code == 1, f"exit code {code}: {run.tell()}"
        run.expect_gone()
        run.expect_right_books()
        run.start(resume=True)
    raise AssertionError(f"the run does not end: {run.tell()}")


def stop(run: KilledRun, number: signal.Signals) -> int:
    """The signal to the driver alone, as `kill PID` and a shell's Ctrl-C do; the exit code."""
    assert run.driver is not None
    run.driver.send_signal(number)
    code = run.wait()
    assert code is not None
    return code
