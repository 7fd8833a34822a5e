"""Verifiable instructions: each of IFEval's 25, followed and not."""

from __future__ import annotations

import time

import pytest

from agentrl import Task, UserError
from agentrl.envs.graders import make_grader
from agentrl.envs.graders.ifeval import INSTRUCTIONS
from agentrl.errors import GradingError, MissingExtraError
from tests.envs.graders.test_text import HOSTILE

LOREM = "The cat sat on the mat and looked at the birds in the garden for a long time."

# By hand, from the definitions of arXiv:2311.07911.
TABLE = [
    ("keywords:existence", {"keywords": ["cat", "mat"]}, ["A Cat on a MAT"], ["A cat", ""]),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "at least"},
        ["go, Go!", "goes and going"],
        ["go", "a"],
    ),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "less than"},
        ["go", "a"],
        ["go go", "go go go"],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["sun"]}, ["sunny day"], ["the Sun.", "sun"]),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        ["Qq", "quiet quay"],
        ["q", "a"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Der Hund schläft im Garten und die Katze schaut ihm dabei zu."],
        [LOREM],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", "Dr. Who came. He saw. He left."],
        ["One. Two.", "Mr. Smith met Dr. Who", "a"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["Only one sentence here, with 3.5 cats."],
        ["One. Two"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "a *** b", "***a***b"],
        ["a\n\nb", "a", "a***b***c", "a*** ***b"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["one two three", "a-b c"],
        ["one two", "..."],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Hello"},
        ["a b\n\nhello, you", 'a\n\n"Hello" there'],
        ["hello\n\na", "a\n\nhello\n\nb", "a hello"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] lives at [address]", "[a][b]"],
        ["[name]", "[a\nb] [c]", "]a["],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Text.\nP.S. More", "p. s. more"],
        ["PS more", "p.p.s"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a P.P.S b", "p. p. s"], ["P.S. a"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "a\n\n* b\n- c"],
        ["* a", "* a\n* b\n* c", "** a\n** b"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well: My answer is maybe."],
        ["My answer is yes", "yes"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b*", "**a** **b**"],
        ["*a*", "** and **", "*a\nb* *c*", "a"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1", "SECTION A SECTION B"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', '```json\n{"a": 1}\n```', "[1]"],
        ["{a: 1}", "a", "[" * 9000],
    ),
    ("detectable_format:title", {}, ["<<A title>>\ntext"], ["<A title>", "<<>>", "<< >>", "<<a\nb>>"]),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb"],
        ["a", "a******a", "a******b******c", "a************b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say it."},
        ["say it. I said it", " Say it."],
        ["I say it.", ""],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "The End."},
        ["Well. the end.", '"It. The End."'],
        ["The End. No", "a"],
    ),
    ("startend:quotation", {}, ['"quoted"', ' "a" '], ["quoted", '"', '"a']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NO and NO!", "I AM here"],
        ["NO more", "No No"],
    ),
    (
        "change_case:english_capital",
        {},
        [LOREM.upper()],
        [LOREM, "DER HUND SCHLÄFT IM GARTEN UND DIE KATZE SCHAUT ZU."],
    ),
    (
        "change_case:english_lowercase",
        {},
        [LOREM.lower()],
        [LOREM, "der hund schläft im garten und die katze schaut zu."],
    ),
    ("punctuation:no_comma", {}, ["no comma"], ["a, b", ","]),
]


def graded(answer, *instructions, **settings):
    """The grade of an answer to a task with these instructions, each a name and its arguments."""
    names, arguments = [name for name, _ in instructions], [table for _, table in instructions]
    task = Task.ask("t", "?", None, instruction_id_list=names, kwargs=arguments)
    return make_grader("ifeval", **settings)(task, answer)


@pytest.mark.parametrize(("name", "arguments", "followed", "broken"), TABLE)
def test_an_instruction_is_followed_or_not(name, arguments, followed, broken):
    # The columns of the dataset hold every argument of any instruction, None where it has none.
    padded = {**dict.fromkeys(("num_words", "relation", "language", "keyword")), **arguments}
    assert [answer for answer in followed if graded(answer, (name, padded)) != 1] == []
    assert [answer for answer in broken if graded(answer, (name, padded)) != 0] == []


def test_every_instruction_is_in_the_table():
    assert {name for name, *_ in TABLE} == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25


NO_COMMA, QUOTED = ("punctuation:no_comma", {}), ("startend:quotation", {})


def test_all_instructions_count_or_their_share():
    reward = graded('"a, b"', NO_COMMA, QUOTED)
    assert (reward, reward.parts) == (0, {"instructions": 0.5})
    assert graded('"a b"', NO_COMMA, QUOTED) == 1
    assert graded('"a, b"', NO_COMMA, QUOTED, score="share") == 0.5


def test_reasoning_is_not_read_and_an_empty_answer_follows_nothing():
    assert graded("<think>a, b</think> a b", NO_COMMA) == 1
    assert graded("a, b</think>  ", NO_COMMA) == 0
    assert graded("", NO_COMMA) == 0


@pytest.mark.parametrize(
    "answer", ['Sure, here:\n"a b"', '"a b"\nI hope, it helps', 'Sure:\n"a b"\nBye, now', '*"a b"*']
)
def test_a_loose_grade_forgives_first_and_last_lines_and_asterisks(answer):
    assert graded(answer, NO_COMMA, QUOTED) == 0
    assert graded(answer, QUOTED, loose=True) == 1


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "task t has no metadata `instruction_id_list`"),
        ({"instruction_id_list": []}, "task t has no metadata"),
        (
            {"instruction_id_list": ["punctuation:no_coma"]},
            "unknown instruction `punctuation:no_coma`. Did you mean",
        ),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": []}, "1 instructions and 0 `kwargs`"),
        ({"instruction_id_list": ["keywords:existence"]}, "`keywords` is None, not a list"),
        (
            {"instruction_id_list": ["keywords:frequency"], "kwargs": [{"keyword": "a", "frequency": 1}]},
            "`relation` is None; write `less than` or `at least`",
        ),
    ],
)
def test_a_task_that_cannot_be_graded_is_a_typed_failure(metadata, sentence):
    with pytest.raises(GradingError) as caught:
        make_grader("ifeval")(Task.ask("t", "?", None, **metadata), "an answer")
    assert sentence in str(caught.value)
    assert caught.value.kind == "invalid"


def test_without_langdetect_a_language_needs_the_extra(monkeypatch):
    monkeypatch.setattr("agentrl.runtime.extras.find_spec", lambda module: None)
    with pytest.raises(MissingExtraError, match=r"needs langdetect: pip install 'agentrl\[ifeval\]'"):
        graded("a", ("language:response_language", {"language": "en"}))
    assert graded("a", NO_COMMA) == 1


def test_a_bad_setting_is_one_sentence():
    with pytest.raises(UserError, match="grader `ifeval`: `score` = 'most' does not fit"):
        make_grader("ifeval", score="most")


def test_hostile_answers_are_checked_in_time_linear_in_their_length():
    arguments = {key: value for _, table, *_ in TABLE for key, value in table.items()}
    instructions = [
        (name, arguments) for name in INSTRUCTIONS if "language" not in name and "english" not in name
    ]
    for answer in HOSTILE.values():
        began_s = time.process_time()
        graded(answer, *instructions, loose=True)
        assert time.process_time() - began_s < 5
