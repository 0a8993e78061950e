"""BabyAI as text: its observations are enough to act on, its expert solves it, its words are its vocabulary."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("minigrid")

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Action, Observation, Prompt
from tiderl.envs.babyai import ACTIONS, COLORS, BabyAI

LEVELS = ("BabyAI-GoToObj-v0", "BabyAI-GoToLocal-v0", "BabyAI-PickupLoc-v0")
OBJECT = re.compile(rf"\b({'|'.join(COLORS)}) (key|ball|box)(?: (\d) ahead)?(?: (\d) (left|right))?")


def text_of(observation: Observation | str) -> str:
    return observation if isinstance(observation, str) else observation.as_text()


class Reader:
    """A policy that reads the text and nothing else: walk to the object's row, turn to it, walk up to it."""

    def __init__(self, first: str) -> None:
        self.target = re.search(rf"({'|'.join(COLORS)}) (key|ball|box)", first).groups()
        self.seen_last = "left"

    def act(self, scene: str) -> str:
        for color, kind, ahead, aside, side in OBJECT.findall(scene):
            if (color, kind) == self.target and (ahead or aside):
                if aside:
                    self.seen_last = side
                return "forward" if ahead else self.seen_last
        return self.seen_last


def play(level: str, seed: int, actions: list[str] | None) -> tuple[bool, int, list[str]]:
    """Success, turns and observations of one episode, with the given actions or the reader's."""
    environment = BabyAI(level=level)
    texts = [text_of(environment.reset(Prompt("p", seed)))]
    reader = Reader(texts[0]) if actions is None else None
    mission_words = len(texts[0][: texts[0].index("see")].split())
    scene = " ".join(texts[0].split()[mission_words:])
    for turn in range(16):
        action = reader.act(scene) if reader else actions[turn]
        answer = environment.step(Action(action))
        scene = text_of(answer.observation)
        texts.append(scene)
        if answer.terminated or answer.truncated:
            return answer.info["success"], turn + 1, texts
    raise AssertionError("an episode of 16 turns did not end")


def test_a_policy_that_reads_only_the_text_succeeds() -> None:
    wins = sum(play("BabyAI-GoToObj-v0", seed, None)[0] for seed in range(200))
    assert wins > 190


@pytest.mark.parametrize(("level", "least"), [(LEVELS[0], 60), (LEVELS[1], 57), (LEVELS[2], 57)])
def test_the_expert_succeeds_within_sixteen_turns(level: str, least: int) -> None:
    wins = 0
    for seed in range(60):
        actions = BabyAI(level=level).expert(Prompt("p", seed))
        wins += len(actions) <= 16 and play(level, seed, actions)[0]
    assert wins >= least


@pytest.mark.parametrize("level", LEVELS)
def test_every_word_is_in_the_vocabulary_and_observations_are_short(level: str) -> None:
    words = set(BabyAI.vocabulary(level=level))
    lengths = []
    for seed in range(40):
        actions = [*BabyAI(level=level).expert(Prompt("p", seed)), *["left"] * 16]
        _, _, texts = play(level, seed, actions)
        assert {word for text in texts for word in text.split()} <= words
        lengths += [len(text.split()) for text in texts]
    assert sorted(lengths)[len(lengths) // 2] <= 20
    assert max(lengths) <= 30


def test_the_same_prompt_gives_the_same_start_and_others_differ() -> None:
    starts = [text_of(BabyAI().reset(Prompt("p", seed))) for seed in range(50)]
    assert starts == [text_of(BabyAI().reset(Prompt("p", seed))) for seed in range(50)]
    assert len(set(starts)) > 25


def test_train_and_eval_share_no_seed() -> None:
    train, evaluation = BabyAI.prompts("train"), BabyAI.prompts("eval")
    assert len(train) >= 1000
    assert len(evaluation) >= 200
    assert not {prompt.seed for prompt in train} & {prompt.seed for prompt in evaluation}


@pytest.mark.parametrize("action", [Action("jump"), Action("left left"), Action("", malformed="nothing was said")])
def test_an_action_that_is_none_ends_the_task_without_reward(action: Action) -> None:
    environment = BabyAI()
    environment.reset(Prompt("p", 1))
    answer = environment.step(action)
    assert answer.terminated
    assert answer.reward == 0.0
    assert answer.info["success"] is False


def test_the_last_turn_truncates() -> None:
    environment = BabyAI(max_turns=3)
    environment.reset(Prompt("p", 1))
    answers = [environment.step(Action("done")) for _ in range(3)]
    assert [answer.truncated for answer in answers] == [False, False, True]
    assert not any(answer.terminated for answer in answers)


def test_rejected_draws_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(40):
        BabyAI(level="BabyAI-PutNextLocal-v0").reset(Prompt("p", seed))
    assert capfd.readouterr().out == ""


def test_an_unknown_level_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError, match="GoToObject") as caught:
        BabyAI(level="BabyAI-GoToObject-v0")
    assert "did you mean" in caught.value.hint


def test_actions_are_minigrids_own() -> None:
    from minigrid.core.actions import Actions

    assert tuple(action.name for action in Actions) == ACTIONS


@pytest.mark.parametrize("level", [*LEVELS, "BabyAI-UnlockPickup-v0", "BabyAI-PutNextLocal-v0"])
def test_an_episode_is_the_same_without_the_picture_that_minigrid_draws(level: str) -> None:
    def told(*, with_picture: bool) -> list[str]:
        environment = BabyAI(level=level)
        if with_picture:
            del environment._level.gen_obs  # the class's own again
        texts = []
        for seed in range(5):
            texts.append(text_of(environment.reset(Prompt("p", seed))))
            texts.extend(environment.expert(Prompt("p", seed)))
            environment.reset(Prompt("p", seed))
            for turn in range(12):
                step = environment.step(Action(ACTIONS[(seed + turn * turn) % 6]))
                texts.append(f"{text_of(step.observation)} {step.reward} {step.terminated} {step.truncated}")
                if step.terminated or step.truncated:
                    break
        return texts

    assert told(with_picture=False) == told(with_picture=True)
