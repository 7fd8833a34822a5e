"""Graders that compare texts: what counts as the same, and what does not."""

from __future__ import annotations

import time
from collections import Counter
from itertools import groupby

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl import Task, UserError, make, play, say
from agentrl.assembly.rewards import reward_function
from agentrl.envs import ScriptedAgent
from agentrl.envs.graders.text import TEXT_GRADERS
from agentrl.errors import ConfigError, GradingError
from agentrl.tools import is_inline
from envs_contrib.single_turn import SingleTurn


def worth(name, answer, label, **metadata):
    """What an answer is worth beside a label."""
    return TEXT_GRADERS[name](Task.ask("t", "?", label, **metadata), answer)


@pytest.mark.parametrize(
    ("name", "answer", "label", "value"),
    [
        ("exact_match", "The Paris.", "paris", 1),
        ("exact_match", "in Paris", "Paris", 0),
        ("exact_match", "", "A", 0),
        ("exact_match", "a.", "A", 1),
        ("exact_match", "", "The The", 0),
        ("exact_match", "the the", "The The", 1),
        ("exact_match", "", "+", 0),
        ("exact_match", "+", "+", 1),
        ("exact_match", "-", "+", 0),
        ("exact_match", "5", "-5", 0),
        ("exact_match", "\N{MINUS SIGN}5", "-5", 1),
        ("exact_match", "15", "1.5", 0),
        ("exact_match", "-$1,000", "-$1000", 1),
        ("exact_match", "COVID 19", "COVID-19", 0),
        ("exact_match", "covid19", "COVID-19", 1),
        ("exact_match", ".5", "0.5", 1),
        ("f1", "It is in Paris", "Paris", 2 / 5),
        ("f1", "Paris, France", "paris france", 1),
        ("f1", "Rome", "Paris", 0),
        ("f1", "Paris Paris", "Paris", 2 / 3),
        ("f1", "", "Paris", 0),
        ("f1", "the", "a", 0),
        ("f1", "", "A", 0),
        ("f1", "A", "A", 1),
        ("f1", "5 apples", "-5 apples", 1 / 2),
        ("number", "So it is 72.", "Half of it is 24. #### 72", 1),
        ("number", "1,000 or so", "1000.0", 1),
        ("number", "-3", "3", 0),
        ("number", "x = -3", "-3", 1),
        ("number", "3e2", "300", 1),
        ("number", ".5", "0.50", 1),
        ("number", "7 of 8", "7", 0),
        ("number", "none", "7", 0),
        ("number", "#### 72\nI used 3 steps.", "#### 72", 1),
        ("number", "#### 3\nI used 72 steps.", "#### 72", 0),
        ("number", "#### 2. Add them\nIt is 72.", "#### 72", 1),
        ("number", "#### -$18 in 3 days", "-18", 1),
        ("choice", "(b) because", "B", 1),
        ("choice", "**B**", "B) Tuesday", 1),
        ("choice", "Both", "B", 0),
        ("choice", "A or B", "B", 0),
        ("choice", "", "B", 0),
        ("choice", "2.", "2", 1),
    ],
)
def test_an_answer_is_worth_what_its_grader_says(name, answer, label, value):
    assert worth(name, answer, label) == pytest.approx(value)


@pytest.mark.parametrize("name", ["exact_match", "f1", "number", "choice"])
def test_the_best_of_several_answers_counts(name):
    assert worth(name, "7", "5", answers=["5", "7"]) == 1
    assert worth(name, "7", "7", answers=["5", "6"]) == 0
    assert worth(name, "", "7", answers=["", "7"]) == 0
    assert worth(name, "7", "7", answers=[]) == 1


@pytest.mark.parametrize("name", sorted(TEXT_GRADERS.keys() - {"random"}))
@pytest.mark.parametrize("label", [None, "", "  "])
@pytest.mark.parametrize("answer", ["", "nan", "null", "Answer: "])
def test_a_task_without_a_label_is_a_failure_and_no_zero(name, label, answer):
    with pytest.raises(GradingError, match="t: the task has no label to grade by"):
        worth(name, answer, label)


def test_a_random_reward_is_even_repeats_and_needs_no_label():
    tasks = [Task.ask(f"t{number}", "?", None) for number in range(50)]
    rewards = [[TEXT_GRADERS["random"](task, str(n)) for n in range(20)] for task in tasks]
    assert {reward for row in rewards for reward in row} == {0.0, 1.0}
    # Five deviations of 1,000 fair coins.
    assert abs(sum(map(sum, rewards)) - 500) < 80
    assert len({tuple(row) for row in rewards}) == len(tasks)
    assert rewards == [[TEXT_GRADERS["random"](task, str(n)) for n in range(20)] for task in tasks]
    assert worth("random", "yes", "a") == worth("random", "yes", "b") != worth("random", "six", "b")


@pytest.mark.parametrize(
    ("name", "label"), [("number", "none"), ("choice", "-"), ("gpqa", "K"), ("gpqa", "7")]
)
def test_a_label_that_a_grader_cannot_read_is_a_failure_and_no_zero(name, label):
    with pytest.raises(GradingError, match=f"t: the label {label!r} has no"):
        worth(name, "7", label)


def test_choices_that_are_signs_are_told_apart():
    signs = ["+", "-", "×", "÷"]
    assert [
        worth("gpqa", sign, letter, choices=signs) for sign, letter in zip(signs, "ABCD", strict=True)
    ] == [1] * 4
    assert worth("gpqa", "", "A", choices=signs) == 0
    assert worth("gpqa", "-1", "B", choices=["1", "-1"]) == 1


NUMBERS = st.decimals(-10_000, 10_000, allow_nan=False, allow_infinity=False, places=2)
SPELLINGS = (
    "{:f}",
    "{:,f}",
    "It is {:f}.",
    "-> {:f} apples",
    "${:,f}",
    r"\boxed{{{:f}}}",
    "#### {:f}\nin 3 steps",
)
SEPARATORS = (",", "{,}", r"\,", r"\!", ",\\!", "_", "\u202f")
CURRENCIES = ("", "$", r"\$", "€")


@given(NUMBERS, NUMBERS, st.sampled_from(SPELLINGS))
def test_numbers_are_equal_where_pythons_decimals_are(number, other, spelling):
    for first, second in ((number, other), (number, number), (number, -number), (number, number * 10)):
        assert worth("number", spelling.format(first), f"{second:f}") == (first == second)


@given(
    st.integers(1000, 10**12),
    st.sampled_from(SEPARATORS),
    st.sampled_from(CURRENCIES),
    st.sampled_from("-\N{MINUS SIGN}"),
)
def test_signs_and_groups_of_digits_are_read_in_every_spelling(number, separator, currency, minus):
    grouped = f"{number:,}".replace(",", separator)
    assert worth("number", f"Hence {currency}{grouped}.", str(number)) == 1
    for text in (f"{minus}{currency}{grouped}", f"{currency}{minus}{grouped}"):
        assert worth("number", f"x = {text}", str(-number)) == 1
        assert worth("number", f"x = {text}", str(number)) == 0


ARTICLES, PUNCTUATION = {"a", "an", "the"}, set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def squad(text):
    """The normalisation of the paper, word by word: SQuAD, arXiv:1606.05250, section 6."""
    kept = "".join(letter for letter in text.lower() if letter not in PUNCTUATION)
    words = ["".join(run) for _, run in groupby(kept, key=str.isalnum)]
    return "".join(" " if word in ARTICLES else word for word in words).split()


TEXTS = st.text(st.sampled_from("aAn theTHE.,-'!?()bc "), max_size=12)


@given(TEXTS, TEXTS)
def test_without_numbers_both_metrics_are_those_of_squad(answer, label):
    words, expected = squad(answer), squad(label)
    assume(expected)
    assert worth("exact_match", answer, label) == (words == expected)
    shared = sum((Counter(words) & Counter(expected)).values())
    assert worth("f1", answer, label) == pytest.approx(2 * shared / (len(words) + len(expected)))


@given(NUMBERS, NUMBERS)
def test_an_exact_match_tells_numbers_apart(number, other):
    for first, second in ((number, other), (number, number), (number, -number), (number, number * 10)):
        assert worth("exact_match", f"{first:f}", f"{second:f}") in (0, first == second)
    assert worth("exact_match", f"{number:,f}", f"{number:f}") == 1


@pytest.mark.parametrize("name", TEXT_GRADERS)
@given(st.text(), st.text())
def test_whatever_a_model_writes_is_within_the_range(name, answer, label):
    assert (-1 if name == "dapo" else 0) <= worth(name, answer, f"7 {label}", choices=[f"7 {label}"]) <= 1


@pytest.mark.parametrize("name", TEXT_GRADERS)
def test_every_reward_is_quick_and_found_by_its_name(name):
    assert is_inline(TEXT_GRADERS[name])
    assert reward_function(name) is TEXT_GRADERS[name]


async def slow(task, answer):
    """A reward of one's own."""
    return {"right": float(answer == task.answer), "short": 0.25}


async def test_an_environment_is_graded_by_the_reward_it_is_given():
    env = make("SingleTurn-v0", reward=reward_function("tests.envs.graders.test_text:slow"))
    tools = [{"name": "look", "description": "Look.", "parameters": {"type": "object"}}]
    task = Task.ask("t", "?", "yes", tools=tools)
    episode = await play(env, ScriptedAgent(iter_once("yes")), task, seed=0)
    assert episode.step_rewards == (1.25,)
    assert episode.step_rewards[0].parts == {"right": 1.0, "short": 0.25}
    assert [(tool.name, tool.description) for tool in env.tool_schemas] == [("look", "Look.")]


async def test_left_out_it_is_an_exact_match():
    env = make("SingleTurn-v0")
    assert env.tool_schemas == ()
    episode = await play(env, ScriptedAgent(iter_once("The answer")), Task.ask("t", "?", "answer"), seed=0)
    assert episode.step_rewards == (1.0,)


def iter_once(text):
    yield say(text)


@pytest.mark.parametrize(("name", "score"), [("f1", 0.5), ("exact_match", 0.0)])
async def test_a_name_is_the_grader_of_that_name(name, score):
    env = make("SingleTurn-v0", reward=name)
    task = Task.ask("t", "?", "Rio de Janeiro")
    (reward,) = (await play(env, ScriptedAgent(iter_once("Rio")), task, seed=0)).step_rewards
    assert reward == score
    assert make("SingleTurn-v0", reward=name)._grade is env._grade, "processes and connections are shared"


def test_what_is_neither_a_function_nor_a_name_is_refused_in_a_sentence():
    with pytest.raises(
        UserError, match="reward is 3; pass a function, or the name of a grader, such as 'f1'"
    ):
        SingleTurn(reward=3)
    with pytest.raises(UserError, match="no reward `f2`"):
        make("SingleTurn-v0", reward="f2")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exact", "no reward `exact`. Did you mean `exact_match`?"),
        ("jugde", "no reward `jugde`. Did you mean `judge`?"),
        ("tests.envs.graders.test_text:none", "name it `package.module:name`"),
        ("tests.envs.graders.test_text:TEXT_GRADERS", "is a dict; name a function, or an object that is one"),
        ("tests.envs.graders.test_text:iter_once", "called with a task and an answer"),
    ],
)
def test_what_is_no_reward_is_refused_in_a_sentence(name, sentence):
    with pytest.raises(ConfigError) as caught:
        reward_function(name)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("Answer: C", "C"),
        ("**Answer:** (C)", "C"),
        ("The answer is C.", "C"),
        ("the correct option would be **C**", "C"),
        ("So it is A. Answer: B. No: the answer is C", "C"),
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{(C) 5 cm}", "C"),
        (r"Answer: A, so \boxed{C}", "C"),
        ("I exclude (A) and (B), hence (C)", "C"),
        ("(c)", "C"),
        ("Some thoughts.\n\nC", "C"),
        ("Some thoughts.\n**C.**\n", "C"),
        ("C. Because it is warm", "C"),
        ("<think>Answer: A</think>\nAnswer: C", "C"),
        ("a green apple", "C"),
        ("Answer: Cats", None),
        ("A cat and a dog", None),
        ("The answer is a number", None),
        ("Because", None),
        (r"\boxed{12}", None),
        ("Answer: H", None),
        ("", None),
    ],
)
def test_a_letter_is_found_in_the_forms_that_models_write(answer, letter):
    choices = ["A red one", "The blue one", "A green apple!", "none of these"]
    found = [c for c in "ABCD" if worth("gpqa", answer, c, choices=choices)]
    assert found == ([letter] if letter else [])
    by_text = [text for text in choices if worth("gpqa", answer, text, choices=choices)]
    assert by_text == ([choices["ABCD".index(letter)]] if letter else [])


def test_without_choices_letters_go_to_j():
    assert worth("gpqa", "Answer: J", "J") == 1
    assert worth("gpqa", "Answer: K", "J") == 0
    assert worth("gpqa", "Answer: B", "B) Tuesday") == 1


# By hand, from the normalisation of Minerva (arXiv:2206.14858, appendix D).
DAPO = [
    ("Answer: 42", "42", 1),
    ("answer :42", "42", 1),
    ("Answer: 41\nAnswer: 42", "42", 1),
    ("Answer: 42\nAnswer: 41", "42", -1),
    ("The answer is 42", "42", -1),
    ("42", "42", -1),
    ("Answer: 42.", "42", -1),
    ("Answer: $42$.", "42", 1),
    ("Answer: x = 42", "42", 1),
    ("Answer: 1,000", "1000", 1),
    ("Answer: 1{,}000", "1000", 1),
    ("Answer: 1,2", "12", 1),
    ("Answer: (1,2)", "(12)", -1),
    ("Answer: 5 dollars", "5", 1),
    ("Answer: \\$5", "5", 1),
    ("Answer: 5 apples", "5", -1),
    ("Answer: 90^\\circ", "90", 1),
    ("Answer: \\text{Monday}", "Monday", 1),
    ("Answer: \\boxed{7}", "7", 1),
    ("Answer: \\frac12", "\\frac{1}{2}", 1),
    ("Answer: \\frac{1}{2}", "0.5", -1),
    ("Answer: \\sqrt3", "\\sqrt{3}", 1),
    ("Answer: a dog", "dog", 1),
    ("Answer: 42" + " " * 300, "42", -1),
    ("x" * 300 + "Answer: 42", "42", 1),
    ("Answer: $", "km", -1),
    ("Answer: km", "km", 1),
    ("", "km", -1),
]


@pytest.mark.parametrize(("answer", "label", "value"), DAPO)
def test_dapo_takes_the_last_answer_line(answer, label, value):
    reward = worth("dapo", answer, label)
    assert reward == value
    assert reward.parts == {"right": (value + 1) / 2}


HOSTILE = {
    "10 MB": "x" * 10_000_000,
    "10 MB of digits": "7" * 10_000_000,
    "deep braces": r"\boxed{" + "{" * 100_000,
    "balanced deep braces": r"\boxed{" + "{" * 100_000 + "}" * 100_001,
    "many unclosed boxes": r"\boxed{" * 100_000,
    "spaces after answer": ("answer" + " " * 500) * 200,
    "stars after answer": "answer" + "*" * 100_000,
    "fences": "```" * 100_000,
    "brackets": "[" * 100_000,
    "newlines": "\n" * 100_000,
    "half a surrogate": "Answer: \ud800",
}


@pytest.mark.parametrize("name", TEXT_GRADERS)
def test_hostile_answers_are_graded_in_time_linear_in_their_length(name):
    for answer in HOSTILE.values():
        began_s = time.process_time()
        assert worth(name, answer, "7 B" if name == "number" else "B") in (0, 1 if name == "random" else -1)
        assert time.process_time() - began_s < 2
