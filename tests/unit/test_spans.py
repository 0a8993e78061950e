"""Spans: self time on the main thread, whatever the nesting; the event loop's tasks and idle time seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.api.profile import FIRST_TASK, IdleSelector, profiled_tasks
from tiderl.data import spans
from tiderl.data.spans import IDLE, ProcessSpans, SpanTotal, ThreadClock, since, span, together


class Hand:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def move(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def profiled() -> Iterator[None]:
    spans.start("root")
    yield
    spans.stop()


def test_a_span_has_the_time_that_no_span_inside_it_took() -> None:
    wall, cpu = Hand(), Hand()
    clock = ThreadClock("root", wall, cpu)
    wall.move(1)
    with clock.span("outer"):
        wall.move(2)
        cpu.move(0.5)
        with clock.span("inner"):
            wall.move(4)
        with clock.span("inner"):
            wall.move(8)
            cpu.move(0.25)
        wall.move(16)
    wall.move(32)
    assert clock.totals() == {
        "root": SpanTotal(1 + 32, 0.0, 0),
        "outer": SpanTotal(2 + 16, 0.5, 1),
        "inner": SpanTotal(4 + 8, 0.25, 2),
    }


def test_an_error_ends_its_span() -> None:
    wall = Hand()
    clock = ThreadClock("root", wall, wall)
    with contextlib.suppress(ValueError), clock.span("fails"):
        wall.move(1)
        raise ValueError
    wall.move(2)
    assert clock.totals()["root"].wall_s == 2
    assert clock.totals()["fails"].wall_s == 1


def test_an_open_span_is_counted_so_far() -> None:
    wall = Hand()
    clock = ThreadClock("root", wall, wall)
    with clock.span("open"):
        wall.move(3)
        assert clock.totals()["open"].wall_s == 3


class InclusiveClock(ThreadClock):
    """The mutant: time goes to every open span, so spans overlap."""

    def settle(self) -> None:
        passed = self._wall() - self._wall_s
        super().settle()
        for open_span in self.stack[:-1]:
            open_span.wall_s += passed


Moves = list[tuple[str, int]]  # ("a", 1): enter a, one second; ("", 1): leave, one second
MOVES = st.lists(st.tuples(st.sampled_from(["", "", "a", "b", "c"]), st.integers(0, 3)), max_size=30)


def walked(moves: Moves, kind: type[ThreadClock]) -> tuple[dict[str, float], Counter[str]]:
    """By the clock, and by an oracle that looks at the stack second by second."""
    wall = Hand()
    clock = kind("root", wall, wall)
    opened: list[contextlib.AbstractContextManager[None]] = []
    names, oracle = ["root"], Counter[str]()
    for name, seconds in moves:
        if name:
            opened.append(clock.span(name))
            opened[-1].__enter__()
            names.append(name)
        elif opened:
            opened.pop().__exit__(None, None, None)
            names.pop()
        for _ in range(seconds):
            wall.move(1)
            oracle[names[-1]] += 1
    return {name: total.wall_s for name, total in clock.totals().items() if total.wall_s}, oracle


@given(MOVES)
def test_each_second_belongs_to_the_innermost_open_span(moves: Moves) -> None:
    found, oracle = walked(moves, ThreadClock)
    assert found == dict(oracle)
    assert sum(found.values()) == sum(seconds for _, seconds in moves)


def test_a_clock_that_counts_a_second_twice_would_be_noticed() -> None:
    found, oracle = walked([("a", 1), ("b", 1), ("", 1)], InclusiveClock)
    assert found != dict(oracle)


def test_off_nothing_is_counted() -> None:
    with span("nothing"), span("nested"):
        pass
    assert spans.taken() is None
    assert span("one") is span("another")


@pytest.mark.usefixtures("profiled")
def test_stopped_it_is_off_again() -> None:
    spans.stop()
    assert spans.taken() is None


@pytest.mark.usefixtures("profiled")
def test_the_main_thread_adds_up_to_its_wall_time() -> None:
    for _ in range(20):
        with span("outer"):
            time.sleep(0.001)
            with span("inner"):
                time.sleep(0.001)
    found = spans.taken()
    assert found is not None
    assert sum(total.wall_s for total in found.spans.values()) == pytest.approx(found.wall_s, rel=0.02)
    assert found.spans["inner"].count == 20
    assert found.spans["inner"].wall_s >= 0.02
    assert found.spans["inner"].cpu_s < 0.02  # it slept


@pytest.mark.usefixtures("profiled")
def test_another_thread_s_outermost_spans_are_beside() -> None:
    def work() -> None:
        with span("work"):
            time.sleep(0.01)
            with span("part"):
                time.sleep(0.01)
        with span("rest"):
            pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = spans.taken()
    assert found is not None
    assert {name: total.count for name, total in found.beside.items()} == {"work": 3, "rest": 3}
    assert found.beside["work"].wall_s >= 3 * 0.02
    assert set(found.spans) == {"root"}


def process(wall_s: float, **walls: float) -> ProcessSpans:
    return ProcessSpans(7, wall_s, wall_s / 2, {name: SpanTotal(s, s / 2, 1) for name, s in walls.items()}, {})


def test_between_two_moments_is_the_difference() -> None:
    found = since(process(10.0, root=4.0, a=5.0, b=1.0), process(3.0, root=1.0, a=2.0))
    assert found == ProcessSpans(
        7,
        7.0,
        3.5,
        {"root": SpanTotal(3.0, 1.5, 0), "a": SpanTotal(3.0, 1.5, 0), "b": SpanTotal(1.0, 0.5, 1)},
        {},
    )
    assert since(process(3.0, root=3.0), None) == process(3.0, root=3.0)


def test_lives_of_a_host_add_up() -> None:
    found = together([process(2.0, root=2.0), process(3.0, root=1.0, a=2.0)])
    assert (found.wall_s, found.cpu_s) == (5.0, 2.5)
    assert found.spans == {"root": SpanTotal(3.0, 1.5, 2), "a": SpanTotal(2.0, 1.0, 1)}


def on_profiled_loop(code: object) -> tuple[object, ProcessSpans]:
    loop = asyncio.SelectorEventLoop(IdleSelector())
    loop.set_task_factory(profiled_tasks())
    spans.start("event loop")
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            result = runner.run(code)  # type: ignore[arg-type]
        found = spans.taken()
        assert found is not None
        return result, found
    finally:
        spans.stop()


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_task_s_stretches_count_as_its_kind_and_waiting_as_idle() -> None:
    async def pull() -> int:
        spin(0.02)
        await asyncio.sleep(0.05)
        spin(0.02)
        return 3

    async def main() -> int:
        spin(0.01)
        async with asyncio.TaskGroup() as tasks:
            pulled = tasks.create_task(pull(), name="pull 0")
            tasks.create_task(asyncio.sleep(0), name="something else")
        return pulled.result()

    result, found = on_profiled_loop(main())
    assert result == 3
    assert found.spans["pull weights"].count == 2
    assert 0.039 < found.spans["pull weights"].cpu_s < 0.06
    assert found.spans[FIRST_TASK].cpu_s >= 0.01
    assert found.spans["other tasks"].count >= 1
    assert found.spans[IDLE].wall_s > 0.03
    assert sum(total.wall_s for total in found.spans.values()) == pytest.approx(found.wall_s, rel=0.02)


def test_profiled_tasks_fail_and_are_cancelled_as_others_are() -> None:
    seen: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("this")

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waits())
            tasks.create_task(fails())

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            await both()
        assert [str(error) for error in raised.value.exceptions] == ["this"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(30)

    on_profiled_loop(main())
    assert seen == ["cancelled"]
