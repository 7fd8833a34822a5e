"""`agentrl tools`, and tools by name in a run."""

from __future__ import annotations

import json
import sys
from contextlib import asynccontextmanager

import pytest

from agentrl import ScriptedAgent, UserError, call, play, say
from agentrl.assembly.config import RunConfig
from agentrl.assembly.env import env_factory
from agentrl.assembly.load import load_config
from agentrl.cli import main
from agentrl.config import read_toml, write_toml
from agentrl.errors import ConfigError, UnknownToolError
from agentrl.tools import Tool, Toolkit, register_tool, registry
from agentrl.tools.config import ToolChoice
from tests.tools.mcp.watching import RAW
from tests.worlds import ASK


class Notebook(Toolkit):
    """Remembers what it is told, for one episode."""

    num_made = 0

    def __init__(self) -> None:
        Notebook.num_made += 1

    @asynccontextmanager
    async def episode(self):
        notes: list[str] = []

        def note(text: str) -> str:
            """Write something down."""
            notes.append(text)
            return " ".join(notes)

        yield (Tool.of(note),)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(Notebook, "num_made", 0)
    register_tool("notebook", Notebook)


def printed(capsys, *arguments):
    main(["tools", *arguments])
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert left.value.code == 2
    return capsys.readouterr().err


def test_the_list_says_what_is_installed_and_what_each_is_made_with(capsys, monkeypatch):
    rows = {row["name"]: row for row in json.loads(printed(capsys, "list", "--json"))}
    assert rows["calculator"]["description"] == "Compute an arithmetic expression exactly."
    assert rows["calculator"]["arguments"] == {}
    assert rows["mcp"]["arguments"]["start_timeout_s"] == "float = 20.0"
    monkeypatch.setenv("COLUMNS", "120")
    out = printed(capsys, "list")
    assert [name for name in rows if name not in out] == []


def test_one_broken_tool_does_not_hide_the_others(capsys, monkeypatch):
    points = registry.entry_points(group="agentrl.tools")
    torn = type(next(iter(points)))("torn", "no_such_module:x", "agentrl.tools")
    monkeypatch.setattr(registry, "entry_points", lambda group: [*points, torn])
    rows = {row["name"]: row for row in json.loads(printed(capsys, "list", "--json"))}
    assert "cannot be imported" in rows["torn"]["description"]
    assert rows["calculator"]["kind"] == "function"


def test_show_says_what_the_model_is_told(capsys):
    (schema,) = json.loads(printed(capsys, "show", "calculator", "--json"))["schemas"]
    assert schema["name"] == "calculate"
    assert schema["parameters"]["required"] == ["expression"]
    (schema,) = json.loads(printed(capsys, "show", "notebook", "--json"))["schemas"]
    assert schema["description"] == "Write something down."
    facts = json.loads(printed(capsys, "show", "mcp", "--json"))
    assert facts["schemas"].startswith("depends on its arguments: an MCP server has either")
    assert "reached" in facts["description"]
    kwargs = json.dumps({"command": sys.executable, "args": [RAW], "only": ["remember"]})
    (schema,) = json.loads(printed(capsys, "show", "mcp", "--json", "--tool-kwargs", kwargs))["schemas"]
    assert schema["parameters"]["properties"] == {"text": {"type": "string"}}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("show", "calculater"), "Did you mean `calculator`?"),
        (("show", "mcp", "--tool-kwargs", '{"args": 3}'), "`args` = 3 does not fit"),
        (("show", "mcp", "--tool-kwargs", '{"command": "no-such"}'), "there is no program `no-such`"),
        (("show", "mcp", "--tool-kwargs", "[1]"), "--tool-kwargs takes a JSON object"),
    ],
)
def test_bad_input_is_one_sentence(capsys, arguments, sentence):
    output = refused(capsys, "tools", *arguments)
    assert sentence in output
    assert output.count("\n") == 1


def test_a_run_file_and_flags_name_tools_and_the_kept_config_is_equal(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        '[env]\ntools = ["calculator", "mcp"]\n[env.tool_kwargs.mcp]\ncommand = "sh"\nargs = ["-c"]\n'
    )
    config = load_config(run_file, {})
    assert config.env.tools == ("calculator", "mcp")
    write_toml(config, tmp_path / "kept.toml")
    assert RunConfig.model_validate(read_toml(tmp_path / "kept.toml")) == config
    flags = {"tools": "calculator, mcp", "tool_kwargs": {"mcp": {"command": "sh", "args": ["-c"]}}}
    assert load_config(None, flags).env == config.env


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"tool_kwargs": {"mpc": {}}, "tools": "mcp"},
            r"arguments for `mpc`, .* Did you mean `mcp`\? Add it",
        ),
        ({"tools": "mcp,mcp"}, "tools names `mcp` twice"),
        ({"tools": [3]}, "`env.tools.0` = 3 does not fit"),
    ],
)
def test_a_choice_of_tools_that_makes_no_sense_is_refused_at_once(flags, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, flags)


async def test_a_tool_is_made_once_for_all_episodes_of_a_run_and_remembers_for_each_alone():
    make = env_factory("tests.worlds:Parrot", {}, tools=ToolChoice(tools=("notebook", "calculator")))

    def script(word):
        assert (yield call("note", text=word)) == word
        assert (yield call("calculate", expression="1/3+1/6")) == "1/2"
        yield say("3" if (yield call("note", text=word)) == f"{word} {word}" else "?")

    episodes = [await play(make(), ScriptedAgent(script(word)), ASK) for word in "ab"]
    assert [episode.step_rewards[-1] for episode in episodes] == [1.0, 1.0]
    assert Notebook.num_made == 1


def test_what_cannot_take_tools_and_what_is_no_tool_is_told_before_anything_starts(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"Talk is no ToolEnv, so it takes no more tools; leave out tools = "):
        env_factory("tests.worlds:Talk", {}, tools=ToolChoice(tools=("calculator",)))
    with pytest.raises(UnknownToolError, match=r"Did you mean `calculator`\?"):
        env_factory("tests.worlds:Parrot", {}, tools=ToolChoice(tools=("calculater",)))
    small = ("--num-rollout", "1", "--env", "tests.worlds:Parrot")
    output = refused(capsys, "train", *small, "--tools", "calculater")
    assert "no tool `calculater`" in output
    assert not list(tmp_path.rglob("metrics.jsonl"))
