"""One SHA-256 for one configuration and seed, in two processes with different hash seeds, 5,000 tasks and faults (I10).

Small runs cannot reveal what depends on the order of a set: there are too few places for it to differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "examples" / "builtin.yaml"
OVERRIDES = [
    "cluster.ranks=64",
    "train.global_batch_groups=320",
    "algorithm.group_size=8",
    "train.updates=2",
    "eval.every_updates=0",
    "env.deadline_s=60",
    "env.wait={kind: lognormal, median_s: 0.2, sigma: 1.2, tail_fraction: 0.02, tail_s: [3, 8]}",
    "rollout.max_context_tokens=512",
    "sim.weight_sync=broadcast",
    "sim.workload={turns_median: 3, turns_sigma: 0.5, first_observation_tokens: 60, observation_tokens: 30, "
    "observation_sigma: 0.3, action_tokens: 4, action_sigma: 0.4, step_s: 0.05, step_sigma: 1.0, "
    "system_tokens: 20, timeout_fraction: 0.001, failure_fraction: 0.01}",
]
PROGRAM = """
import json, sys
import msgspec
from tiderl.api.result import Fanout
from tiderl.api.virtual import Persisted, build_ports
from tiderl.config.machine import prepare
from tiderl.data.events import Fault, TaskAdmitted, TaskFinished
from tiderl.data.settings import WarmupSettings
from tiderl.observe.metrics import RunMetrics
from tiderl.runtime.run import Run
from tiderl.sim.loop import run_virtual
from tiderl.store.recorder import HashRecorder

class InFlight:
    now = peak = 0
    def observe(self, event):
        self.now += isinstance(event, TaskAdmitted) - isinstance(event, TaskFinished | Fault)
        self.peak = max(self.peak, self.now)

resolved = prepare(sys.argv[1], sys.argv[2:], command="sim")
settings = msgspec.structs.replace(resolved.settings, warmup=WarmupSettings(0, 0, 0.0))
log, metrics, in_flight = HashRecorder(None), RunMetrics(), InFlight()
ports = build_ports(resolved, Persisted(), Fanout([log], metrics, [in_flight]))
run_virtual(Run(ports, settings, resolved.strategy).run)
print(json.dumps([log.sha256, in_flight.peak, metrics.summary()["faults"]]))
"""


def run(hash_seed: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CONFIG), *OVERRIDES],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_two_processes_write_the_same_log_with_5000_tasks_in_flight() -> None:
    (first, peak, faults), (second, _, _) = run("1"), run("2")
    assert first == second
    assert peak >= 5_000
    assert set(faults) == {"EnvironmentRaised", "EnvironmentTimeout"}, "both kinds of faults came"
