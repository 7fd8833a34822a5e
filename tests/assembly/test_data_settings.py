"""The settings of data, as files and flags give them."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from tests.assembly.test_every_setting import config_of


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"apply_chat_template": True}, {"dialect": "chat"}),
        ({"apply_chat_template": False}, {}),
        ({"prompt_data": "x", "prompt_key": "question"}, {"prompt_data": "x", "input_key": "question"}),
        ({"prompt_data": '{"x": 2}'}, {"prompt_data": {"x": 2.0}}),
        ({"prompt_data": '["x", "y"]'}, {"prompt_data": ("x", "y")}),
    ],
)
def test_what_data_is_called_elsewhere_is_the_setting_that_it_stands_for(settings, same):
    assert config_of(settings) == config_of(same)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt_data": '{"x": 0}'}, "the weight of 'x' is 0, not a number above 0"),
        ({"prompt_data": "[3]"}, "[3] is no path, no list of paths and no table of path and weight"),
        ({"eval_prompt_data": 3}, "3 is no path"),
        ({"prompt_data": "[x"}, "'[x' is neither a path nor JSON"),
        ({"rollout_max_prompt_len": 0}, "rollout_max_prompt_len"),
    ],
)
def test_a_mistake_in_data_is_one_sentence(settings, says):
    with pytest.raises(ConfigError) as caught:
        config_of(settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
