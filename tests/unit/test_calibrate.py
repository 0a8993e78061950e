"""Calibration: constants come back from a record that was made by hand, totals are kept, bad records are refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tiderl.cost.calibrate import calibrate, driver_s, explained_by_queue, queue_ahead, to_engine_s
from tiderl.cost.fits import conserving_fit
from tiderl.cost.intervals import intervals_of
from tiderl.cost.recorded import RESET, EnvCall, Recording, TurnFact, read_recording
from tiderl.data.errors import ConfigurationError
from tiderl.data.events import (
    BackwardDone,
    EnvStepFinished,
    Event,
    ForwardDone,
    MicrobatchFormed,
    ReferenceDone,
    RunStarted,
    StepStarted,
    TaskAdmitted,
    TaskFinished,
    TurnFinished,
    UpdateCommitted,
    VersionLoaded,
)
from tiderl.data.records import TaskKey

ITERATION_S, SEQUENCE_S, CONTEXT_S, PREFILL_S = 2e-3, 1e-4, 3e-7, 5e-5
TRUTH = {
    "iteration_s": ITERATION_S,
    "sequence_s": SEQUENCE_S,
    "context_token_s": CONTEXT_S,
    "prefill_token_s": PREFILL_S,
    "reference_token_s": 4e-5,
    "forward_token_s": 5e-5,
    "backward_token_s": 9e-5,
    "pass_s": 3e-3,
}


class SlowEngine:
    """One replica, iteration by iteration: whoever has context to compute does it whole, everyone else decodes one
    token. Emits what a run would."""

    def __init__(self, clock_ahead_s: float = 0.0) -> None:
        self.now_s = 1.0
        self.ahead_s = clock_ahead_s
        self.running: list[list[int]] = []  # member, context, sampled, wanted
        self.begun: dict[int, tuple[float, float]] = {}  # member -> admitted, first token
        self.events: list[Event] = []

    def admit(self, member: int, context: int, wanted: int) -> None:
        self.running.append([member, context, 0, wanted])
        self.begun[member] = (self.now_s, -1.0)
        self.events.append(
            TaskAdmitted(
                t_s=self.now_s, split="train", trajectory_id=member, prompt_id=0, member=member, attempt=0, replica=0
            )
        )

    def iterate(self) -> None:
        decoding = [one for one in self.running if one[2]]
        starting = [one for one in self.running if not one[2]]
        self.now_s += (
            ITERATION_S
            + SEQUENCE_S * len(self.running)
            + CONTEXT_S * sum(context + sampled for _, context, sampled, _ in decoding)
            + PREFILL_S * sum(context for _, context, _, _ in starting)
        )
        for one in starting:
            self.begun[one[0]] = (self.begun[one[0]][0], self.now_s)
        for one in self.running:
            one[2] += 1
        for member, context, sampled, wanted in self.running:
            if sampled == wanted:
                self.finish(member, context, sampled)
        self.running = [one for one in self.running if one[2] < one[3]]

    def finish(self, member: int, context: int, sampled: int) -> None:
        admitted_s, first_token_s = self.begun[member]
        self.events.append(
            TurnFinished(
                t_s=self.now_s,
                split="train",
                prompt_id=0,
                member=member,
                attempt=0,
                turn=0,
                replica=0,
                context_tokens=context,
                new_tokens=sampled,
                cached_tokens=0,
                version=0,
                finish_reason="stop",
                queued_s=0.0,
                prefill_s=first_token_s - admitted_s,
                decode_s=self.now_s - first_token_s,
                ended_s=self.now_s + self.ahead_s,
            )
        )


def rolled_out(count: int = 120, clock_ahead_s: float = 0.0) -> SlowEngine:
    """Turns of many lengths that come and go one by one."""
    engine, random, waiting = SlowEngine(clock_ahead_s), np.random.default_rng(1), iter(range(count))
    for member in waiting:
        engine.admit(member, context=int(random.integers(5, 400)), wanted=int(random.integers(1, 30)))
        for _ in range(int(random.integers(1, 6))):
            engine.iterate()
    while engine.running:
        engine.iterate()
    return engine


def trained(engine: SlowEngine, updates: int = 3) -> list[Event]:
    """Updates of two micro-batches of different sizes, in the seconds of `TRUTH`."""
    now_s, events = engine.now_s, list(engine.events)
    start = RunStarted(
        t_s=0.0,
        strategy="sync",
        seed=0,
        ranks=1,
        replicas=1,
        updates=updates,
        global_batch_groups=1,
        group_size=2,
        max_staleness=0,
        staleness_counts="oldest_token",
        engine_ranks=((0,),),
        actor_ranks=(0,),
    )
    for update in range(1, updates + 1):
        now_s += 0.002
        events.append(
            StepStarted(t_s=now_s, update=update, prompt_ids=(0,), waited_s=0.0, ready_groups=1, oldest_ready_s=0.0)
        )
        for index, tokens in enumerate((1_000 * update, 300)):
            events.append(MicrobatchFormed(t_s=now_s, update=update, index=index, sequences=1, tokens=tokens))
            for done, constant in (
                (ReferenceDone, "reference_token_s"),
                (ForwardDone, "forward_token_s"),
                (BackwardDone, "backward_token_s"),
            ):
                seconds = TRUTH["pass_s"] + TRUTH[constant] * tokens
                now_s += seconds
                events.append(done(t_s=now_s, update=update, index=index, seconds=seconds))
        now_s += 0.005
        events.append(
            UpdateCommitted(
                t_s=now_s,
                update=update,
                groups=1,
                trajectories=1,
                loss_tokens=1,
                tokens=1_300,
                reward_mean=0.0,
                success_fraction=0.0,
                staleness_max=0,
                staleness_mean_tokens=0.0,
                window_staleness_max=0,
                seconds=0.1,
                metrics={},
            )
        )
        now_s += 0.004
        events.append(VersionLoaded(t_s=now_s, version=update, replica=0, seconds=0.004))
    return [start, *events]


@pytest.mark.parametrize("clock_ahead_s", [0.0, 12_345.0])
def test_constants_come_back_from_a_record(clock_ahead_s: float) -> None:
    recording = read_recording(trained(rolled_out(clock_ahead_s=clock_ahead_s)), where="a run")
    fitted = calibrate(recording, where="a run")
    for name, truth in TRUTH.items():
        assert fitted.constants[name] == pytest.approx(truth, rel=1e-3), name
    assert fitted.constants["optimizer_s"] == pytest.approx(0.005, rel=1e-6)  # nothing was between start and first pass
    assert fitted.constants["load_s"] == pytest.approx(0.004)
    assert fitted.constants["turn_s"] == pytest.approx(0.0, abs=1e-9)
    assert fitted.residuals["engine iterations"].rms < 1e-3
    assert fitted.residuals["trainer passes"].rms < 1e-9


def test_iterations_within_an_interval_are_counted_and_not_assumed_to_be_one() -> None:
    """Two turns of 9 and 30 tokens that start together: nothing is known to happen between the 9th and the last."""
    engine = SlowEngine()
    engine.admit(0, context=10, wanted=9)
    engine.admit(1, context=10, wanted=30)
    while engine.running:
        engine.iterate()
    found = intervals_of(read_recording(engine.events, where="a run").turns, [])
    assert found is not None
    assert found.iterations.tolist() == [1, 8, 21]
    assert found.decoding.tolist() == [0, 2, 1]
    # By hand: in the second iteration both attend to 10 + 1 positions, in the 9th to 10 + 8: 2 * (11 + … + 18).
    assert found.features()[1].tolist() == [8, 16, 2 * sum(range(11, 19)), 0]


def test_a_fit_keeps_the_total_of_what_scatters() -> None:
    random = np.random.default_rng(0)
    work = random.uniform(1, 100, 5_000)
    seconds = 1e-3 * work * random.lognormal(0, 1, 5_000)
    features = np.column_stack([np.ones(5_000), work])
    assert (features @ conserving_fit(features, seconds)).sum() == pytest.approx(seconds.sum(), rel=1e-6)
    # Plain relative least squares, the mutant, finds far less than there was.
    relative = np.linalg.lstsq(features / seconds[:, None], np.ones(5_000), rcond=None)[0]
    assert (features @ relative).sum() < 0.6 * seconds.sum()


def test_what_cannot_be_told_apart_goes_to_the_first_constant() -> None:
    features = np.column_stack([np.full(30, 2.0), np.full(30, 8.0)])
    assert conserving_fit(features, np.full(30, 1.0)).tolist() == pytest.approx([0.5, 0.0])


def test_an_interval_with_a_load_is_left_out() -> None:
    engine = SlowEngine()
    engine.admit(0, context=10, wanted=2)
    engine.iterate()
    loaded_s = engine.now_s
    engine.now_s += 5.0
    engine.iterate()
    turns = read_recording(engine.events, where="a run").turns
    disturbed = intervals_of(turns, [(loaded_s, loaded_s + 5.0)])
    calm = intervals_of(turns, [])
    assert disturbed is not None and not disturbed.undisturbed.any()
    assert calm is not None and calm.undisturbed.all()


def calls(*spans: tuple[float, float]) -> list[EnvCall]:
    return [EnvCall(TaskKey("train", 0, at), 0, begun, ended) for at, (begun, ended) in enumerate(spans)]


def test_the_queue_is_who_is_there_when_a_call_comes() -> None:
    assert queue_ahead(calls((0, 1), (0, 2), (0.5, 3), (2.5, 3.5))).tolist() == [1, 2, 3, 2]


def environment_events(served: Iterator[tuple[int, float, float]]) -> list[Event]:
    return [
        EnvStepFinished(
            t_s=ended, split="train", prompt_id=0, member=member, attempt=0, turn=0, seconds=ended - begun, reward=0.0
        )
        for member, begun, ended in served
    ]


def one_at_a_time(bursts: int, size: int, service_s: float) -> Iterator[tuple[int, float, float]]:
    for burst in range(bursts):
        for place in range(size):
            yield burst * size + place, burst * 1.0, burst * 1.0 + (place + 1) * service_s


def all_at_once(bursts: int, size: int) -> Iterator[tuple[int, float, float]]:
    random = np.random.default_rng(3)
    for burst in range(bursts):
        for place in range(size):
            yield burst * size + place, burst * 1.0, burst * 1.0 + float(random.lognormal(-4, 1))


def test_a_worker_that_serves_one_call_at_a_time_is_recognised_and_one_that_does_not_is_not() -> None:
    events = trained(rolled_out())
    queued = calibrate(
        read_recording([*events, *environment_events(one_at_a_time(20, 16, 0.003))], where="a run"), where="a run"
    )
    assert queued.env_step_s == pytest.approx(0.003, rel=0.02)
    assert explained_by_queue(calls(*((begun, ended) for _, begun, ended in all_at_once(20, 16)))) < 0.02
    free = calibrate(read_recording([*events, *environment_events(all_at_once(20, 16))], where="a run"), where="a run")
    assert (free.env_step_s, free.env_reset_s) == (0.0, 0.0)


def told(ends: Iterator[tuple[int, float, float]]) -> list[TurnFact]:
    """(step, ended, known to the driver) of turns of one engine, whose clock is 100 s behind."""
    return [
        TurnFact(TaskKey("train", 0, at), step, 0, 20, 3, 0, *[ended - 100.01] * 3, ended - 100, known, False)
        for at, (step, ended, known) in enumerate(ends)
    ]


def bursts(service_s: float, message_s: float) -> Iterator[tuple[int, float, float]]:
    """Each second a step ends 1 to 8 turns; the driver takes them up one by one, after the message."""
    for step in range(1, 401):
        for place in range(step % 8 + 1):
            yield step, float(step), step + message_s + (place + 1) * service_s


def test_what_the_driver_takes_for_each_turn_is_told_from_its_message() -> None:
    turns = told(iter([(0, 0.5, 0.5), *bursts(0.0007, 0.002)]))  # the first one sets the clocks: it took no time
    assert driver_s(turns) == pytest.approx((0.0007, 0.002), rel=0.1)
    assert driver_s(told(bursts(0.0, 0.0))) == (0.0, 0.0)


def test_the_way_to_an_idle_engine_is_known_from_those_who_found_it_idle() -> None:
    facts, steps = [], []
    for member in range(30):
        key, start_s = TaskKey("train", 0, member), float(member)
        steps.append(EnvCall(key, 0, start_s - 0.1, start_s))
        added_s, ended_s = start_s + 0.004 - 100, start_s + 0.014 - 100  # 4 ms to the engine, 10 ms in it
        facts.append(TurnFact(key, 1, 0, 20, 3, 0, added_s, added_s, ended_s, ended_s, ended_s + 100, False))
    assert to_engine_s(Recording(turns=facts, env_calls=steps)) == pytest.approx(0.004)


def test_a_run_of_too_few_turns_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="10 turns and 3 updates are too few"):
        calibrate(read_recording(trained(rolled_out(10)), where="runs/r1"), where="runs/r1")


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"queued_s": -0.5}, "lasted -0.5 s"),
        ({"decode_s": float("nan")}, "lasted nan s"),
        ({"turn": 2}, "turn 2 of train/0.0#0 comes where 0 belongs"),
        ({"ended_s": -1.0}, "did not record when turns ended"),
    ],
)
def test_impossible_facts_are_refused_with_the_run(change: dict[str, float], refusal: str) -> None:
    events = rolled_out(1).events
    from msgspec.structs import replace

    events[-1] = replace(events[-1], **change)
    with pytest.raises(ConfigurationError, match=refusal) as caught:
        read_recording(events, where="runs/r1")
    assert caught.value.where == "runs/r1"


def test_a_reset_is_what_lies_between_admission_and_the_first_turn() -> None:
    admitted = TaskAdmitted(t_s=2.0, split="train", trajectory_id=0, prompt_id=0, member=0, attempt=0, replica=0)
    engine = SlowEngine()
    engine.now_s = 2.25
    engine.admit(0, context=10, wanted=2)
    engine.iterate()
    engine.iterate()
    (call,) = read_recording([admitted, engine.events[-1]], where="a run").env_calls
    assert call.turn == RESET and call.seconds == pytest.approx(0.25)


def test_an_ended_trajectory_is_known_by_its_attempt() -> None:
    ended = TaskFinished(
        t_s=3.0,
        split="train",
        trajectory_id=4,
        prompt_id=0,
        member=1,
        attempt=2,
        ending="terminated",
        reward=1.0,
        success=True,
        turns=3,
        tokens=30,
        loss_tokens=9,
        oldest_version=0,
    )
    assert read_recording([ended], where="a run").finished == {TaskKey("train", 0, 1, 2): ended}
