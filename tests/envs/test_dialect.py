"""A dialect is two tags that can be told apart."""

from __future__ import annotations

import pytest

from agentrl import Tags
from agentrl.envs.dialect import closing, opening


def test_tags_are_written_with_angle_brackets():
    assert (opening("search"), closing("search")) == ("<search>", "</search>")


@pytest.mark.parametrize("name", ["", "two words", "<x>", "1st", "naïve", "a-b", "x\n"])
def test_a_name_that_cannot_be_a_tag_is_refused(name):
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        Tags(result=name)
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        Tags(answer=name)


def test_one_tag_for_two_things_is_refused():
    with pytest.raises(ValueError, match="two different tags"):
        Tags(result="same", answer="same")


def test_all_names_of_an_environment_are_its_tools_and_both_tags():
    assert Tags("information", "answer").names(["search"]) == ("search", "information", "answer")
