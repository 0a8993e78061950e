"""A model goes in as a folder and comes out as one: the folders of a real run under transformers' own eyes.

Inline, so that the runs are the same each time; one run from scratch serves most tests of this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chat_models import CHATML, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tiderl import api
from tiderl.cli.main import execute
from tiderl.data.errors import CheckpointError, ConfigurationError
from tiderl.data.events import EvalFinished
from tiderl.data.records import Trajectory
from tiderl.store.blobs import FileBlobs
from tiderl.store.rundir import RunDirectory, find
from tiderl.store.sqlite import read_journal

pytestmark = pytest.mark.live

CONFIG = """\
model: {path: scratch, layers: 2, hidden: 32, heads: 4, kv_heads: 2}
warmup: {demos: 40, updates: 30, lr: 5.0e-3}
env: {name: builtin, options: {size: 2, objects: 1, max_turns: 6}}
rollout: {max_turns: 6, max_context_tokens: 200}
algorithm: {group_size: 4}
train: {updates: 1, global_batch_groups: 4, micro_batch_tokens: 512, lr: 1.0e-2}
cluster: {kind: inline, ranks: 1}
checkpoint: {every_updates: 1, keep: 2}
eval: {every_updates: 1, prompts: 12}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDirectory]:
    """One update from scratch, with the checkpoints before and after it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.yaml").write_text(CONFIG, encoding="utf-8")
    api.train(folder / "small.yaml", [f"run={folder / 'first'}"])
    return find(folder / "first")


async def _payloads(run: RunDirectory) -> list[Trajectory]:
    replay = read_journal(run.journal)
    assert replay is not None
    blobs = FileBlobs(run.blobs, threaded=False)
    return [await blobs.get(row.sha256) for row in replay.trajectories if row.status == "trained" and row.sha256]


def trained(run: RunDirectory) -> list[Trajectory]:
    import asyncio

    return asyncio.run(_payloads(run))


def logprobs(folder: Path, trajectory: Trajectory) -> np.ndarray:
    """Of the sampled tokens, under the model in a folder, as anyone would compute them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(trajectory.ids.astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return table.gather(-1, ids[0, 1:, None])[:, 0].numpy()[trajectory.loss_mask[1:]]


def test_an_exported_checkpoint_gives_the_logprobs_that_the_engine_sampled_with(
    run: RunDirectory, tmp_path: Path
) -> None:
    assert api.export(run.root, tmp_path / "start", update=0) == 0
    played = trained(run)
    assert len(played) == 16 and all(t.oldest_version == 0 for t in played)
    for trajectory in played:
        np.testing.assert_allclose(
            logprobs(tmp_path / "start", trajectory), trajectory.logprobs[trajectory.loss_mask], atol=1e-5
        )


def test_the_runs_own_model_is_its_newest_checkpoint_and_not_the_start(run: RunDirectory, tmp_path: Path) -> None:
    assert api.export(run.root, tmp_path / "newest") == 1
    assert (tmp_path / "newest" / "model.safetensors").read_bytes() == (run.model / "model.safetensors").read_bytes()
    trajectory = trained(run)[0]
    gap = np.abs(logprobs(run.model, trajectory) - trajectory.logprobs[trajectory.loss_mask])
    assert gap.max() > 1e-3  # it was trained


def test_the_best_model_is_the_version_that_did_best_and_says_so(run: RunDirectory) -> None:
    verdict = json.loads((run.best_model / "evaluation.json").read_text(encoding="utf-8"))
    evals = [event for event in api.load_run(run.root).events() if isinstance(event, EvalFinished)]
    best = max(evals, key=lambda event: event.successes)  # the earlier one of equals
    assert (verdict["version"], verdict["successes"], verdict["prompts"]) == (best.version, best.successes, 12)
    assert not run.candidates.exists()
    assert AutoTokenizer.from_pretrained(run.best_model)("go") is not None


def test_an_evaluation_of_the_run_repeats_the_one_at_its_end(run: RunDirectory) -> None:
    last = [event for event in api.load_run(run.root).events() if isinstance(event, EvalFinished)][-1]
    found = api.evaluate(run.root, show=2)
    assert (found["prompts"], found["successes"], found["failed"]) == (12, last.successes, last.failed)
    assert found["turns_mean"] == pytest.approx(last.turns_mean)
    assert found["success_low"] <= found["success"] <= found["success_high"]
    assert sum(found["failures"].values()) == 12 - last.successes
    assert len(found["transcripts"]) == 2 and "policy" in found["transcripts"][0]
    assert found["no_effect"] == []


def test_samples_and_overrides_of_an_evaluation_count(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    given = ["eval.prompts=5", "eval.temperature=0", "train.lr=1", "seed=3"]
    found = api.evaluate(tmp_path / "small.yaml", given, model=run.best_model, samples=3)
    assert (found["run_dir"], found["episodes"], set(found["best_of"])) == (None, 15, {"1", "2", "3"})
    assert found["best_of"]["3"] == found["best_of"]["1"]  # greedy: every sample is the same
    assert found["no_effect"] == ["train.lr has no effect: an evaluation does not train"]


def test_the_exported_model_starts_another_run(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    overrides = [f"model.path={run.model}", "warmup.demos=0", f"run={tmp_path / 'second'}"]
    result = api.train(tmp_path / "small.yaml", overrides)
    first = [event for event in api.load_run(run.root).events() if isinstance(event, EvalFinished)][-1]
    assert result["evals"][0]["successes"] == first.successes  # the same model, prompts and seed


def test_the_commands_say_what_the_functions_found(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["eval", str(run.root), "--show", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("trajectory -1 · eval prompt") and "success         0." in text and "(95 %: " in text
    assert execute(["eval", str(run.root), "--json", "--samples", "2", "-o", "eval.prompts=3"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 6
    assert execute(["export", str(run.root), "--to", str(tmp_path / "out"), "--update", "1"]) == 0
    assert capsys.readouterr().out.strip().endswith(f"the model after update 1 is in {tmp_path / 'out'}")


def test_a_run_ends_with_a_picture_and_with_the_trackers_that_were_asked_for(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert "held-out success" in run.curves.read_text(encoding="utf-8")
    assert not run.tensorboard.exists()
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    api.train(tmp_path / "small.yaml", ["log.trackers=[tensorboard]", "warmup.updates=1", f"run={tmp_path / 'run'}"])
    assert list(find(tmp_path / "run").tensorboard.glob("events.out.tfevents.*"))


def test_what_cannot_be_exported_or_evaluated_is_refused_in_two_lines(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    words = "env.options={size: 9, objects: 1}"  # says numbers that the model never saw
    refused = [
        (lambda: api.export(run.root, tmp_path), "exists already"),
        (lambda: api.export(run.root, tmp_path / "x", update=7), "kept are: 0, 1"),
        (lambda: api.evaluate(tmp_path / "small.yaml"), "learnt nothing yet"),
        (lambda: api.evaluate(run.root, [words]), "does not know 7 of the environment's words: 3, 4"),
        (lambda: api.evaluate(run.root, model=tmp_path), "no config.json"),
        (lambda: api.evaluate(tmp_path / "none"), "no such run"),
    ]
    for act, expected in refused:
        with pytest.raises(ConfigurationError, match=expected) as caught:
            act()
        assert len(str(caught.value).splitlines()) <= 2
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        api.export(run.root, tmp_path / "file" / "below")


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_model_with_a_chat_template_is_trained_and_comes_out_with_it(family: str, tmp_path: Path) -> None:
    given = write_model(tmp_path / "given", family)
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    overrides = [f"model.path={given}", "model.tokenizer=chat", "rollout.max_context_tokens=600"]
    overrides += ["train.micro_batch_tokens=1200", "warmup.demos=4", "warmup.updates=2", f"run={tmp_path / 'run'}"]
    result = api.train(tmp_path / "small.yaml", overrides)
    run = find(tmp_path / "run")
    assert (result["updates"], result["logprob_gap_alarms"], result["faults"]) == (1, 0, {})
    assert (run.model / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.model)  # families' own classes split words their own way
    assert tokenizer.chat_template == CHATML
    trajectory = trained(run)[0]
    first = [{"role": "user", "content": trajectory.text[0]}]
    begun = tokenizer.apply_chat_template(first, add_generation_prompt=True, return_dict=False)
    assert trajectory.ids[: len(begun)].tolist() == begun
    assert api.export(run.root, tmp_path / "start", update=0) == 0
    np.testing.assert_allclose(
        logprobs(tmp_path / "start", trajectory), trajectory.logprobs[trajectory.loss_mask], atol=1e-5
    )


def test_a_folder_that_lacks_a_weight_is_refused_not_filled_up_at_random(tmp_path: Path) -> None:
    given = write_model(tmp_path / "given")
    weights = load_file(given / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, given / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    overrides = [f"model.path={given}", "model.tokenizer=chat", f"run={tmp_path / 'run'}"]
    with pytest.raises(ConfigurationError, match=r"lack 1 of the model's, e\.g\. model\.norm\.weight"):
        api.train(tmp_path / "small.yaml", overrides)


def test_a_scratch_model_has_no_chat_and_a_chat_model_no_words(tmp_path: Path) -> None:
    given = write_model(tmp_path / "given")
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    run = f"run={tmp_path / 'run'}"
    with pytest.raises(ConfigurationError, match="no chat template"):
        api.train(tmp_path / "small.yaml", ["model.tokenizer=chat", run])
    with pytest.raises(ConfigurationError, match=r"no words tokenizer[\s\S]*chat"):
        api.train(tmp_path / "small.yaml", [f"model.path={given}", run])
    assert not (tmp_path / "run").exists()
