"""Requests to an inference engine and their results: one turn of one task.

A `Turn` carries the whole context every time: an engine may keep the task's KV, but correctness never depends on it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from tiderl.data.records import TaskKey

FinishReason = Literal["stop", "length", "aborted"]
PauseMode = Literal["keep", "abort"]


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn. `seed` makes the turn's draws independent of what else is in the batch."""

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0


class Turn(msgspec.Struct, frozen=True):
    """One policy generation asked of an engine. (`task`, `turn`) names it; one turn of a task runs at a time."""

    task: TaskKey
    turn: int
    ids: np.ndarray  # int32 [n], the whole context; extends that of the task's previous turn exactly (I8), or forks
    sampling: Sampling
    remaining_tokens: int  # what the task may still add to its context, observations included
    priority: float = 0.0  # larger first
    retain: bool = True  # the task will probably come back: keep its KV if there is room; False: keep nothing
    rewrites: tuple[int, ...] = ()  # of each fork so far: with how many tokens the context went on to begin as before


class TurnResult(msgspec.Struct, frozen=True):
    """What the engine sampled for one turn. Seconds are on the engine's clock."""

    task: TaskKey
    turn: int
    ids: np.ndarray  # int32 [n], a stop token included
    logprobs: np.ndarray  # float32 [n], natural log, of the distribution that was sampled from
    versions: np.ndarray  # int32 [n], weight version of each token
    finish_reason: FinishReason
    cached_tokens: int = 0  # of the context, not prefilled again
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    recompute_s: float = 0.0  # of decode_s, on context whose KV new weights or a preemption had made void
    ended_s: float = -1.0  # the moment of the last token; -1: the engine has no clock of its own


class TurnFailure(msgspec.Struct, frozen=True):
    """A turn that ended without a result; only this turn, the engine goes on. `error` is a `reason` of
    `data.errors`."""

    task: TaskKey
    turn: int
    error: str  # e.g. "numerical"
    what: str


class EngineStats(msgspec.Struct, frozen=True):
    """An engine's state at one moment. Tokens are KV positions."""

    version: int  # loaded and committed, -1 before the first load
    running: int
    waiting: int
    resident_tokens: int
    budget_tokens: int
    paused: bool = False
    generated_tokens: int = 0  # since start
    prefilled_tokens: int = 0
    prefilled_s: float = 0.0  # since start: what computing these took; 0: not known
    cached_tokens: int = 0
    preemptions: int = 0  # turns that gave way to another's growth, and recomputed
    offloaded_tokens: int = 0  # in host memory now, outside `resident_tokens`
    held_tokens: int = 0  # of `resident_tokens`, what no running turn uses: kept for waiting tasks
    evicted_tokens: int = 0  # since start: kept for waiting tasks by `retain`, and gone because others needed room
    holders: tuple[str, ...] = ()  # tasks that hold KV, largest first, at most 8: for the blocked report


class EngineCapabilities(msgspec.Struct, frozen=True):
    """What an engine can do beyond generating; what it lacks is never assumed."""

    retain: bool
    offload: bool
    token_versions: bool = True
    logprobs: bool = True
    kv_budget_tokens: int = 0  # positions that its pool holds; 0: it does not say, and tasks are not held to it
    kv_block_tokens: int = 1  # it takes them in blocks of so many
    max_batch: int = 0  # turns that it runs at a time; 0: it does not say
    shares_prompts: bool = False  # what members of a group begin with is in memory once
    reload_token_s: float | None = None  # to bring one offloaded position back
    host_kv_tokens: int = 0  # offloaded positions that it can hold
