"""A row gives the values and gradients of each sequence alone, in every family; what would break that is noticed."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from support.trainer_cases import WORDS, alike_group, random_group
from transformers import AutoConfig, AutoModelForCausalLM

from tiderl.trainers.packing import pack
from tiderl.trainers.padding import padded_chunks
from tiderl.trainers.row_model import FlashPaths, PaddedBlocks, layout_for, takes_rows, use_rows
from tiderl.trainers.rows import shared_rows
from tiderl.trainers.scoring import score

SEQUENCES = [*alike_group(0, 1), *alike_group(1, 2, size=6), *random_group(2, 3)]
ROWS = partial(shared_rows, max_row_tokens=4096)
TWO_ROWS = partial(shared_rows, max_row_tokens=80)
PADDED = partial(padded_chunks, pad_id=0, max_chunk_tokens=60)
CPU = torch.device("cpu")


def model_of(family, **changes):
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def outcome(model, logprobs):
    """Log-probs, and the gradients of a sum in which each token weighs differently."""
    model.zero_grad()
    (logprobs * torch.linspace(-1.0, 2.0, len(logprobs))).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"logprobs": logprobs.detach(), **gradients}


def one_by_one(model):
    """The oracle: each sequence alone through the model as it is, without any packing."""
    logprobs = []
    for s in SEQUENCES:
        table = torch.log_softmax(model(torch.from_numpy(s.ids)[None].long()).logits[0], -1)
        logprobs += [table[p - 1, int(s.ids[p])] for p in np.flatnonzero(s.loss_mask)]
    return outcome(model, torch.stack(logprobs))


def packed_outcome(model, layout):
    return outcome(model, score(model, pack(SEQUENCES, layout), 1.0, torch.float32)[0])


def largest_difference(found, right):
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in right.items())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_i7_rows_and_padding_give_what_each_sequence_gives_alone(family):
    model = model_of(family)
    right = one_by_one(model)
    use_rows(model)
    assert takes_rows(model)
    assert largest_difference(one_by_one(model), right) < 1e-5  # without a row the model is as it was
    for layout in (ROWS, TWO_ROWS, PADDED):
        assert largest_difference(packed_outcome(model, layout), right) < 2e-5


def positions_that_go_on(row):
    return dataclasses.replace(row, positions=np.arange(len(row.ids)))


def paths_that_leak(row):
    """Every token sees all before it in the row: what a plain causal mask over packed sequences does."""
    everything = np.arange(len(row.ids))
    return dataclasses.replace(row, paths=(everything,), own_tokens=np.array([len(everything)]))


def a_shared_token_of_another(row):
    """Where a path branches off, it goes back to the token beside the one that it shares."""
    paths = []
    for path, own in zip(row.paths, row.own_tokens, strict=True):
        changed = path.copy()
        if own < len(path):
            changed[len(path) - own - 1] += 1
        paths.append(changed)
    return dataclasses.replace(row, paths=tuple(paths))


@pytest.mark.parametrize("broken", [positions_that_go_on, paths_that_leak, a_shared_token_of_another])
def test_i7_a_broken_row_is_noticed(broken):
    model = model_of("qwen3")
    use_rows(model)
    right = packed_outcome(model, ROWS)

    def broken_rows(members):
        return [broken(row) for row in ROWS(members)]

    assert largest_difference(packed_outcome(model, broken_rows), right) > 1e-2


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}),
    ],
    ids=["sliding window", "rotation by length"],
)
def test_a_model_that_rows_would_not_be_exact_for_is_padded(family, changes):
    model = model_of(family, **changes)
    right = one_by_one(model)
    use_rows(model)
    layout = layout_for(model, 0, 60)
    assert layout.func is padded_chunks
    assert largest_difference(packed_outcome(model, layout), right) < 2e-5
    plain = model_of("qwen3")
    use_rows(plain)
    assert layout_for(plain, 0, 60).func is shared_rows


def slow_varlen(query, key, value, ends_q, ends_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """What torch documents of variable-length attention, one query and head at a time; causal masks end together."""
    assert (window_size, enable_gqa) == ((-1, 0), True)
    assert longest_q == int(torch.diff(ends_q).max())
    assert longest_k == int(torch.diff(ends_k).max())
    per_kv_head = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for s in range(len(ends_q) - 1):
        first_q, end_q, first_k, end_k = (int(x) for x in (*ends_q[s : s + 2], *ends_k[s : s + 2]))
        for q in range(first_q, end_q):
            seen = slice(first_k, end_k - (end_q - 1 - q))
            for head in range(query.shape[1]):
                weights = torch.softmax(key[seen, head // per_kv_head] @ query[q, head] * scale, 0)
                out[q, head] = weights @ value[seen, head // per_kv_head]
    return out


def test_attention_without_padding_is_that_of_the_blocks():
    (row,) = pack(SEQUENCES, ROWS).calls
    draws = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(row.computed_tokens, heads, 8, generator=draws) for heads in (4, 2, 2))
    blocks = PaddedBlocks(row, CPU)(query, key, value, 0.3)
    paths = FlashPaths(row, CPU, slow_varlen)(query, key, value, 0.3)
    torch.testing.assert_close(paths, blocks, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_flash_attention_over_paths_gives_the_values_and_gradients_of_the_blocks():
    from tiderl.trainers.row_model import attend_paths

    device = torch.device("cuda")
    (row,) = pack(SEQUENCES, ROWS).calls
    flash = attend_paths(row, device, torch.bfloat16, 8)
    assert isinstance(flash, FlashPaths)
    outcomes = []
    for attend in (flash, PaddedBlocks(row, device)):
        draws = torch.Generator(device).manual_seed(0)
        tensors = [
            torch.randn(
                row.computed_tokens, heads, 8, generator=draws, device=device, dtype=torch.bfloat16, requires_grad=True
            )
            for heads in (4, 2, 2)
        ]
        out = attend(*tensors, 0.3)
        out.float().square().sum().backward()
        outcomes.append([out, *(tensor.grad for tensor in tensors)])
    for found, right in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, right, rtol=5e-2, atol=5e-2)
