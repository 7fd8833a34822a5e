"""Secrets in arguments: refused in plain text, written as names, read by the tool or server that has them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from agentrl import SingleTurnEnv, Task
from agentrl.assembly import rewards
from agentrl.assembly.config import RunConfig
from agentrl.assembly.env import run_env_factory
from agentrl.assembly.load import load_config
from agentrl.config import by_section, parse, write_toml
from agentrl.envs.registry import path_of
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.tools import make_tool, register_tool, registry
from agentrl.tools.mcp import McpTools, toolkit
from agentrl.tools.mcp.server import with_variables as with_server_variables
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
        ({"api_key": "5 $ a day"}, "api_key"),
        ({"servers": [{"url": "a"}, {"password": VALUE}]}, "servers[1].password"),
        ({"api_keys": ["$KEY", VALUE]}, "api_keys[1]"),
        ({"args": ["--verbose", "--token", VALUE]}, "args[2]"),
        ({"args": [f"--api-key={VALUE}"]}, "args[0]"),
        ({"args": ["-e", f"GITHUB_TOKEN={VALUE}"]}, "args[1]"),
        ({"dsn": f"postgres://me:{VALUE}@host/db"}, "dsn"),
        ({"args": ["--db", f"postgres://me:{VALUE}@host/db"]}, "args[1]"),
        ({"args": ["--token", "$TOKEN", "--token=$TOKEN", "--token", "--json", "secret"]}, None),
        ({"url": "ssh://me@host/a:b", "dsn": "postgres://me:$PASSWORD@host/db"}, None),
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


class Rented(SingleTurnEnv):
    """A world behind a key."""

    def __init__(self, api_key: str, db: Mapping[str, str], title: str = "") -> None:
        self.made_with = (api_key, dict(db), title)

    def tasks(self, split):
        return [Task("question", "answer")]

    def grade(self, task, answer):
        return 1.0


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("env_kwargs", {"api_key": VALUE}),
        ("env_kwargs", {"headers": {"Authorization": VALUE}}),
        ("env_kwargs", {"servers": [{"password": VALUE}]}),
        ("reward_kwargs", {"api_key": VALUE}),
        ("group_reward_kwargs", {"api_key": VALUE}),
    ],
)
@pytest.mark.parametrize("kind", [RunConfig, EvalConfig])
def test_environments_and_graders_are_refused_them_too(kind, setting, values):
    named = {"env": "HopSearch-v0"} if kind is RunConfig else {}
    with pytest.raises(ConfigError, match=rf"{setting}\..* is a secret") as refused:
        parse(kind, by_section(kind, {**named, setting: values}), source="the settings")
    assert VALUE not in str(refused.value)


def test_an_environment_gets_the_value_and_the_run_writes_the_name(tmp_path, monkeypatch):
    monkeypatch.setenv("REAL_TOKEN", VALUE)
    kwargs = {"api_key": "$REAL_TOKEN", "db": {"password": "${REAL_TOKEN}!"}, "title": "$REAL_TOKEN"}
    path = path_of(Rented)
    config = parse(RunConfig, by_section(RunConfig, {"env": path, "env_kwargs": kwargs}), source="settings")
    write_toml(config, tmp_path / "config.toml")
    assert VALUE not in (tmp_path / "config.toml").read_text()
    again = load_config(tmp_path / "config.toml", {})
    made = run_env_factory(again, {})()
    assert made.made_with == (VALUE, {"password": f"{VALUE}!"}, "$REAL_TOKEN")
    monkeypatch.delenv("REAL_TOKEN")
    with pytest.raises(ConfigError, match="`api_key` names the environment variable REAL_TOKEN"):
        run_env_factory(again, {})


def test_a_grader_gets_the_value(monkeypatch):
    monkeypatch.setenv("REAL_TOKEN", VALUE)
    made = []
    monkeypatch.setattr(rewards, "make_grader", lambda name, **settings: made.append((name, settings)))
    rewards.reward_function("judge", {"api_key": "$REAL_TOKEN", "url": "$REAL_TOKEN"})
    assert made == [("judge", {"api_key": VALUE, "url": "$REAL_TOKEN"})]


def test_a_server_gets_the_secrets_of_its_command_line_when_it_starts(monkeypatch):
    monkeypatch.setenv("REAL_TOKEN", VALUE)
    tool = McpTools(
        command="true", args=["--token", "$REAL_TOKEN", "-c", "echo $REAL_TOKEN", "KEY=$REAL_TOKEN"]
    )
    started = with_server_variables(tool._server)
    assert list(started.args) == ["--token", VALUE, "-c", "echo $REAL_TOKEN", f"KEY={VALUE}"]
    assert VALUE not in repr(started)
