"""The embedded engine with KV kept, evicted and prefilled in chunks; and what bad input gets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.engine_core_suite import drain, run
from support.tiny_models import (
    VOCAB_SIZE,
    check_against_oracle,
    engine_settings,
    folder,
    model_settings,
    oracle_logprobs,
    replace,
    state,
    task,
    turn,
    weights,
    write_weights,
)

from tiderl.data.errors import CheckpointError, ConfigurationError, InvariantViolation
from tiderl.data.records import WeightHandle
from tiderl.data.turns import TurnFailure, TurnResult
from tiderl.engines.active_rows import staying_in_place
from tiderl.engines.torch_engine import TorchEngine, build


def ready(**changes: object) -> TorchEngine:
    engine = build(engine_settings(**changes))
    engine.load_weights(weights())
    return engine


def test_an_evicted_task_is_recomputed_and_equal() -> None:
    engine = ready(kv_budget_tokens=30)
    first = turn(0, range(2, 14), 4)
    (before,) = run(engine, first)
    (other,) = run(engine, turn(1, range(20, 34), 4))  # 16 + 18 > 30: evicts task 0
    assert engine.stats().holders == (str(task(1)),)
    again = turn(0, [*first.ids, *before.ids, 40], 4, at=1)
    (after,) = run(engine, again)
    assert after.cached_tokens == 0
    check_against_oracle("qwen3", again, after)
    assert len(other.ids) == 4


def test_a_retained_task_prefills_only_what_is_new() -> None:
    engine = ready()
    (first,) = run(engine, turn(0, range(2, 22), 4))
    prefilled = engine.stats().prefilled_tokens
    assert prefilled == 20
    (second,) = run(engine, turn(0, [*range(2, 22), *first.ids, 40, 41], 4, at=1))
    # All of the old context but the last token, which was sampled and never fed back.
    assert second.cached_tokens == 23
    assert engine.stats().prefilled_tokens - prefilled == 3


def test_a_long_context_is_prefilled_in_chunks_while_others_decode() -> None:
    engine = ready(prefill_tokens_per_step=8)
    engine.add(turn(0, [5, 6], 12))
    engine.step()
    engine.add(turn(1, range(2, 32), 1))  # 30 tokens: 4 chunks
    generated = []
    while engine.stats().running + engine.stats().waiting == 2:
        before = engine.stats()
        engine.step()
        generated.append(engine.stats().generated_tokens - before.generated_tokens)
        assert engine.stats().prefilled_tokens - before.prefilled_tokens <= 8
    assert generated == [1, 1, 1, 2]


def test_an_abort_in_the_middle_of_a_prefill_keeps_what_was_computed() -> None:
    engine = ready(prefill_tokens_per_step=8)
    one = turn(0, range(2, 32), 4)
    engine.add(one)
    engine.step()
    aborted = engine.abort(task(0), 0)
    assert aborted is not None and len(aborted.ids) == 0
    assert engine.stats().resident_tokens == 8
    again = turn(0, one.ids, 4, at=1)
    (result,) = run(engine, again)
    assert result.cached_tokens == 8
    check_against_oracle("qwen3", again, result)


def test_one_long_and_many_short_turns_are_all_right() -> None:
    engine = ready(kv_budget_tokens=600, max_batch=40, prefill_tokens_per_step=64)
    turns = [turn(0, range(2, 42), 8), *(turn(n, [n + 1, 9], 8) for n in range(1, 30))]
    for one, result in zip(turns, run(engine, *turns), strict=True):
        check_against_oracle("qwen3", one, result)


def test_bfloat16_stays_near_the_float32_oracle() -> None:
    engine = build(engine_settings(model=replace(model_settings(), dtype="bfloat16")))
    engine.load_weights(weights())
    turns = [turn(n, range(2, 12 + n), 6) for n in range(4)]
    gaps = []
    for one, result in zip(turns, run(engine, *turns), strict=True):
        table = oracle_logprobs("qwen3", 0, [*one.ids, *result.ids], 1.0)[len(one.ids) - 1 : -1]
        gaps.append(np.abs(table[np.arange(6), result.ids] - result.logprobs).mean())
    assert np.mean(gaps) < 2e-2


def test_seconds_are_of_the_clock_and_in_order() -> None:
    ticks = iter(range(1000))
    engine = TorchEngine(engine_settings(), clock=lambda: float(next(ticks)))
    engine.load_weights(weights())
    (result,) = run(engine, turn(0, [4, 5], 3))
    assert result.queued_s > 0 and result.prefill_s > 0 and result.decode_s > 0


# ---- bad input


@pytest.mark.parametrize("ids", [[], [VOCAB_SIZE], [-1]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvariantViolation, match="turn 0 of train/0"):
        ready().add(turn(0, ids))


def test_nan_logits_fail_only_their_own_turn_and_name_it() -> None:
    poisoned = state("llama", 0)  # its head is not tied, so only a turn that reads token 60 meets the NaN
    poisoned["model.embed_tokens.weight"][60] = float("nan")
    engine = build(engine_settings("llama", max_batch=2))
    engine.load_weights(write_weights(poisoned, "poisoned", 0))
    bad, good = turn(0, [5, 60, 7], 4), turn(1, [5, 6, 7, 8], 4, stop_ids=(60,))
    engine.add(bad)
    engine.add(good)
    outcomes = {outcome.task: outcome for outcome in drain(engine)}
    failure, fine = outcomes[task(0)], outcomes[task(1)]
    assert isinstance(failure, TurnFailure) and isinstance(fine, TurnResult)
    assert failure.error == "numerical" and "turn 0 of train/0.0#0" in failure.what
    check_against_oracle("llama", good, fine)
    # The rows' next owners read nothing of what the failed turn left there.
    again = [turn(n, [5, 6], 4, at=1, stop_ids=(60,)) for n in (0, 2)]
    for one, result in zip(again, run(engine, *again), strict=True):
        check_against_oracle("llama", one, result)


def test_nan_in_a_chunk_fails_at_once_and_leaves_nothing_behind() -> None:
    poisoned = state("llama", 0)
    poisoned["model.embed_tokens.weight"][60] = float("nan")
    engine = build(engine_settings("llama", prefill_tokens_per_step=8))
    engine.load_weights(write_weights(poisoned, "poisoned-chunk", 0))
    engine.add(turn(0, [5, 60, *range(2, 32)], 4))
    (failure,) = engine.step()
    assert isinstance(failure, TurnFailure)
    assert engine.stats().resident_tokens == engine.stats().running == 0
    one = turn(1, [5], 2, stop_ids=(60,))
    (result,) = run(engine, one)
    check_against_oracle("llama", one, result)


def _renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.0", "layers.7"): tensor for name, tensor in tensors.items()}


def _reshaped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"model.norm.weight": torch.ones(33)}


@pytest.mark.parametrize("broken", [_renamed, _reshaped], ids=["other names", "other shape"])
def test_weights_of_another_model_change_nothing(broken: Callable[..., dict[str, torch.Tensor]]) -> None:
    engine = ready()
    handle = write_weights(broken(state("qwen3", 1)), broken.__name__, 1)
    with pytest.raises(CheckpointError, match=r"another model|has shape"):
        engine.load_weights(handle)
    one = turn(0, [4, 5, 6])
    (result,) = run(engine, one)
    assert result.versions.tolist() == [0] * 4
    check_against_oracle("qwen3", one, result)


def test_missing_or_damaged_weights_are_a_typed_error() -> None:
    engine = ready()
    damaged = folder() / "damaged.safetensors"
    damaged.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00nonsense")
    for path in (folder() / "nowhere.safetensors", damaged):
        with pytest.raises(CheckpointError, match="cannot be read"):
            engine.load_weights(WeightHandle(1, str(path), 0))
    assert engine.stats().version == 0


@pytest.mark.parametrize("kept", ["lm_head.weight", "both"])
def test_a_tied_head_may_be_in_the_file(kept: str) -> None:
    tensors = state("qwen3", 0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if kept != "both":
        del tensors["model.embed_tokens.weight"]
    engine = build(engine_settings())
    engine.load_weights(write_weights(tensors, f"tied-{kept}", 0))
    one = turn(0, [4, 5, 6])
    (result,) = run(engine, one)
    check_against_oracle("qwen3", one, result)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "/nowhere"}, "no model configuration"),
        ({"dtype": "int4"}, "dtype"),
        ({"device": "nonsense"}, "not usable"),
        ({"heads": 3}, "do not fit together"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(engine_settings(model=replace(model_settings(), **changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "cannot run a 'gpt2'"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding-window"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'dynamic'",
        ),
        ({"max_position_embeddings": 16}, "16 positions"),
        ({"vocab_size": 10}, "64 ids"),
    ],
    ids=["family", "window", "rope", "positions", "vocabulary"],
)
def test_an_architecture_that_the_cache_cannot_serve_is_refused(changes: dict[str, object], message: str) -> None:
    from transformers import AutoConfig

    changes = dict(changes)
    family = str(changes.pop("model_type", "qwen2"))
    path = folder() / f"refused-{abs(hash(message))}"
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoConfig.for_model(family, **(sizes | changes)).save_pretrained(path)
    with pytest.raises(ConfigurationError, match=message):
        build(engine_settings(model=replace(model_settings(), path=str(path))))


def test_an_unknown_kv_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'mru'"):
        build(engine_settings(kv_policy="mru"))


def test_close_is_idempotent_and_leaves_no_work() -> None:
    engine = ready()
    engine.add(turn(0, [4, 5]))
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_work() and engine.step() == []
    assert engine.stats().resident_tokens == 0


def test_rows_that_stay_move_as_little_as_possible() -> None:
    assert staying_in_place([0, 2, 4, 5]) == [0, 5, 2, 4]
    assert staying_in_place([0, 1]) == [0, 1]
    assert staying_in_place([3]) == [3]
    assert staying_in_place([]) == []
