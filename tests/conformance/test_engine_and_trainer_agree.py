"""What the engine samples under an exported version, the trainer scores with the same log-probs."""

import msgspec
import numpy as np
import pytest
from support.trainer_cases import TINY_MODEL, accumulate, micro_batch, random_group, sequence, settings

from tiderl.data.records import TaskKey
from tiderl.data.settings import EngineSettings
from tiderl.data.turns import Sampling, Turn
from tiderl.engines import torch_engine
from tiderl.trainers import torch_trainer

TEMPERATURE = 0.8


def sampled(engine, context, new_tokens):
    """The context with what the engine sampled, as the sequence that the trainer would get."""
    engine.add(
        Turn(
            TaskKey("train", 0, 0),
            0,
            np.array(context, np.int32),
            Sampling(TEMPERATURE, new_tokens, stop_ids=(), seed=7),
            remaining_tokens=64,
        )
    )
    results = []
    while engine.has_work():
        results += engine.step()
    (result,) = results
    ids = [*context, *result.ids.tolist()]
    version = int(result.versions[0])
    return sequence(ids, range(len(context), len(ids)), result.logprobs.tolist(), version=version)


@pytest.mark.parametrize(("dtype", "mean_gap"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_logprob_gap_at_equal_version_is_rounding(tmp_path, dtype, mean_gap):
    model = msgspec.structs.replace(TINY_MODEL, dtype=dtype)
    trainer = torch_trainer.build(settings(tmp_path, model=model, temperature=TEMPERATURE, lr=0.05, kl_coef=0.0))
    trainer.warm_up((), 0, 0.0)
    accumulate(trainer, [micro_batch(random_group(0, 3), update=1)])
    trainer.finish()
    engine = torch_engine.build(EngineSettings(model=model, kv_budget_tokens=64))
    engine.load_weights(trainer.export(1))
    accumulate(trainer, [micro_batch([sampled(engine, [4, 5, 2], 30)], update=2)])
    metrics = trainer.finish().metrics
    assert metrics["logprob_gap_tokens"] == 30
    assert metrics["logprob_gap_mean"] < mean_gap
