"""Wordle: marks as in the game, lost guesses, and an expert that narrows by all marks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agentrl import ScriptedAgent, UserError, call, make, play, say
from agentrl.envs.scoring import Scorer
from envs_contrib.wordle.env import GUESSES, Wordle
from envs_contrib.wordle.game import best_guess, consistent, marks
from envs_contrib.wordle.words import WORDS

# By hand, from the rules of the game.
MARKS = [
    ("crane", "crane", "GGGGG"),
    ("crane", "caner", "GYYYY"),
    ("speed", "abide", "XXYXY"),
    ("speed", "erase", "YXYYX"),
    ("speed", "steal", "GXGXX"),
    ("speed", "crepe", "XYGYX"),
    ("eerie", "there", "YXYXG"),
    ("geese", "there", "XXGXG"),
    ("allee", "apple", "GYXXG"),
    ("aaaaa", "banal", "XGXGX"),
    ("mummy", "dummy", "XGGGG"),
]


@pytest.mark.parametrize(("guess", "answer", "expected"), MARKS)
def test_marks_are_those_of_the_game_with_repeated_letters(guess, answer, expected):
    assert marks(guess, answer) == expected


def marks_by_counting(guess, answer):
    """Independent of `marks`: the k-th misplaced copy of a letter is Y if the answer has k to spare."""
    result = []
    for i, letter in enumerate(guess):
        spare = sum(a == letter != g for a, g in zip(answer, guess, strict=True))
        earlier = sum(guess[j] == letter != answer[j] for j in range(i))
        result.append("G" if answer[i] == letter else "Y" if earlier < spare else "X")
    return "".join(result)


def test_marks_equal_a_count_of_each_letter_on_random_pairs():
    rng = random.Random(0)
    for _ in range(3000):
        guess, answer = ("".join(rng.choices("abcde", k=5)) for _ in "12")
        assert marks(guess, answer) == marks_by_counting(guess, answer)


def test_the_words_are_five_letters_each_once():
    assert len(WORDS) == len(set(WORDS)) > 1000
    assert all(len(word) == 5 and word.isalpha() and word.islower() and word.isascii() for word in WORDS)


async def played(task, *messages):
    return await played_by((message for message in messages), task)


async def played_by(script, task):
    """The episode of a script, and its verdict."""
    env = Wordle()
    episode = await play(env, ScriptedAgent(script), task)
    marked = await Scorer(env.rewards).mark(episode)
    (verdict,) = await Scorer(env.rewards).judge([marked])
    return episode, verdict


def wrong_words(task, number):
    return [say(word) for word in WORDS if word != task.answer][:number]


async def test_solving_is_worth_one_however_late_and_failing_nothing():
    task = Wordle().tasks("test")[0]
    for late in (0, GUESSES - 1):
        episode, verdict = await played(task, *wrong_words(task, late), say(task.answer))
        assert (episode.ending, verdict.total, verdict.parts["solved"]) == ("completed", 1.0, 1.0)
        assert len(episode.turns) == late + 1
    episode, verdict = await played(task, *wrong_words(task, GUESSES), say(task.answer))
    assert (len(episode.turns), verdict.total, verdict.parts["solved"]) == (GUESSES, 0.0, 0.0)
    assert verdict.parts["invalid_moves"] == 0.0


@pytest.mark.parametrize(
    "message",
    [say("zzzzz"), say("four"), say("crane crane"), say(""), say("x" * 9000), call("guess", word="a")],
)
async def test_a_guess_that_is_no_word_costs_a_turn_pays_nothing_and_is_counted(message):
    task = Wordle().tasks("train")[3]
    episode, verdict = await played(task, *[message] * GUESSES, say(task.answer))
    assert (len(episode.turns), verdict.total) == (GUESSES, 0.0)
    assert (verdict.parts["solved"], verdict.parts["invalid_moves"]) == (0.0, GUESSES)
    _, verdict = await played(task, message, say(task.answer))
    assert (verdict.parts["solved"], verdict.parts["invalid_moves"], verdict.total) == (1.0, 1.0, 1.0)


async def test_the_observation_has_a_mark_below_each_letter_and_no_answer():
    env = Wordle()
    task = env.tasks("train")[0]
    first, _ = await env.reset(task, seed=0)
    assert task.answer not in first[0].text
    guess = next(word for word in WORDS if word != task.answer)
    step = await env.step(say(f" [{guess.upper()}] "))
    letters, below = step.observation[0].text.split("\n")
    assert letters.replace(" ", "") == guess
    assert below.replace(" ", "") == marks(guess, task.answer)


async def test_the_expert_solves_and_guesses_only_what_the_marks_allow():
    env = make("Wordle-v0")
    turns = Counter()
    for task in env.tasks("test")[:40]:
        candidates = WORDS
        episode, verdict = await played_by(Wordle().expert(task), task)
        assert verdict.total == 1.0, task.answer
        turns[len(episode.turns)] += 1
        for turn in episode.turns:
            guess = turn.action.text
            if len(candidates) > 16:
                assert guess in candidates
            candidates = consistent(candidates, guess, marks(guess, task.answer))
    assert max(turns) <= GUESSES


@pytest.mark.full
async def test_the_expert_solves_every_word():
    env = Wordle()
    for split in env.splits:
        for task in env.tasks(split):
            _, verdict = await played_by(Wordle().expert(task), task)
            assert verdict.total == 1.0, task.answer


def test_a_guess_that_tells_candidates_apart_is_found_among_all_words():
    alike = [word for word in WORDS if word.endswith("ight")]
    assert len(alike) >= 6
    guess = best_guess(WORDS, alike)
    assert 2 * len({marks(guess, word) for word in alike}) >= len(alike)


def test_splits_share_no_answer_and_fewer_words_make_a_smaller_game():
    for env in (Wordle(), Wordle(num_words=40)):
        answers = {split: {task.answer for task in env.tasks(split)} for split in env.splits}
        assert not answers["train"] & answers["test"]
        assert answers["train"] | answers["test"] == set(env.words)
    assert len(Wordle(num_words=40).tasks("test")) == 10
    with pytest.raises(UserError, match="Wordle has 1126 words, got num_words = 5000"):
        Wordle(num_words=5000)
