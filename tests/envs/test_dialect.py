"""A dialect needs two different tags."""

from __future__ import annotations

import pytest

from agentrl import Tags
from agentrl.envs import Chat
from agentrl.envs.dialect import closing, opening, tags_of


def test_tags_are_written_with_angle_brackets():
    assert (opening("search"), closing("search")) == ("<search>", "</search>")


@pytest.mark.parametrize("name", ["", "two words", "<x>", "1st", "naïve", "a-b", "x\n"])
def test_a_name_that_cannot_be_a_tag_is_refused(name):
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        Tags(result=name)
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        Tags(answer=name)


def test_equal_tags_for_result_and_answer_are_refused():
    with pytest.raises(ValueError, match="two different tags"):
        Tags(result="same", answer="same")


def test_all_names_of_an_environment_are_its_tools_and_both_tags():
    assert Tags("information", "answer").names(["search"]) == ("search", "information", "answer")


def test_an_answer_of_the_world_is_formatted_with_the_frame() -> None:
    assert Tags("facts").framed("x {} y") == "<facts> x {} y</facts>"
    assert Tags.search_r1().framed("Doc 1(Title: t) a") == (
        "\n\n<information>Doc 1(Title: t) a</information>\n\n"
    )
    assert Tags.retool().framed("42") == "\n\n<interpreter>\n42\n</interpreter>\n\n"


@pytest.mark.parametrize(
    "frame", ["{}", "<facts>", "<result>{}</result>", "{}<facts></facts>", "<facts></facts>{}"]
)
def test_a_frame_holds_the_words_between_its_own_tags(frame: str) -> None:
    with pytest.raises(ValueError, match="the frame must hold <facts>"):
        Tags("facts", frame=frame)


def test_the_chat_dialect_is_parsed_by_tags_in_plain_text() -> None:
    assert tags_of(Chat()) == Tags()
    assert tags_of(Tags("facts")) == Tags("facts")
    assert Chat().names(["look"]) == ("look",)
