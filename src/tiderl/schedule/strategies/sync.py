"""`sync`: one batch is generated, everybody waits, one update is made, the next batch starts under the new weights."""

from tiderl.schedule.strategy import Strategy

STRATEGY = Strategy(
    name="sync",
    summary="generate one batch on all ranks, then train on it; nothing is ever stale",
    max_staleness=0,
    consumption="whole_batch",
    at_new_version="barrier",
    all_ranks_generate=True,
    kv_policy="lru",
    loss="grpo",
)
