"""What an `EngineCore` of the policy `ctb` promises beyond the others, as checks over a factory of such engines.

As `engine_core_suite.py`; for engines that keep whole contexts, or blocks of at most 16 positions.
"""

from __future__ import annotations

from support.engine_core_suite import Make, ready, run
from support.tiny_models import task, turn


def check_who_is_worth_more_is_found_again(make: Make) -> None:
    """Room for three of them: the first would be the least recently used, but is worth more."""
    engine = ready(make, 96)
    (first,) = run(engine, turn(0, range(3, 27), 4, priority=1.0))
    for n in range(1, 4):
        run(engine, turn(n, range(3 + n, 27 + n), 4))
    (second,) = run(engine, turn(0, [*range(3, 27), *first.ids.tolist(), 2], 4, at=1, priority=1.0))
    assert second.cached_tokens >= 0.5 * 28
    assert engine.stats().evicted_tokens > 0


def check_a_pool_of_held_tasks_is_never_stuck(make: Make) -> None:
    engine = ready(make, 96)
    for n in range(3):
        run(engine, turn(n, range(3 + n, 27 + n), 4, priority=5.0))
    assert engine.stats().held_tokens > 0
    results = run(engine, *(turn(n, range(3 + n, 45 + n), 4) for n in range(3, 7)))  # two at a time fill the pool
    assert [len(result.ids) for result in results] == [4] * 4


def check_what_is_released_makes_room_at_once(make: Make) -> None:
    engine = ready(make, 96)
    for n in range(3):
        run(engine, turn(n, range(3 + n, 27 + n), 4))
    engine.release(task(0))
    run(engine, turn(3, range(6, 30), 4))
    assert engine.stats().evicted_tokens == 0


BY_TASK_CHECKS = tuple(check for name, check in sorted(globals().items()) if name.startswith("check_"))
