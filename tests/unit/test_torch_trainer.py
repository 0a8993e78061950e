import math
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from support.trainer_cases import (
    TINY_MODEL,
    accumulate,
    gradients,
    micro_batch,
    random_group,
    sequence,
    settings,
    tiny_trainer,
    weights,
)

from tiderl.data.errors import (
    CheckpointError,
    ConfigurationError,
    InvariantViolation,
    NumericalFault,
)
from tiderl.data.rng import stream
from tiderl.trainers import scoring
from tiderl.trainers.advantages import advantages
from tiderl.trainers.optimizer import clipped_mean_gradient
from tiderl.trainers.packing import pack
from tiderl.trainers.rows import shared_rows
from tiderl.trainers.torch_trainer import build

ROWS = partial(shared_rows, max_row_tokens=4096)


@pytest.fixture
def trainer(tmp_path):
    return partial(tiny_trainer, tmp_path)


def slow_logprobs(model, ids, temperature):
    """One sequence alone, without padding: log-prob of every token but the first, and its entropy. [T - 1]"""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
    table = torch.log_softmax(logits, -1)
    chosen = table[torch.arange(len(ids) - 1), torch.tensor(list(ids[1:]), dtype=torch.int64)]
    return chosen, -(table.exp() * table).sum(-1)


def moved(trainer, scale=0.02):
    """Move the model away from its reference, by a fixed pattern."""
    with torch.no_grad():
        for number, parameter in enumerate(trainer.model.parameters()):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float32) + number)
            parameter.add_(scale * wave.reshape(parameter.shape))
    return trainer


# ---------------------------------------------------------------- the gradient and the metrics, by a slow oracle


@pytest.mark.parametrize("loss", ["grpo", "decoupled_ppo"])
def test_gradient_and_metrics_are_those_of_the_formula_one_sequence_at_a_time(trainer, loss):
    subject = moved(trainer(loss=loss, temperature=0.7, kl_coef=0.1))
    sequences = [*random_group(0, 1), *random_group(1, 2)]
    total, rows = torch.zeros(()), []
    reference_model = subject.reference
    for s in sequences:
        mask = torch.from_numpy(s.loss_mask[1:])
        current, entropy = (values[mask] for values in slow_logprobs(subject.model, s.ids, 0.7))
        reference = slow_logprobs(reference_model, s.ids, 0.7)[0][mask].detach()
        behaviour = torch.from_numpy(s.logprobs[s.loss_mask])
        advantage = float(advantages("group", s.group_rewards)[s.member])
        weight = (
            torch.ones_like(current)
            if loss == "grpo"
            else (current.detach() - behaviour).exp().clamp(max=subject.settings.importance_weight_cap)
        )
        ratio = (current - (behaviour if loss == "grpo" else current.detach())).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        difference = reference - current
        kl = difference.exp() - difference - 1
        policy_loss = -weight * gain
        total = total + (policy_loss + 0.1 * kl).sum()
        columns = (policy_loss, kl, entropy, ratio, weight, (current - behaviour).abs())
        rows.append(torch.stack([column.detach() for column in columns]))
    table = torch.cat(rows, dim=1).double()  # [6, K]
    count = table.shape[1]
    subject.model.zero_grad()
    total.backward()
    by_hand = {name: gradient / count for name, gradient in gradients(subject).items()}

    accumulate(subject, [micro_batch(sequences)])
    for name, gradient in gradients(subject).items():
        np.testing.assert_allclose(gradient / count, by_hand[name], rtol=1e-4, atol=2e-6, err_msg=name)
    metrics = subject.finish().metrics
    names = ("policy_loss", "kl_ref", "entropy", "ratio_mean", "importance_weight_mean", "logprob_gap_mean")
    for name, value in zip(names, table.mean(dim=1).tolist(), strict=True):
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert metrics["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-4, abs=1e-6)
    assert metrics["logprob_gap_max"] == pytest.approx(float(table[5].max()), rel=1e-5)
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in by_hand.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_counts_and_fractions_by_hand(trainer):
    subject = trainer(kl_coef=0.0, lr=0.5)
    sequences = [
        sequence([4, 5, 6, 7, 4], [1, 2, 4], rewards=(2.0, 0.0), member=0, prompt_id=1),
        sequence([4, 5], [1], rewards=(2.0, 0.0), member=1, prompt_id=1),
        sequence([4, 5, 6], [1, 2], rewards=(1.0, 1.0), member=0, prompt_id=2),
    ]
    subject.begin(1, [0])
    subject.forward(micro_batch(sequences))
    subject.backward(micro_batch(sequences), None)
    metrics = subject.finish().metrics
    assert metrics["tokens"] == 5 + 2 + 3
    assert metrics["loss_tokens"] == 3 + 1 + 2
    assert metrics["computed_tokens"] == 4  # 4 5 6 7, which the others begin with; last tokens predict nothing
    assert metrics["padding_fraction"] == 0.0
    assert metrics["zero_advantage_groups_fraction"] == 0.5
    # rewards 2 and 0: mean 1, standard deviation 1, so advantages ±1 / 1.0001 on 4 of the 6 tokens
    assert metrics["advantage_abs_mean"] == pytest.approx(4 / 6 / 1.0001)
    assert metrics["lr"] == pytest.approx(0.5 / 5)  # the first of five rising steps
    assert metrics["kl_ref"] == 0.0


def test_clip_and_cap_fractions_by_hand(trainer):
    """Behaviour log-probs are chosen so that each token's ratio is known."""
    for loss, key in (("grpo", "clip_fraction"), ("decoupled_ppo", "importance_weight_capped_fraction")):
        subject = trainer(loss=loss, kl_coef=0.0)
        ids = [4, 5, 6, 7]
        now = slow_logprobs(subject.model, ids, 1.0)[0].detach().numpy()
        # ratios 3 (clipped and capped), 1 and 0.5 (neither, the advantage being positive)
        behaviour = now - np.log([3.0, 1.0, 0.5])
        batch = micro_batch([sequence(ids, [1, 2, 3], behaviour.tolist())])
        accumulate(subject, [batch])
        metrics = subject.finish().metrics
        assert metrics[key] == pytest.approx(1 / 3)
        if loss == "grpo":
            assert metrics["ratio_mean"] == pytest.approx((3 + 1 + 0.5) / 3, rel=1e-4)
        else:
            assert metrics["importance_weight_mean"] == pytest.approx((2 + 1 + 0.5) / 3, rel=1e-4)


def test_the_gap_counts_only_tokens_of_exactly_these_weights(trainer):
    subject = trainer(kl_coef=0.0)
    ids = [4, 5, 6]
    now = slow_logprobs(subject.model, ids, 1.0)[0].detach().numpy()
    fresh = sequence(ids, [1, 2], (now + np.array([0.25, -0.75])).tolist(), version=4)
    stale = sequence(ids, [1, 2], (now + 9.0).tolist(), version=3)
    accumulate(subject, [micro_batch([fresh, stale], update=5)])
    metrics = subject.finish().metrics
    assert metrics["logprob_gap_tokens"] == 2
    assert metrics["logprob_gap_mean"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logprob_gap_max"] == pytest.approx(0.75, abs=1e-5)
    accumulate(subject, [micro_batch([fresh], update=5, part=1)])  # the weights have moved since version 4
    assert subject.finish().metrics["logprob_gap_tokens"] == 0


# ---------------------------------------------------------------- I7 and masks


def resplit(sequences, seed, pieces):
    """The same sequences, in another order, cut into other micro-batches."""
    order = np.random.default_rng(seed).permutation(len(sequences))
    cuts = np.array_split(order, pieces)
    return [micro_batch([sequences[i] for i in cut], index) for index, cut in enumerate(cuts)]


def summed_gradient(subject, batches):
    accumulate(subject, batches)
    return gradients(subject)


def mean_of_means(subject, batches):
    """The mutant: each micro-batch divided by its own tokens."""
    subject.model.zero_grad()
    for mb in batches:
        logprobs, _ = scoring.score(subject.model, pack(mb.sequences, ROWS), 1.0, torch.float32)
        (-logprobs.mean() / len(batches)).backward()
    return gradients(subject)


def largest_change(subject, gradient_of, sequences):
    """How far the gradient moves, at most, when the same sequences come as other micro-batches; relative."""
    first = gradient_of(subject, resplit(sequences, 0, 1))
    scale = max(np.abs(gradient).max() for gradient in first.values())
    changes = []
    for seed, pieces in ((1, 2), (2, 3), (3, 8)):
        other = gradient_of(subject, resplit(sequences, seed, pieces))
        changes.append(max(np.abs(first[name] - other[name]).max() for name in first) / scale)
    return max(changes)


def test_i7_the_gradient_does_not_depend_on_how_micro_batches_arrive(trainer):
    sequences = [*random_group(0, 5), *random_group(1, 6)]
    subject = moved(trainer(kl_coef=0.1))
    assert largest_change(subject, summed_gradient, sequences) < 1e-5
    assert largest_change(subject, mean_of_means, sequences) > 1e-2  # a mean of means is caught


def test_i7_nor_do_the_new_weights_and_the_metrics(trainer):
    sequences = [*random_group(0, 5), *random_group(1, 6)]
    results = []
    for seed, pieces in ((0, 1), (4, 3)):
        subject = moved(trainer(kl_coef=0.1))
        accumulate(subject, resplit(sequences, seed, pieces))
        metrics = subject.finish().metrics
        metrics.pop("computed_tokens")  # the only one that may depend on it
        results.append((metrics, weights(subject)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4, abs=1e-6)
    for name, value in results[0][1].items():
        np.testing.assert_allclose(value, results[1][1][name], atol=2e-5, err_msg=name)


def test_what_stands_outside_the_loss_mask_changes_nothing(trainer):
    clean = sequence([4, 5, 6, 7], [1, 3])
    dirty = msgspec.structs.replace(clean, logprobs=clean.logprobs.copy(), versions=clean.versions.copy())
    dirty.logprobs[[0, 2]] = np.nan
    dirty.versions[[0, 2]] = 0
    outcomes = []
    for case, outside in ((clean, 0.0), (dirty, np.nan)):
        subject, mb = moved(trainer()), micro_batch([case])
        reference = subject.reference_logprobs(mb)
        reference[~case.loss_mask] = outside
        subject.begin(1, [0])
        subject.forward(mb)
        subject.backward(mb, reference)
        outcomes.append((subject.finish().metrics, weights(subject)))
    assert outcomes[0][0] == outcomes[1][0]
    for name, value in outcomes[0][1].items():
        np.testing.assert_array_equal(value, outcomes[1][1][name])


def test_reference_logprobs_are_flat_and_zero_outside_the_mask(trainer):
    subject = trainer(temperature=0.5)
    moved(subject)  # the reference stays where it was
    sequences = [sequence([4, 5, 6], [2]), sequence([7, 6, 5, 4], [1, 3])]
    flat = subject.reference_logprobs(micro_batch(sequences))
    assert flat.dtype == np.float32
    by_hand = np.zeros(7, np.float32)
    for start, s in ((0, sequences[0]), (3, sequences[1])):
        slow = slow_logprobs(subject.reference, s.ids, 0.5)[0].detach().numpy()
        for position in np.flatnonzero(s.loss_mask):
            by_hand[start + position] = slow[position - 1]
    np.testing.assert_allclose(flat, by_hand, atol=2e-6)


def test_logits_in_slices_give_the_same_values_and_gradients(trainer):
    subject = moved(trainer())
    outcomes = []
    for logits_per_slice in (scoring.LOGITS_PER_SLICE, 3 * TINY_MODEL.vocab_size):
        subject.model.zero_grad()
        packed = pack(random_group(0, 9), ROWS)
        logprobs, entropy = scoring.score(subject.model, packed, 0.7, torch.float32, logits_per_slice)
        logprobs.sum().backward()
        outcomes.append(({"logprobs": logprobs.detach().numpy(), "entropy": entropy.numpy()}, gradients(subject)))
    for whole, sliced in zip(*outcomes, strict=True):
        for name, value in whole.items():
            np.testing.assert_allclose(value, sliced[name], rtol=1e-5, atol=1e-5, err_msg=name)


# ---------------------------------------------------------------- several steps per batch


def test_with_two_parts_the_proximal_policy_is_the_one_before_the_update(trainer):
    subject = trainer(loss="decoupled_ppo", steps_per_batch=2, kl_coef=0.0, lr=0.05)
    ids = [4, 5, 6]
    now = slow_logprobs(subject.model, ids, 1.0)[0].detach().numpy()
    parts = [micro_batch([sequence(ids, [1, 2], now.tolist())], index=i, part=i) for i in (0, 1)]
    for mb in parts:
        subject.forward(mb, proximal=True)
    accumulate(subject, parts[:1])
    first = subject.finish().metrics
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    moved_to = slow_logprobs(subject.model, ids, 1.0)[0].detach().numpy()
    accumulate(subject, parts[1:])
    second = subject.finish().metrics
    assert second["ratio_mean"] == pytest.approx(float(np.exp(moved_to - now).mean()), rel=1e-4)
    assert second["importance_weight_mean"] == pytest.approx(1.0, abs=1e-5)


def test_a_part_without_its_proximal_forward_is_refused(trainer):
    subject = trainer(loss="decoupled_ppo", steps_per_batch=2, kl_coef=0.0)
    old = micro_batch([sequence([4, 5], [1])])
    subject.forward(old, proximal=True)
    with pytest.raises(InvariantViolation, match="no proximal forward"):
        accumulate(subject, [micro_batch([sequence([4, 5], [1])], update=2)])


# ---------------------------------------------------------------- order of calls and faults


def test_calls_out_of_order_are_refused(trainer):
    subject = trainer(kl_coef=0.0)
    mb = micro_batch([sequence([4, 5], [1])])
    with pytest.raises(InvariantViolation, match="outside its update"):
        subject.forward(mb)
    with pytest.raises(InvariantViolation, match="without begin"):
        subject.finish()
    subject.begin(2, [0])
    with pytest.raises(InvariantViolation, match="outside its update"):
        subject.forward(mb)
    subject.begin(1, [0])
    with pytest.raises(InvariantViolation, match="without a forward"):
        subject.backward(mb, None)
    with pytest.raises(InvariantViolation, match="0 loss-bearing tokens"):
        subject.finish()
    subject.forward(mb)
    with pytest.raises(InvariantViolation, match="1 micro-batches without backward"):
        subject.finish()
    with pytest.raises(InvariantViolation, match="no reference"):
        subject.reference_logprobs(mb)


def test_a_checkpoint_written_within_a_step_holds_the_state_before_it(trainer, tmp_path):
    group = random_group(0, 7)
    subject = trainer()
    weights = [p.detach().clone() for p in subject.model.parameters()]
    subject.begin(1, [0])
    mb = micro_batch(group)
    subject.forward(mb)
    subject.backward(mb, subject.reference_logprobs(mb) if subject.reference is not None else None)
    subject.save(str(tmp_path / "within"))
    subject.finish()
    subject.restore(str(tmp_path / "within"))
    assert all(torch.equal(a, b) for a, b in zip(weights, subject.model.parameters(), strict=True))


def test_a_step_that_begins_again_forgets_what_it_had(trainer):
    first, second = (micro_batch([s]) for s in random_group(0, 7)[:2])
    subject = trainer()
    alone = summed_gradient(subject, [second])
    accumulate(subject, [first])
    again = summed_gradient(subject, [second])
    for name, gradient in alone.items():
        np.testing.assert_array_equal(gradient, again[name])


def test_missing_or_short_reference_logprobs_are_refused(trainer):
    subject = trainer()
    mb = micro_batch([sequence([4, 5], [1])])
    for bad in (None, np.zeros(1, np.float32)):
        subject.begin(1, [0])
        subject.forward(mb)
        with pytest.raises(InvariantViolation, match="2 reference log-probs"):
            subject.backward(mb, bad)


def test_a_loss_that_is_not_finite_changes_no_weight_and_the_trainer_goes_on(trainer):
    subject = trainer()
    before = weights(subject)
    good, bad = micro_batch([sequence([4, 5], [1])], 0), micro_batch([sequence([4, 5], [1], math.nan)], 1)
    accumulate(subject, [good, bad])
    with pytest.raises(NumericalFault, match=r"micro-batch 1 \(part 0\) is not finite"):
        subject.finish()
    for name, value in weights(subject).items():
        np.testing.assert_array_equal(value, before[name])
    accumulate(subject, [good])
    assert all(math.isfinite(value) for value in subject.finish().metrics.values())


def test_the_gradient_is_divided_once_and_then_clipped(trainer):
    subject = trainer()
    accumulate(subject, [micro_batch([sequence([4, 5], [1])])])
    sums = gradients(subject)
    norm = clipped_mean_gradient(subject.model, 4, max_norm=1e-3)
    assert norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in sums.values())) / 4, rel=1e-4)
    clipped = math.sqrt(sum(float((g**2).sum()) for g in gradients(subject).values()))
    assert clipped == pytest.approx(1e-3, rel=1e-2)


def test_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path):
    def refused(match, **changes):
        with pytest.raises(ConfigurationError, match=match):
            build(settings(tmp_path, **changes))

    refused("temperature 0", temperature=0.0)
    refused("cannot train in 'int8'", model=msgspec.structs.replace(TINY_MODEL, dtype="int8"))
    refused("different words", model=msgspec.structs.replace(TINY_MODEL, words=("go", "left")))
    refused("do not fit", model=msgspec.structs.replace(TINY_MODEL, heads=3))
    refused("no model can be loaded", model=msgspec.structs.replace(TINY_MODEL, path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    refused("'gpt2' is not yet supported", model=msgspec.structs.replace(TINY_MODEL, path=str(tmp_path)))
    with pytest.raises(ConfigurationError, match="not yet supported"):
        build(settings(tmp_path)).begin(1, [0, 1])


# ---------------------------------------------------------------- it learns


def bandit(subject, updates, groups=4, size=8):
    """One-token episodes: context `go <act>`, reward 1 for saying `left`. Returns the chance of `left` before each."""
    chances = []
    for update in range(1, updates + 1):
        with torch.no_grad():
            chance = torch.softmax(subject.model(torch.tensor([[4, 2]])).logits[0, -1].double(), -1).numpy()
        chances.append(float(chance[5]))
        draws = stream(0, "bandit", update)
        batch = []
        for prompt_id in range(groups):
            said = draws.choice(len(chance), size=size, p=chance)
            rewards = (said == 5).astype(float).tolist()
            batch += [
                sequence(
                    [4, 2, int(token)],
                    [2],
                    math.log(chance[token]),
                    rewards=rewards,
                    member=member,
                    prompt_id=prompt_id,
                    version=update - 1,
                )
                for member, token in enumerate(said)
            ]
        accumulate(subject, [micro_batch(batch, update=update)])
        metrics = subject.finish().metrics
        assert metrics["logprob_gap_max"] < 1e-5
    return chances


@pytest.mark.parametrize("loss", ["grpo", "decoupled_ppo"])
def test_a_rewarded_token_becomes_likely_and_the_same_seed_learns_the_same(trainer, loss):
    chances = bandit(trainer(loss=loss, lr=0.01), updates=25)
    assert chances[0] < 0.2
    assert chances[-1] > 0.8
    assert bandit(trainer(loss=loss, lr=0.01), updates=25) == chances


def test_warm_up_learns_the_demonstrations_and_fixes_the_reference(trainer):
    demos = [sequence([4 + i % 2, 2, 6 + i % 2, 1], [2, 3]) for i in range(20)]
    subject = trainer()
    report = subject.warm_up(demos, updates=40, lr=0.02)
    assert report["warmup_loss_first"] == pytest.approx(math.log(8), abs=0.3)  # an untrained guess over eight words
    assert report["warmup_loss_last"] < 0.1
    mb = micro_batch(demos[:2])
    by_hand = [slow_logprobs(subject.model, s.ids, 1.0)[0].detach().numpy()[1:] for s in mb.sequences]
    flat = subject.reference_logprobs(mb)
    np.testing.assert_allclose(flat[[2, 3, 6, 7]], np.concatenate(by_hand), atol=1e-6)
    other = trainer()
    assert other.warm_up(demos, updates=40, lr=0.02) == report
    assert subject.warm_up((), 0, 0.02) == {}


def test_warm_up_without_anything_to_learn_from_is_refused(trainer):
    with pytest.raises(ConfigurationError, match="no demonstration"):
        trainer().warm_up([sequence([4, 5], [])], updates=3, lr=0.01)


# ---------------------------------------------------------------- save and restore


def one_update(subject, update):
    accumulate(subject, [micro_batch(random_group(0, update), update=update)])
    return subject.finish().metrics


@pytest.mark.parametrize("updates_before", [0, 3])
def test_a_restored_trainer_continues_bit_for_bit(trainer, tmp_path, updates_before):
    first = moved(trainer())
    for update in range(1, updates_before + 1):
        one_update(first, update)
    first.save(str(tmp_path / "checkpoint"))
    second = build(settings(tmp_path, seed=99))
    second.restore(str(tmp_path / "checkpoint"))
    for update in range(updates_before + 1, updates_before + 4):
        assert one_update(first, update) == one_update(second, update)
    for name, value in weights(first).items():
        np.testing.assert_array_equal(value, weights(second)[name])


def test_restore_goes_back_from_any_later_state(trainer, tmp_path):
    subject = trainer()
    one_update(subject, 1)
    subject.save(str(tmp_path / "checkpoint"))
    expected = one_update(subject, 2)
    subject.begin(3, [0])
    subject.restore(str(tmp_path / "checkpoint"))
    assert one_update(subject, 2) == expected


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_beside_it(trainer, tmp_path):
    subject = trainer()
    target = tmp_path / "checkpoints" / "7"
    subject.save(str(target))
    one_update(subject, 1)
    subject.save(str(target))
    assert [path.name for path in target.parent.iterdir()] == ["7"]
    assert not [path for path in target.iterdir() if path.suffix not in (".safetensors", ".json")]
    expected = one_update(subject, 2)
    other = trainer()
    other.restore(str(target))
    assert one_update(other, 2) == expected


def test_a_checkpoint_that_does_not_fit_changes_nothing(trainer, tmp_path):
    saved = trainer(kl_coef=0.0)
    one_update(saved, 1)
    saved.save(str(tmp_path / "saved"))
    subject = trainer()
    before = weights(subject)

    def refused(match, directory):
        with pytest.raises(CheckpointError, match=match):
            subject.restore(str(directory))
        for name, value in weights(subject).items():
            np.testing.assert_array_equal(value, before[name])

    refused("no reference", tmp_path / "saved")
    refused("not a trainer checkpoint", tmp_path / "nowhere")
    larger = build(settings(tmp_path, model=msgspec.structs.replace(TINY_MODEL, hidden=32)))
    larger.warm_up((), 0, 0.0)
    larger.save(str(tmp_path / "larger"))
    refused("another model", tmp_path / "larger")
    (tmp_path / "larger" / "weights.safetensors").write_bytes(b"half")
    refused("cannot read", tmp_path / "larger")
