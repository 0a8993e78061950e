"""Who holds what of a replica's KV pool, to the token: the only place where it is charged and credited. Keeps I4.

Whole blocks are charged. What the members of a group begin with is charged once, while any of them holds KV, where the
engine keeps it once; and of that, what all groups of a kind begin with is charged once for all of them, as far as it
was known when the group began. Decides nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from tiderl.data.errors import InvariantViolation, RequestTooLarge
from tiderl.data.records import TaskKey
from tiderl.schedule.common import CommonPrompts
from tiderl.schedule.residents import Resident

Common = tuple[str, int, bytes]
"""Kind of the groups, positions from the start on, and what stands there: groups that begin otherwise, such as with
other tools, have nothing in common with these. Two lengths that were learned one after the other are charged as two: no
group's part changes while it is here."""


@dataclass
class GroupPrompt:
    """A group's part on this replica."""

    members: dict[TaskKey, Resident] = field(default_factory=dict)
    """In flight here."""
    first_tokens: int = 0
    """Context of the first turn here; 0 before any."""
    shared_tokens: int = 0
    """Of it, what the engine keeps once: whole blocks, and never the last token, which is computed to go on."""
    common: Common | None = None
    """Of that, what it has in common with other groups; None: nothing that was known when it began."""

    @property
    def common_tokens(self) -> int:
        return self.common[1] if self.common is not None else 0


@dataclass
class Prompts:
    """Of some groups, each once, and once what they have in common."""

    groups: dict[Common, int] = field(default_factory=dict)

    def add(self, prompt: GroupPrompt) -> int:
        """One more; returns the tokens that it adds."""
        more_tokens = self.more_tokens(prompt)
        if prompt.common is not None:
            self.groups[prompt.common] = self.groups.get(prompt.common, 0) + 1
        return more_tokens

    def remove(self, prompt: GroupPrompt) -> int:
        """One less; returns the tokens that go with it."""
        if prompt.common is not None:
            self.groups[prompt.common] -= 1
            if not self.groups[prompt.common]:
                del self.groups[prompt.common]
        return self.more_tokens(prompt)

    def more_tokens(self, prompt: GroupPrompt) -> int:
        """What it would add."""
        return prompt.shared_tokens - (prompt.common_tokens if prompt.common in self.groups else 0)


@dataclass
class Sum:
    """What some tasks hold together, with the prompts of their groups."""

    tokens: int = 0
    prompts: Prompts = field(default_factory=Prompts)
    holders: dict[Hashable, int] = field(default_factory=dict)
    """By group, those of the tasks that hold anything."""

    def change(self, group: Hashable, prompt: GroupPrompt, before: int, after: int) -> None:
        """One of them holds `after` tokens beside its group's prompt, and held `before`; 0: nothing."""
        self.tokens += after - before
        if bool(before) == bool(after):
            return
        held = self.holders.get(group, 0)
        self.holders[group] = held + (1 if after else -1)
        if after and not held:
            self.tokens += self.prompts.add(prompt)
        elif not self.holders[group]:
            del self.holders[group]
            self.tokens -= self.prompts.remove(prompt)


class Charges:
    """The books of one pool."""

    def __init__(self, budget_tokens: int, *, block_tokens: int, shares_prompts: bool) -> None:
        self.budget_tokens, self.block_tokens, self.shares_prompts = budget_tokens, block_tokens, shares_prompts
        self.prompt_tokens = 0
        """What all groups in flight share, whether it is held or not; what they have in common once."""
        self.common = CommonPrompts()
        self.running_tokens = 0
        """Charged for turns that run, without their groups' prompts."""
        self._groups: dict[Hashable, GroupPrompt] = {}
        self._prompts = Prompts()
        self.due_tokens = 0
        """Charged for what may leave, without its groups' prompts."""
        self._members = 0  # of all of them
        self._all, self._running, self._stays = Sum(), Sum(), Sum()

    @property
    def used_tokens(self) -> int:
        return self._all.tokens

    def expected_prompt_tokens(self, resident: float) -> float:
        """What groups in flight share and hold, when each task holds KV with the chance `resident`, independently, and
        all groups are as large. What these have in common is held when anybody holds KV."""
        if resident >= 1.0 or not self._groups:
            return float(self.prompt_tokens)
        nobody = 1.0 - max(0.0, resident)
        common_tokens = sum(tokens for _, tokens, _ in self._prompts.groups)
        parts_tokens = self.prompt_tokens - common_tokens
        members = self._members / len(self._groups)
        return parts_tokens * (1.0 - nobody**members) + common_tokens * (1.0 - nobody**self._members)

    def part_tokens(self, context_tokens: float) -> float:
        """Of a context, what it charges on average, with its part in the group's prompt."""
        if not self._groups:
            return context_tokens
        again = sum((groups - 1) * tokens for (_, tokens, _), groups in self._prompts.groups.items())
        shared_tokens = (self.prompt_tokens + again) / len(self._groups)
        return max(1.0, context_tokens - shared_tokens) + self.prompt_tokens / self._members

    def enter(self, resident: Resident) -> None:
        """It is in flight here, and holds nothing."""
        self._members += 1
        self._groups.setdefault(resident.group, GroupPrompt()).members[resident.key] = resident

    def leave(self, resident: Resident) -> None:
        self.charge(resident, 0)
        self._members -= 1
        group = self._groups[resident.group]
        del group.members[resident.key]
        if not group.members:
            if group.shared_tokens:
                self.prompt_tokens -= self._prompts.remove(group)
            self.common.forget(resident.group)
            del self._groups[resident.group]

    def first_tokens(self, group: Hashable) -> int:
        """Context with which a member of the group has begun here; 0: none has."""
        known = self._groups.get(group)
        return known.first_tokens if known is not None else 0

    def learn(self, resident: Resident) -> list[Resident]:
        """Its first context is known. The group's members here, if that is news: nobody's own part is what it was."""
        known, first_tokens = self._groups[resident.group], resident.first_tokens
        if known.first_tokens:
            return []
        known.first_tokens = first_tokens
        if not self.shares_prompts:
            return []
        known.shared_tokens = self._whole_blocks(first_tokens - 1)
        tokens = self._common_tokens(resident.kind, first_tokens - 1)
        known.common = (resident.kind, tokens, _digest(resident.first_ids, tokens)) if tokens else None
        if known.shared_tokens:
            self.prompt_tokens += self._prompts.add(known)
        return list(known.members.values())

    def own_tokens(self, group: Hashable, tokens: int) -> int:
        """Of so many positions, those beside the group's prompt; at least 1, also for a context shorter than it."""
        known = self._groups.get(group)
        return max(1, tokens - known.shared_tokens) if known is not None else tokens

    def new_tokens(self, kind: str, group: Hashable, tokens: int) -> int:
        """As `own_tokens`, for a task that has not begun: of a group that nobody has begun here, what its kind has in
        common counts as there where others in flight have it and all of them begin alike."""
        if self._prompts.groups and not self.first_tokens(group):
            common_tokens = self._common_tokens(kind, tokens - 1)
            if sum(found[:2] == (kind, common_tokens) for found in self._prompts.groups) == 1:
                tokens -= common_tokens
        return self.own_tokens(group, tokens)

    def missing(self, resident: Resident, tokens: int, *, without_due: bool = False) -> int:
        """Positions that the pool lacks for the task to have `tokens`; 0 or less: none. `without_due`: when everything
        has gone that is due, and with the last holder of a group its prompt."""
        prompt, block = self._groups[resident.group], self.block_tokens
        shared = prompt.shared_tokens
        own = tokens - shared if tokens > shared else 1
        needed = -(-own // block) * block - self.budget_tokens  # `_blocks`: this is asked most often of all
        held = self._stays if without_due else self._all
        if not (without_due and resident.charged_due):
            needed -= resident.charged_tokens
        return held.tokens + needed + (0 if resident.group in held.holders else held.prompts.more_tokens(prompt))

    def missing_for(self, group: Hashable, tokens: int) -> int:
        """As `missing`, for one more of a group, which may be here."""
        known = self._groups.get(group)
        shared = known.shared_tokens if known is not None else 0
        prompt = 0 if known is None or group in self._all.holders else self._all.prompts.more_tokens(known)
        return self._all.tokens + prompt + self._blocks(max(1, tokens - shared)) - self.budget_tokens

    def fits(self, resident: Resident) -> bool:
        """Whether its next turn has room as it is."""
        return self.missing(resident, resident.wanted_tokens) <= 0

    def refuse(self, resident: Resident, tokens: int) -> None:
        """Raises `RequestTooLarge` where the pool cannot hold so many positions of the task, even with nobody else."""
        shared = self._groups[resident.group].shared_tokens
        if max(tokens, shared) + self.block_tokens <= self.budget_tokens:
            return
        if shared + self._blocks(max(1, tokens - shared)) > self.budget_tokens:
            raise RequestTooLarge(
                f"a turn of {tokens} tokens never fits {self.budget_tokens} tokens of KV",
                where=f"task {resident.key}",
                hint="raise rollout.kv_budget_tokens or lower rollout.max_context_tokens",
            )

    def charge(self, resident: Resident, tokens: int, *, running: bool = False) -> None:
        """From now on it has `tokens` positions, its group's prompt among them; 0: none. Raises `InvariantViolation`
        where more is given back than was taken."""
        prompt = self._groups[resident.group]
        charged = self._blocks(max(1, tokens - prompt.shared_tokens)) if tokens else 0
        before, ran = resident.charged_tokens, resident.charged_tokens if resident.charged_running else 0
        if resident.charged_due:
            self.due_tokens += charged - before
        if before and charged:  # as `change`, of which this is the most frequent case
            self._all.tokens += charged - before
            if not resident.charged_due:
                self._stays.tokens += charged - before
        elif charged != before:
            self._all.change(resident.group, prompt, before, charged)
            if not resident.charged_due:
                self._stays.change(resident.group, prompt, before, charged)
        runs = charged if running else 0
        if runs != ran:
            self._running.change(resident.group, prompt, ran, runs)
            self.running_tokens += runs - ran
        resident.charged_tokens, resident.charged_running = charged, running
        if not running and resident.computed != (tokens > 0):
            self.common.computed(resident, tokens > 0)
        if self._all.tokens < 0:
            raise InvariantViolation(f"{self._all.tokens} tokens used", where="task pool, I4")

    def due(self, resident: Resident, is_due: bool) -> None:
        """Whether what it holds may leave."""
        if resident.charged_due == is_due:
            return
        resident.charged_due = is_due
        if not resident.charged_tokens:
            return
        charged = resident.charged_tokens
        self.due_tokens += charged if is_due else -charged
        before, after = (charged, 0) if is_due else (0, charged)
        self._stays.change(resident.group, self._groups[resident.group], before, after)

    def _common_tokens(self, kind: str, tokens: int) -> int:
        """Of so many positions of one of the kind."""
        return self._whole_blocks(min(tokens, self.common.tokens(kind)))

    def _whole_blocks(self, tokens: int) -> int:
        return tokens // self.block_tokens * self.block_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens


def _digest(ids: np.ndarray | None, tokens: int) -> bytes:
    """Of the first `tokens` ids; the same for all contexts whose ids nobody knows."""
    return b"" if ids is None else hashlib.blake2b(ids[:tokens].tobytes(), digest_size=16).digest()
