"""The comparison with another trainer is fair where that can be seen without it: one workload, one account."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

PEERS = Path(__file__).parents[2] / "bench" / "peers"
sys.path.insert(0, str(PEERS))

import compare  # noqa: E402
import lockstep  # noqa: E402
import workload  # noqa: E402

from tiderl.config.machine import prepare  # noqa: E402
from tiderl.data.events import EnvStepFinished, PromptIssued  # noqa: E402
from tiderl.data.records import TaskKey  # noqa: E402
from tiderl.envs.builtin import Fetch  # noqa: E402
from tiderl.envs.inprocess import AsyncEnvironments  # noqa: E402
from tiderl.envs.waits import wait_s  # noqa: E402
from tiderl.runtime.task import TaskLimits, play_expert  # noqa: E402
from tiderl.store.recorder import read_events  # noqa: E402

WORDS = lockstep.renderer()
TAIL_S = (3.0, 8.0)


def said(text: str) -> list[int]:
    return WORDS.action_ids(text).tolist()


def scripted(actions: dict[int, list[str]]) -> tuple[Any, list[int]]:
    """A policy that says each prompt number's actions one after the other, then `left`; the sizes of its batches."""
    batches: list[int] = []
    first: dict[tuple[int, ...], int] = {}
    for number in actions:
        start = WORDS.begin(lockstep.Observation.text(Fetch().reset(workload.first_prompts(number + 1)[number])))
        first[tuple(start.tolist())] = number

    def generate(contexts: list[list[int]]) -> list[list[int]]:
        batches.append(len(contexts))
        turn = len(batches) - 1
        answers = []
        for context in contexts:
            number = next(n for start, n in first.items() if tuple(context[: len(start)]) == start)
            answers.append(said(actions[number][turn] if turn < len(actions[number]) else "left"))
        return answers

    return generate, batches


def play(actions: dict[int, list[str]], wait: str = "0") -> tuple[list[lockstep.Rollout], list[int], list[float]]:
    generate, batches = scripted(actions)
    members = [(number, 0, workload.first_prompts(number + 1)[number]) for number in actions]
    slept: list[float] = []
    return lockstep.play(members, wait=wait, words=WORDS, generate=generate, sleep=slept.append), batches, slept


def expert(number: int) -> list[str]:
    return Fetch().expert(workload.first_prompts(number + 1)[number])


@pytest.mark.parametrize("wait", list(workload.WAITS))
def test_both_sides_wait_alike(wait: str, tmp_path: Path) -> None:
    path = tmp_path / "peer.yaml"
    config = workload.configuration(wait=wait, updates=1, strategy="areal", ranks=2, model=None)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    resolved = prepare(path, command="train")
    profile = resolved.config.environments["builtin"].wait
    places = [(prompt, member, turn) for prompt in range(6) for member in range(8) for turn in range(4)]
    ours = [
        0.0 if profile is None else wait_s(profile, resolved.config.seed, TaskKey("train", prompt, member, 1), turn)
        for prompt, member, turn in places
    ]
    assert ours == [workload.waited_s(wait, *place) for place in places]


def test_a_constant_wait_is_constant_and_a_heavy_one_is_not() -> None:
    assert {workload.waited_s("500ms", 3, member, 1) for member in range(8)} == {0.5}
    drawn = [workload.waited_s("heavy", prompt, member, 0) for prompt in range(500) for member in range(8)]
    # 3 % from the tail, and of the others those above 3 s: 1 - Phi(ln(15) / 1.2) = 1.2 %, those above 8 s 0.1 %.
    assert sum(TAIL_S[0] <= wait <= TAIL_S[1] for wait in drawn) / len(drawn) == pytest.approx(0.041, abs=0.01)
    assert np.median(drawn) == pytest.approx(0.2, rel=0.15)


def test_lockstep_records_what_the_runtime_records() -> None:
    """The oracle is the runtime's own demonstration of the same actions."""
    number = 2
    actions = expert(number)
    [rollout], _, _ = play({number: actions})

    async def demonstration() -> Any:
        environments = AsyncEnvironments("builtin", {}, slots=1, deadline_s=10.0)
        await environments.start()
        try:
            return await play_expert(
                key=TaskKey("train", number, 0),
                prompt=workload.first_prompts(number + 1)[number],
                actions=actions,
                limits=TaskLimits(
                    max_turns=workload.MAX_TURNS,
                    max_context_tokens=workload.MAX_CONTEXT_TOKENS,
                    max_new_tokens_per_turn=workload.MAX_NEW_TOKENS_PER_TURN,
                    temperature=workload.TEMPERATURE,
                    seed=workload.SEED,
                ),
                environments=environments,
                renderer=WORDS,
            )
        finally:
            await environments.close()

    expected = asyncio.run(demonstration())
    assert rollout.context == expected.ids.tolist()
    assert [0] * len(rollout.prompt_ids) + rollout.mask == expected.loss_mask.astype(int).tolist()
    assert (rollout.reward, rollout.turns) == (1.0, len(actions))


def test_a_turn_of_lockstep_takes_as_long_as_its_slowest_open_rollout() -> None:
    actions = {number: expert(number) for number in range(4)}
    rollouts, batches, slept = play(actions, wait="heavy")
    lengths = [len(actions[number]) for number in range(4)]
    assert [rollout.turns for rollout in rollouts] == lengths
    assert batches == [sum(length > turn for length in lengths) for turn in range(max(lengths))]
    assert slept == [
        max(workload.waited_s("heavy", number, 0, turn) for number in range(4) if lengths[number] > turn)
        for turn in range(max(lengths))
    ]


def test_what_cannot_be_parsed_is_answered_without_a_wait() -> None:
    stop = WORDS.stop_ids[0]
    prompt = workload.first_prompts(1)[0]
    answers: Iterator[list[int]] = iter([[stop], *(said(action) for action in expert(0))])
    slept: list[float] = []
    [rollout] = lockstep.play(
        [(0, 0, prompt)], wait="500ms", words=WORDS, generate=lambda _: [next(answers)], sleep=slept.append
    )
    assert slept == [0.0] + [0.5] * len(expert(0))
    assert rollout.reward == 1.0
    assert sum(rollout.mask) == 1 + 2 * len(expert(0))  # the lone stop, then a word and a stop each


def test_nothing_after_the_first_stop_token_is_kept() -> None:
    assert lockstep.until_stop([5, 1, 0, 1], [1]) == [5, 1]
    assert lockstep.until_stop([5, 6, 7, 8], [1]) == [5, 6, 7, 8]


def row(arm: str, tokens_per_s: float, rollouts_per_s: float) -> dict[str, Any]:
    others = dict.fromkeys(compare.FIGURES, 1.0)
    return {**others, "wait": "0", "arm": arm, "tokens_per_s": tokens_per_s, "rollouts_per_s": rollouts_per_s}


def test_ratios_are_of_medians() -> None:
    ours, theirs = compare.ARMS[0].name, compare.BASE
    rows = [row(ours, 30.0, 3.0), row(theirs, 10.0, 2.0), row(ours, 20.0, 9.0), row(ours, 90.0, 4.0)]
    first, base = compare.medians(rows)
    assert (first["tokens_per_s"], first["least"], first["most"], first["runs"]) == (30.0, 20.0, 90.0, 3)
    assert (first["tokens_ratio"], first["rollouts_ratio"]) == (3.0, 2.0)
    assert (base["tokens_ratio"], base["rollouts_ratio"]) == (1.0, 1.0)
    assert compare.medians([row(ours, 30.0, 3.0)])[0]["tokens_ratio"] is None


def test_an_arm_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no memory left')"]
    with pytest.raises(compare.ArmFailed, match=r"(?s)trl lockstep.*no memory left"):
        compare.last_json(command, tmp_path, "trl lockstep", threads=1)


@pytest.mark.live
def test_a_run_has_the_prompts_and_the_waits_of_the_workload(tmp_path: Path) -> None:
    config = workload.configuration(wait="heavy", updates=1, strategy="sync", ranks=1, model=None, cluster="inline")
    config |= {"warmup": {"demos": 0, "updates": 0}}
    config["model"] = {**config["model"], "layers": 1, "hidden": 32}
    result = compare.train(config, tmp_path, "one update")
    events = list(read_events(tmp_path / result["run_dir"] / "events"))
    issued = [event.task_id for event in events if isinstance(event, PromptIssued)]
    assert issued == [prompt.id for prompt in workload.first_prompts(workload.GROUPS)]
    steps: Counter[tuple[int, int]] = Counter()
    late_s, at_once_s = [], []
    for event in events:
        if isinstance(event, EnvStepFinished):
            place = (event.prompt_id, event.member)
            wait = workload.waited_s("heavy", *place, steps[place])
            if event.seconds < wait:  # what could not be parsed: answered at once, no step
                at_once_s.append(event.seconds)
            else:
                late_s.append(event.seconds - wait)
                steps[place] += 1
    assert len(late_s) >= workload.ROLLOUTS / 2
    assert np.median(late_s) < 0.1
    assert max(at_once_s) < 0.1


@pytest.mark.live
def test_the_short_form_runs_without_the_other_trainer() -> None:
    done = subprocess.run(
        [sys.executable, str(PEERS / "compare.py"), "--short"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["arm"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    assert list(rows) == [arm.name for arm in compare.ARMS if arm.ranks == 2]
    assert all(2.0 <= row["loss_tokens_per_rollout"] <= 16 * 4 for row in rows.values())
    assert "no --trl-python" in done.stderr
