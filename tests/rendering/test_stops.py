"""What ends a turn beside the dialect's own ends: the strings and the token ids of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agentrl.assembly.policy import build_renderer
from agentrl.envs import Chat, Tags
from agentrl.errors import ConfigError
from agentrl.rendering.config import RenderingConfig
from tests.rendering.real_templates import real_tokenizer


def renderer_of(dialect, **settings):
    source = SimpleNamespace(tokenizer=real_tokenizer("qwen3"))
    return build_renderer(source, dialect, RenderingConfig.model_validate(settings))


@pytest.mark.parametrize("dialect", [Chat(), Tags()])
def test_a_turn_ends_at_those_of_the_dialect_and_at_those_of_the_run(dialect):
    own = renderer_of(dialect).stops(())
    both = renderer_of(dialect, rollout_stop=["</search>", "\n\n"], rollout_stop_token_ids=[7, 3]).stops(())
    assert both.strings == (*own.strings, "</search>", "\n\n")
    assert both.token_ids == tuple(sorted({*own.token_ids, 3, 7}))


@pytest.mark.parametrize(
    ("text", "strings"),
    [("</search>", ("</search>",)), ('["</a>", "\\n"]', ("</a>", "\n")), ("a, b", ("a, b",))],
)
def test_a_flag_is_one_string_or_a_list_in_json(text, strings):
    config = RenderingConfig.model_validate({"rollout_stop": text, "rollout_stop_token_ids": "1,2"})
    assert (config.rollout_stop, config.rollout_stop_token_ids) == (strings, (1, 2))


@pytest.mark.parametrize("text", ["[oops", "", '["a", ""]', "[1]"])
def test_what_is_no_list_of_strings_is_refused(text):
    with pytest.raises(ValueError, match="rollout_stop"):
        RenderingConfig.model_validate({"rollout_stop": text})


def test_an_id_that_the_tokenizer_lacks_is_refused():
    with pytest.raises(ConfigError, match="rollout_stop_token_ids has 10000000, and the tokenizer has"):
        renderer_of(Chat(), rollout_stop_token_ids=[10_000_000])
