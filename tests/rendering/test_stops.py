"""What ends a turn beside the dialect's own ends: the strings and the token ids of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agentrl import ToolEnv
from agentrl.assembly.policy import build_renderer, dialect_of
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


class Tagged(ToolEnv):
    """Reads a tag in the text of a chat turn."""

    dialect = Chat(stop=("</search>", "</answer>"))

    def tasks(self, split):
        return []

    def reward(self, task, answer):
        return 0.0


@pytest.mark.parametrize(
    ("chosen", "of_run"), [({}, []), ({"dialect": "chat"}, []), ({}, ["</answer>", "\n\n"])]
)
def test_a_turn_ends_at_those_of_the_environment_too(chosen, of_run):
    dialect = dialect_of(Tagged(), RenderingConfig.model_validate(chosen))
    plain, stops = renderer_of(Chat()).stops(()), renderer_of(dialect, rollout_stop=of_run).stops(())
    assert stops.strings == (*plain.strings, "</search>", "</answer>", *of_run[1:])
    assert stops.token_ids == plain.token_ids


def test_another_dialect_has_no_stops_of_the_environment():
    inline = RenderingConfig.model_validate({"dialect": "inline"})
    assert renderer_of(dialect_of(Tagged(), inline)).stops(()) == renderer_of(Tags()).stops(())


@pytest.mark.parametrize("stop", ["</search>", ("",), (1,), 3])
def test_stops_that_are_no_texts_are_refused(stop):
    with pytest.raises(ValueError, match="stop is a tuple of texts"):
        Chat(stop=stop)


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
