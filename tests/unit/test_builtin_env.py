"""The built-in environment: a hand-made grid step by step, an expert that always solves it, a start per prompt."""

from __future__ import annotations

import pytest

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import Action, Prompt
from tiderl.envs.builtin import Fetch


def test_a_known_grid_looks_and_answers_as_drawn() -> None:
    """Agent at (1, 3) looking north, red cup at (1, 1), blue key at (3, 3), in a 5 x 5 grid."""
    room = Fetch()
    room._objects = {(1, 1): ("red", "cup"), (3, 3): ("blue", "key")}
    room._wanted, room._at, room._heading = ("blue", "key"), (1, 3), 0
    assert room._scene() == "see red cup 2 ahead blue key 2 right"
    assert room.step(Action("forward")).observation == "see red cup 1 ahead"  # the key is behind now
    assert room.step(Action("take")).observation == "wrong"
    assert room.step(Action("right")).observation == "see red cup 1 left blue key 2 ahead 1 right"
    assert room.step(Action("forward")).observation == "see blue key 1 ahead 1 right"
    assert room.step(Action("left")).observation == "see red cup 1 ahead 1 left"
    room.step(Action("right"))
    assert room.step(Action("forward")).observation == "see blue key 1 right"
    assert room.step(Action("right")).observation == "see blue key 1 ahead"
    last = room.step(Action("take"))
    assert (last.observation, last.reward, last.terminated, last.info) == (
        "taken",
        1.0,
        True,
        {"success": True},
    )


def test_taking_the_wrong_object_ends_the_task_without_reward() -> None:
    room = Fetch()
    room._objects = {(1, 1): ("red", "cup"), (3, 3): ("blue", "key")}
    room._wanted, room._at, room._heading = ("blue", "key"), (1, 2), 0
    answer = room.step(Action("take"))
    assert (answer.reward, answer.terminated, answer.info["success"]) == (0.0, True, False)


def test_the_expert_solves_every_prompt_in_time() -> None:
    for prompt in Fetch.prompts("eval")[:300]:
        room = Fetch()
        actions = room.expert(prompt)
        assert 1 <= len(actions) <= 16
        room.reset(prompt)
        answers = [room.step(Action(word)) for word in actions]
        assert [answer.terminated for answer in answers] == [False] * (len(actions) - 1) + [True]
        assert answers[-1].reward == 1.0


def test_observations_are_short_and_of_the_vocabulary() -> None:
    words = set(Fetch.vocabulary())
    for prompt in Fetch.prompts("train")[:200]:
        room = Fetch()
        actions = room.expert(prompt)
        texts = [room.reset(prompt), *(str(room.step(Action(word)).observation) for word in actions)]
        assert {word for text in texts for word in text.split()} <= words
        assert max(len(text.split()) for text in texts) <= 20


def test_the_same_prompt_gives_the_same_start_and_others_differ() -> None:
    prompts = Fetch.prompts("train")[:100]
    starts = [Fetch().reset(prompt) for prompt in prompts]
    assert starts == [Fetch().reset(prompt) for prompt in prompts]
    assert len(set(starts)) > 50  # "nothing" is seen of every object behind


def test_train_and_eval_share_no_seed() -> None:
    seeds = [{prompt.seed for prompt in Fetch.prompts(split)} for split in ("train", "eval")]
    assert not seeds[0] & seeds[1]


@pytest.mark.parametrize("action", [Action("jump"), Action(""), Action("take", malformed="cut")])
def test_an_action_that_is_none_ends_the_task(action: Action) -> None:
    room = Fetch()
    room.reset(Prompt("p", 1))
    answer = room.step(action)
    assert (answer.terminated, answer.reward, answer.info["success"]) == (True, 0.0, False)


def test_the_last_turn_truncates() -> None:
    room = Fetch(max_turns=2)
    room.reset(Prompt("p", 1))
    assert not room.step(Action("left")).truncated
    assert room.step(Action("left")).truncated


def test_walls_stop_and_objects_do_not() -> None:
    """Agent at (0, 0) looking north into the wall; the cup is to the east, at (1, 0)."""
    room = Fetch()
    room._objects = {(1, 0): ("red", "cup")}
    room._wanted, room._at, room._heading = ("red", "cup"), (0, 0), 0
    assert room.step(Action("forward")).observation == "see red cup 1 right"
    room.step(Action("right"))
    assert room.step(Action("forward")).observation == "see red cup here"
    assert room.step(Action("take")).observation == "see red cup here"  # only the next cell ahead is in reach
    assert room.step(Action("forward")).observation == "see nothing"


@pytest.mark.parametrize("options", [{"size": 1}, {"objects": 0}, {"objects": 13}, {"size": 2, "objects": 4}])
def test_options_that_cannot_work_are_refused_with_the_task_set(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        Fetch.prompts("train", **options)
