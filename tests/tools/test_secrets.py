"""Secrets in the arguments of tools: refused in plain text, written as names, read when a server starts."""

from __future__ import annotations

import pytest

from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import load_config
from agentrl.config import by_section, parse, write_toml
from agentrl.errors import ConfigError
from agentrl.tools import make_tool, register_tool, registry
from agentrl.tools.mcp import McpTools, toolkit
from agentrl.tools.secrets import literal_secret, with_variables

VALUE = "hunter2-in-plain-text"


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"env": {"API_TOKEN": VALUE}}, "env.API_TOKEN"),
        ({"env": {"PATH": "/bin", "OPENAI_API_KEY": VALUE}}, "env.OPENAI_API_KEY"),
        ({"headers": {"Authorization": f"Bearer {VALUE}"}}, "headers.Authorization"),
        ({"headers": {"X-Api-Key": VALUE}}, "headers.X-Api-Key"),
        ({"api_key": VALUE}, "api_key"),
        ({"db": {"password": VALUE}}, "db.password"),
        ({"env": {"PATH": "/bin", "TOKEN": "$TOKEN"}}, None),
        ({"headers": {"Authorization": "Bearer ${TOKEN}"}}, None),
        ({"max_tokens": 5, "stop_token": "</s>", "sort_key": "name", "api_key": ""}, None),
    ],
)
def test_a_secret_is_known_by_its_key(arguments, path):
    assert literal_secret(arguments) == path


def test_a_secret_in_plain_text_is_refused_in_one_sentence_without_it():
    kwargs = {"mcp": {"command": "true", "env": {"API_TOKEN": VALUE}}}
    settings = {"env": "HopSearch-v0", "tools": "mcp", "tool_kwargs": kwargs}
    with pytest.raises(ConfigError, match=r'tool_kwargs.mcp.env.API_TOKEN is a secret.*"\$NAME"') as refused:
        parse(RunConfig, by_section(RunConfig, settings), source="the settings given")
    assert VALUE not in str(refused.value)


def test_what_a_run_writes_has_the_name_and_the_server_gets_the_value(tmp_path, monkeypatch):
    monkeypatch.setenv("REAL_TOKEN", VALUE)
    kwargs = {"mcp": {"command": "true", "env": {"API_TOKEN": "$REAL_TOKEN", "PATH": "/bin"}}}
    settings = {"env": "HopSearch-v0", "tools": "mcp", "tool_kwargs": kwargs}
    config = parse(RunConfig, by_section(RunConfig, settings), source="the settings given")
    write_toml(config, tmp_path / "config.toml")
    text = (tmp_path / "config.toml").read_text()
    assert "$REAL_TOKEN" in text
    assert VALUE not in text
    again = load_config(tmp_path / "config.toml", {})
    tool = make_tool("mcp", **again.env.tool_kwargs["mcp"])
    assert isinstance(tool, McpTools)
    assert VALUE not in repr(vars(tool))
    started = []
    monkeypatch.setattr(
        "agentrl.tools.mcp.connection.connect", lambda server, **_: started.append(server) or toolkit
    )
    tool._connect()
    assert started[0].env == {"API_TOKEN": VALUE, "PATH": "/bin"}
    assert VALUE not in repr(started)


def test_a_tool_of_ones_own_gets_the_value_of_a_secret_by_its_key(monkeypatch):
    monkeypatch.setenv("REAL_TOKEN", VALUE)
    made = []

    def factory(api_key: str, title: str) -> object:
        made.append((api_key, title))
        return McpTools(command="true")

    monkeypatch.setattr(registry, "_registered", {})
    register_tool("own", factory)
    make_tool("own", api_key="$REAL_TOKEN", title="$REAL_TOKEN")
    assert made == [(VALUE, "$REAL_TOKEN")]


@pytest.mark.parametrize(
    ("value", "sentence"), [("$NOT_SET_AT_ALL", "NOT_SET_AT_ALL"), ("5 $", "write \\$\\$")]
)
def test_a_variable_that_is_not_set_is_one_sentence(value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        with_variables({"TOKEN": value})
    assert with_variables({"A": "5 $$", "B": "plain"}) == {"A": "5 $", "B": "plain"}
