import fcntl
import json
import os

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.trainer_cases import TINY_MODEL, WORDS, micro_batch, sequence, settings, tiny_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiderl.data.errors import CheckpointError
from tiderl.data.records import Observation, WeightHandle
from tiderl.text.words import WordsRenderer
from tiderl.trainers.export import FOLDER_PREFIX, LOCK_NAME, WeightExports, WeightsFolder, remove_leftovers
from tiderl.trainers.folders import whole_folder
from tiderl.trainers.torch_trainer import build

CASE = micro_batch([sequence([4, 2, 5, 1, 6, 2, 7, 1], [2, 3, 6, 7])])


def folder_logprobs(path):
    """The log-probs of `CASE` under the model in a folder, as anyone would compute them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.from_numpy(CASE.sequences[0].ids.astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return table[torch.arange(7), ids[0, 1:]].numpy()[CASE.sequences[0].loss_mask[1:]]


def test_a_saved_folder_reloads_with_equal_logprobs_and_can_be_trained_again(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.save_model(str(tmp_path / "model"))
    ours = trainer.reference_logprobs(CASE)[CASE.sequences[0].loss_mask]
    np.testing.assert_allclose(folder_logprobs(tmp_path / "model"), ours, atol=1e-6)
    again = build(settings(tmp_path, seed=50, model=msgspec.structs.replace(TINY_MODEL, path=str(tmp_path / "model"))))
    again.warm_up((), 0, 0.0)
    np.testing.assert_array_equal(again.reference_logprobs(CASE), trainer.reference_logprobs(CASE))
    again.save_model(str(tmp_path / "again"))
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "model" / "tokenizer.json").read_bytes()


def test_the_saved_tokenizer_is_the_words_renderer(tmp_path):
    tiny_trainer(tmp_path).save_model(str(tmp_path / "model"))
    tokenizer, renderer = AutoTokenizer.from_pretrained(tmp_path / "model"), WordsRenderer(WORDS)
    first, second = "Go  left go", "door nonsense"
    ids = [
        *renderer.begin(Observation.text(first)),
        *renderer.action_ids("right"),
        *renderer.extend(Observation.text(second)),
    ]
    talk = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "right"},
        {"role": "user", "content": second},
    ]
    assert tokenizer.apply_chat_template(talk, return_dict=False) == ids
    assert tokenizer(first)["input_ids"] == ids[:3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (renderer.pad_id, renderer.stop_ids[0])
    assert tokenizer.decode([4, 5, 1], skip_special_tokens=True) == "go left"


def test_the_saved_folder_says_how_to_generate_and_in_which_dtype(tmp_path):
    model = msgspec.structs.replace(TINY_MODEL, dtype="bfloat16")
    tiny_trainer(tmp_path, model=model, temperature=0.7).save_model(str(tmp_path / "model"))
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1]
    assert generation["temperature"] == 0.7
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(tmp_path):
    exact = tiny_trainer(tmp_path)
    rounded = tiny_trainer(tmp_path, model=msgspec.structs.replace(TINY_MODEL, dtype="bfloat16"))
    gap = np.abs(exact.reference_logprobs(CASE) - rounded.reference_logprobs(CASE))
    assert 0 < gap.max() < 0.05
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.float32}


def test_a_scratch_model_without_words_has_its_ids_as_words(tmp_path):
    tiny_trainer(tmp_path, model=msgspec.structs.replace(TINY_MODEL, words=())).save_model(str(tmp_path / "model"))
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("5 7")["input_ids"] == [5, 7]


def test_a_folder_that_fails_half_way_leaves_the_old_one(tmp_path):
    target = tmp_path / "folder"
    target.mkdir()
    (target / "old").write_text("old")

    def fail_half_way():
        with whole_folder(str(target)) as folder:
            (folder / "new").write_text("half")
            raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full"):
        fail_half_way()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (target / "old").read_text() == "old"


# ---------------------------------------------------------------- exported versions


def test_an_exported_version_holds_the_weights_once_under_a_name_with_its_number(tmp_path):
    trainer = tiny_trainer(tmp_path / "weights")
    handle = trainer.export(12)
    assert handle.version == 12
    assert "v12" in handle.path
    assert os.path.getsize(handle.path) == handle.nbytes
    stored = load_file(handle.path)
    assert "lm_head.weight" not in stored  # tied: it is the embedding
    assert set(stored) == set(dict(trainer.model.named_parameters()))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(stored[name], parameter)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["weights-v12.safetensors"]


def test_discard_deletes_one_version_and_may_come_twice(tmp_path):
    trainer = tiny_trainer(tmp_path / "weights")
    first, second = trainer.export(1), trainer.export(2)
    trainer.discard(first)
    trainer.discard(first)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [os.path.basename(second.path)]


def test_discard_deletes_nothing_but_versions(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with pytest.raises(CheckpointError, match="not an exported version"):
        tiny_trainer(tmp_path).discard(WeightHandle(1, str(precious), 4))
    assert precious.exists()


def test_an_own_folder_is_removed_at_close_and_a_given_one_stays(tmp_path):
    own = build(settings(""))
    path = own.export(0).path
    assert os.path.exists(path)
    own.close()
    own.close()
    assert not os.path.exists(os.path.dirname(path))
    given = build(settings(tmp_path))
    given.export(0)
    given.close()
    assert (tmp_path / "weights-v0.safetensors").exists()


def test_versions_in_a_folder_of_the_driver_outlive_the_trainer_that_wrote_them():
    folder = WeightsFolder(0)
    trainer = build(settings(folder.path))
    path = trainer.export(3).path
    trainer.close()
    build(settings(folder.path)).close()  # started again
    assert os.path.exists(path)
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_folders_of_dead_trainers_are_removed_and_those_of_living_ones_are_not(tmp_path):
    for name in ("dead", "alive"):
        (tmp_path / f"{FOLDER_PREFIX}{name}").mkdir()
        (tmp_path / f"{FOLDER_PREFIX}{name}" / LOCK_NAME).touch()
    (tmp_path / "unrelated").mkdir()
    with open(tmp_path / f"{FOLDER_PREFIX}alive" / LOCK_NAME) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{FOLDER_PREFIX}alive", "unrelated"]


def test_a_disk_that_refuses_is_a_typed_error(tmp_path):
    exports = WeightExports(str(tmp_path / "weights"), 0)
    (tmp_path / "weights").rmdir()
    with pytest.raises(CheckpointError, match="cannot write version 3"):
        exports.write(3, {"w": torch.zeros(2)})
