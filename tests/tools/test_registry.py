"""Tools by name; a wrong name or argument is a one-sentence error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from agentrl import UserError
from agentrl.errors import UnknownToolError
from agentrl.tools import JSON, Tool, Toolkit, calculate, make_tool, register_tool, registry, tool_names
from agentrl.tools.mcp import McpTools


def forecast(city: str) -> str:
    """Tomorrow's weather."""
    return f"sun over {city}"


@dataclass
class Notes(Toolkit):
    """Keeps notes."""

    pages: int
    titles: Sequence[str] = ()
    on_full: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.pages < 1:
            raise ValueError(f"pages must be at least 1, got {self.pages}")

    @asynccontextmanager
    async def episode(self):
        yield (Tool.of(forecast),)


def make_notes(pages: int = 2) -> Toolkit:
    """Notes of a usual size."""
    return Notes(pages)


def make_nothing() -> Toolkit:
    """Forgets to return it."""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def offer(monkeypatch):
    def only(**points):
        offered = [EntryPoint(name, value, "agentrl.tools") for name, value in points.items()]
        monkeypatch.setattr(
            registry, "entry_points", lambda group: offered if group == "agentrl.tools" else ()
        )

    return only


def test_the_tools_of_the_gym_have_names_and_naming_them_imports_nothing():
    assert {"calculator", "mcp", "python", "search", "search-http", "shell"} <= set(tool_names())
    assert make_tool("calculator") is calculate
    toolkit = make_tool("mcp", command="sh", args=["-c", "true"], only=["x"])
    assert isinstance(toolkit, McpTools)
    assert (toolkit.args, toolkit.stateful) == (["-c", "true"], True)


def test_no_library_of_a_tool_is_imported_for_its_name():
    code = (
        "import sys, agentrl.tools.mcp as m; from agentrl.tools import make_tool, tool_names; tool_names(); "
        "make_tool('mcp', command='sh'); print(*{name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) & {"mcp", "mcp_types", "anyio", "httpx2", "torch"} == set()


def test_a_function_a_toolkit_and_what_makes_one_can_be_registered():
    ready = Notes(1)
    for name, target in (("f", forecast), ("ready", ready), ("class", Notes), ("factory", make_notes)):
        register_tool(name, target)
    assert make_tool("f") is forecast
    assert make_tool("ready") is ready
    assert make_tool("class", pages=3) == Notes(3)
    assert make_tool("class", pages=3) is not make_tool("class", pages=3)
    assert make_tool("factory") == Notes(2)
    assert set(tool_names()) >= {"f", "ready", "class", "factory"}
    register_tool("f", Notes)
    assert make_tool("f", pages=1) == ready


@pytest.mark.parametrize(
    "returned",
    [str, dict, "dict", "dict[str, int]", list[int], "int | None", int | None, None, "None", JSON, "JSON"],
)
def test_a_function_that_returns_plain_data_is_a_tool_and_no_factory(returned):
    def count(word: str):
        """Count."""
        return len(word)

    count.__annotations__["return"] = returned
    register_tool("count", count)
    assert make_tool("count") is count


@pytest.mark.parametrize("returned", [Notes, "Notes", "Notes | None"])
def test_a_function_that_returns_a_toolkit_is_a_factory(returned):
    def notes():
        return Notes(4)

    notes.__annotations__["return"] = returned
    register_tool("notes", notes)
    assert make_tool("notes") == Notes(4)


def test_packages_offer_tools_and_are_imported_at_their_first_use(offer, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_tools.py").write_text(
        "def shout(word: str) -> str:\n    'Louder.'\n    return word.upper()"
    )
    (tmp_path / "torn_tools.py").write_text("import no_such_module")
    offer(
        shout="their_tools:shout", torn="torn_tools:x", gone="their_tools:whisper", odd="their_tools:__name__"
    )
    assert tool_names() == ["gone", "odd", "shout", "torn"]
    assert "their_tools" not in sys.modules
    assert make_tool("shout")("hey") == "HEY"
    with pytest.raises(UnknownToolError, match="`torn` is offered by torn_tools:x, which cannot be imported"):
        make_tool("torn")
    with pytest.raises(UnknownToolError, match=r"`gone` is offered by .*mend or reinstall"):
        make_tool("gone")
    with pytest.raises(UnknownToolError, match="`odd` is 'their_tools', which is no tool"):
        make_tool("odd")


def test_what_was_registered_goes_before_what_is_offered(offer):
    offer(calculator="agentrl.tools:calculate")
    register_tool("calculator", forecast)
    assert make_tool("calculator") is forecast


def test_a_path_names_an_unregistered_tool():
    assert make_tool("agentrl.tools:calculate") is calculate
    for path in ("agentrl.tools:nothing", "no_such_module:x", ":x", "agentrl.tools:"):
        with pytest.raises(UnknownToolError, match=r"no tool `.*`: .*name it `package.module:name`"):
            make_tool(path)


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("calculater", {}, r"no tool `calculater`\. Did you mean `calculator`\? Installed: calculator, "),
        ("calculator", {"digits": 3}, r"tool `calculator` takes no arguments, got \{'digits': 3\}"),
        ("notes", {}, r"tool `notes`: missing a required argument: 'pages'; it takes pages"),
        ("notes", {"pages": 1, "size": 2}, "tool `notes`: there is no argument `size`. It takes pages."),
        ("notes", {"pagse": 1}, "Did you mean `pages`?"),
        (
            "notes",
            {"pages": "many"},
            "tool `notes`: `pages` = 'many' does not fit: input should be a valid int",
        ),
        ("notes", {"pages": 1, "titles": 3}, "tool `notes`: `titles` = 3 does not fit"),
        ("notes", {"pages": 0}, r"tool `notes` cannot be made of \{'pages': 0\}: pages must be at least 1"),
        ("nothing", {}, "tool `nothing` makes None, which is neither a typed function nor a Toolkit"),
    ],
)
def test_a_wrong_name_or_argument_is_a_one_sentence_error(name, kwargs, sentence):
    register_tool("notes", Notes)
    register_tool("nothing", make_nothing)
    with pytest.raises(UserError, match=sentence) as caught:
        make_tool(name, **kwargs)
    assert "\n" not in str(caught.value)


def test_what_no_run_file_can_spell_is_passed_on():
    register_tool("notes", Notes)
    assert make_tool("notes", pages=1, on_full=print).on_full is print


@pytest.mark.parametrize("name", ["", "two words", "a:b", "a/b"])
def test_a_name_that_no_run_file_could_use_is_refused(name):
    with pytest.raises(UserError, match="made of letters, digits"):
        register_tool(name, forecast)


def test_a_tool_may_take_an_argument_called_name():
    assert make_tool("python", name="code").schema.name == "code"
    assert make_tool("shell", name="bash").schema.name == "bash"
