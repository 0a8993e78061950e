"""A trajectory as a person reads it: what the environment said, what the policy did, what it earned.

Text for the eye only; token ids stay the truth and nothing reads a transcript back (I8).
"""

from __future__ import annotations

import textwrap

import numpy as np

from tiderl.data.records import Trajectory, TurnSpan
from tiderl.observe.words import count

ENDINGS = {
    "terminated": "over",
    "truncated": "cut short by the environment",
    "budget_turns": "out of turns",
    "budget_tokens": "out of tokens",
}
WIDTH = 100
LABEL = 10


def transcript(trajectory: Trajectory, *, status: str = "") -> str:
    """Several lines: a head with the figures, then environment and policy in turn. `status`: what the journal says."""
    key = trajectory.key
    outcome = "success" if trajectory.success else "no success"
    facts = [
        f"trajectory {trajectory.id}",
        f"{key.split} prompt {key.prompt_id}, member {key.member}, attempt {key.attempt}",
        f"reward {trajectory.reward:.2f}, {outcome}",
        f"{ENDINGS[trajectory.ending]} after {count(len(trajectory.turns), 'turn')}",
        f"{trajectory.tokens} tokens, {trajectory.loss_tokens} sampled",
        f"versions {_range(trajectory.versions[trajectory.loss_mask])}",
    ]
    lines = [*textwrap.wrap(" · ".join([*facts, status] if status else facts), WIDTH)]
    for number, turn in enumerate(trajectory.turns):
        if number < len(trajectory.text):
            lines += _spoken("env", trajectory.text[number])
        lines += _spoken("policy", turn.action or "(nothing)")
        lines.append(" " * LABEL + _turn_facts(trajectory, turn))
    for text in trajectory.text[len(trajectory.turns) :]:
        lines += _spoken("env", text)
    return "\n".join(lines)


def _spoken(who: str, text: str) -> list[str]:
    """The text in a column of its own; its own line breaks are kept."""
    first, rest = f"  {who}".ljust(LABEL), " " * LABEL
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += textwrap.wrap(paragraph, WIDTH, initial_indent=rest, subsequent_indent=rest) or [rest]
    return [first + lines[0][LABEL:], *lines[1:]]


def _turn_facts(trajectory: Trajectory, turn: TurnSpan) -> str:
    """Reward, mean log-prob of the sampled tokens, and how the turn ended when not by its stop token."""
    facts = [f"reward {turn.reward:.2f}"]
    if turn.end > turn.start:
        facts.append(f"log-prob {float(np.mean(trajectory.logprobs[turn.start : turn.end])):.2f} a token")
    if turn.finish_reason != "stop":
        facts.append(f"ended by {turn.finish_reason}")
    return f"({', '.join(facts)})"


def _range(versions: np.ndarray) -> str:
    if not len(versions):
        return "none"
    low, high = int(versions.min()), int(versions.max())
    return str(low) if low == high else f"{low} to {high}"
