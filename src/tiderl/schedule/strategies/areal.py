"""`areal`: rollout runs ahead of training within a staleness bound; new weights interrupt turns in flight.

Source: AReaL, arXiv 2505.24298: starts bounded by a token bucket, interruptible generation, decoupled PPO. Consumption
is earliest deadline first with a feasibility check, not oldest first, which breaks the bound on heavy tails.
"""

from tiderl.schedule.strategy import Strategy

STRATEGY = Strategy(
    name="areal",
    summary="rollout and training overlap; every token at most max_staleness updates old",
    max_staleness=None,
    consumption="earliest_deadline",
    at_new_version="interrupt",
    all_ranks_generate=False,
    kv_policy="lru",
    loss="decoupled_ppo",
)
