"""A vLLM scheduler that knows tasks (continuous task batching): a waiting task's blocks stay pinned between its turns.

After a turn with `retain` the task's whole blocks keep a reference until its next turn is scheduled, `release_task`, or
until a request cannot get blocks: then pins go, whole tasks at a time, before anything running gives way, so pins never
leave the pool stuck. Blocks of a task that will not come back are the first to be reused.

Uses private hooks of vLLM 0.32 (`_free_request_blocks`, `allocate_slots` of its KV cache manager), which is why the
version is pinned. Requests carry their task in `SamplingParams.extra_args`, see `tags`. Knows nothing of `Turn`.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import EngineSettings
from tiderl.engines.vllm_pins import Pin, Pins, may_help

TASK, GROUP, RETAIN = "tiderl_task", "tiderl_group", "tiderl_retain"

log = logging.getLogger(__name__)


def tags(task: str, group: str, retain: bool) -> dict[str, Any]:
    """What `SamplingParams.extra_args` says of a turn. `group`: tasks of one prompt, which share its first blocks."""
    return {TASK: task, GROUP: group, RETAIN: retain}


def tag(request: Any, name: str) -> Any:
    """None where it has none."""
    return ((request.sampling_params and request.sampling_params.extra_args) or {}).get(name)


class PinsTasks:
    """Mixed into a scheduler of vLLM. `dropped_pins` and `dropped_blocks` count what pressure took, since start."""

    kv_cache_manager: Any
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pins: Pins[Any] = Pins()
        self.dropped_pins = self.dropped_blocks = 0
        self._vllm_allocates = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate

    # ---- a turn ends

    def _free_request_blocks(self, request: Any) -> None:
        task = tag(request, TASK)
        if task is None or not request.is_finished():  # preempted: it comes back by itself, unpinned
            super()._free_request_blocks(request)  # type: ignore[misc]
            return
        blocks = [block for group in self._manager.get_blocks(request.request_id).blocks for block in group]
        whole = [block for block in blocks if block.block_hash is not None and not block.is_null]
        if not tag(request, RETAIN):
            self._give_back(self.pins.take(task))
            self._forget(whole, tag(request, GROUP))
            super()._free_request_blocks(request)  # type: ignore[misc]
        elif blocks:  # else it ended before it started: the task still waits with the pin of its last turn
            self._pool.touch(whole)
            super()._free_request_blocks(request)  # type: ignore[misc]
            self._give_back(self.pins.take(task))
            if whole:
                self.pins.put(task, Pin(tuple(whole), -request.priority))

    # ---- between turns

    def expect_task(self, task: str, priority: float) -> None:
        """Its next turn is queued: what is asked for again will be used before what only may be."""
        self.pins.touch(task, priority)

    def retain_task(self, task: str) -> None:
        """Its running turn will leave a pin; a pin that is there counts as just used."""
        self._tag_requests(task, True)
        self.pins.touch(task)

    def release_task(self, task: str, group: str) -> None:
        """Its pin goes, and its blocks are the next to be reused. A running turn leaves none."""
        self._tag_requests(task, False)
        pin = self.pins.take(task)
        if pin is not None:
            self._forget(list(pin.blocks), group)
            self._give_back(pin)

    def _tag_requests(self, task: str, retain: bool) -> None:
        for request in self.requests.values():
            if tag(request, TASK) == task:
                request.sampling_params.extra_args[RETAIN] = retain

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Nothing of the pool is used again, pins included."""
        for task in list(self.pins.victims()):
            self._give_back(self.pins.take(task))
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)  # type: ignore[misc]
        return done

    # ---- a request wants blocks

    def _allocate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the manager's `allocate_slots`: None only when dropping every pin would not help either."""
        found = self._vllm_allocates(request, *args, **kwargs)
        if found is None and len(self.pins):
            found = self._allocate_by_dropping(request, args, kwargs)
        task = tag(request, TASK)
        if found is not None and task in self.pins:
            self._give_back(self.pins.take(task))  # the next turn holds what it reuses by itself
        return found

    def _allocate_by_dropping(self, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Drops pins until vLLM finds room; where it never does, all are put back as they were."""
        task = tag(request, TASK) or ""
        if not self._worth_trying(request, task):
            return None
        dropped: list[tuple[str, Pin[Any]]] = []
        found = None
        for victim in list(self.pins.victims(last=task)):
            pin = self.pins.take(victim)
            assert pin is not None
            self._give_back(pin)
            dropped.append((victim, pin))
            found = self._vllm_allocates(request, *args, **kwargs)
            if found is not None:
                break
        if found is None:
            for victim, pin in dropped:  # nothing was allocated in between: their blocks still hold the same KV
                self._pool.touch(list(pin.blocks))
                self.pins.put(victim, pin)
            return None
        for victim, pin in dropped:
            if victim != task:
                self.dropped_pins += 1
                self.dropped_blocks += len(pin.blocks)
                log.info("dropped the pin of %s (%d blocks): %s needs room", victim, len(pin.blocks), task)
        return found

    def _worth_trying(self, request: Any, task: str) -> bool:
        block_tokens = self._manager.coordinator.single_type_managers[0].block_size
        held = len(self._manager.get_blocks(request.request_id).blocks[0])
        sizes = dict(self.pins.sizes())
        need = -(-request.num_tokens // block_tokens) - held - sizes.get(task, 0)
        return may_help(need, self._pool.get_num_free_blocks(), sum(sizes.values()))

    # ---- blocks

    @property
    def _manager(self) -> Any:
        return self.kv_cache_manager

    @property
    def _pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    def _give_back(self, pin: Pin[Any] | None) -> None:
        """The pin's references: what nobody else holds joins the free blocks, the end of the context first."""
        if pin is not None:
            self._pool.free_blocks(reversed(pin.blocks))

    def _forget(self, blocks: list[Any], group: str | None) -> None:
        """Take blocks that only the caller still holds out of the prefix cache, so that freeing puts them in front.
        Not while a member of the group has yet to start: it wants the prompt."""
        waiting = any(
            tag(request, GROUP) == group and not request.num_computed_tokens for request in self.requests.values()
        )
        if not waiting:
            self._pool.evict_blocks({block.block_id for block in blocks if block.ref_cnt == 1})


class TaskScheduler(PinsTasks, Scheduler):
    """For CPUs, and for GPUs at a cost: a scheduler that is no `AsyncScheduler` turns vLLM's asynchronous scheduling
    off, so each step's scheduling is time in which the GPU waits."""


class AsyncTaskScheduler(PinsTasks, AsyncScheduler):
    """For GPUs: keeps asynchronous scheduling. The cost: a turn's end is seen one step late, so its blocks are pinned
    or freed one step later, and one computed token of each turn that stops is thrown away. It has not run on a GPU."""


CLASSES: dict[str, type[Any] | None] = {"sync": TaskScheduler, "async": AsyncTaskScheduler, "none": None}


def scheduler_for(settings: EngineSettings) -> type[Any] | None:
    """The scheduler class for these settings; None for vLLM's own. Raises `ConfigurationError` for an unknown name."""
    name = settings.task_scheduler
    if name == "auto":
        name = "sync" if settings.model.device == "cpu" else "async"
    if name not in CLASSES:
        raise ConfigurationError(
            f"no scheduler {name!r}", where="rollout.task_scheduler", hint=f"use {'|'.join(CLASSES)}"
        )
    return CLASSES[name] if settings.kv_policy == "ctb" else None
