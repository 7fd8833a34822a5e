"""`agentrl envs new` writes a package that installs, passes its check and its tests, and trusts no index."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from agentrl import UserError
from agentrl.cli import cli, main
from agentrl.data.conversations import check_roles
from agentrl.data.messages import messages_of
from agentrl.envs.scaffold import KINDS, NewPackage, PackageOrigin, scaffold
from tests.docs.test_commands import check_arguments
from tests.fresh import run_fresh
from tests.house.source import ROOT

FENCED = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMIT = "7fd1a60b01f91b314f59955a4e4d4e80d8edf11d"
# direct_url.json in the forms of PEP 610, and what pip is to be called with.
ORIGINS = {
    "folder": ({"url": "file:///src/agentrl", "dir_info": {}}, "'agentrl[train] @ file:///src/agentrl'"),
    "editable": (
        {"url": "file:///src/agentrl", "dir_info": {"editable": True}},
        "-e '/src/agentrl[train]'",
    ),
    "blank in the path": (
        {"url": "file:///my%20src/agentrl", "dir_info": {"editable": True}},
        "-e '/my src/agentrl[train]'",
    ),
    "wheel": (
        {"url": "file:///dist/agentrl-0.1.0-py3-none-any.whl", "archive_info": {"hashes": {}}},
        "'agentrl[train] @ file:///dist/agentrl-0.1.0-py3-none-any.whl'",
    ),
    "git": (
        {
            "url": "https://localhost/lab/gyms.git",
            "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT},
            "subdirectory": "agentrl",
        },
        f"'agentrl[train] @ git+https://localhost/lab/gyms.git@{COMMIT}#subdirectory=agentrl'",
    ),
    "index": (None, "'agentrl[train]==0.1.0'"),
}


def commands(readme: str) -> list[str]:
    """The blocks of commands of a README: install and test, then train."""
    install, train = FENCED.findall(readme)
    return [install, train]


@pytest.fixture
def imported(monkeypatch):
    """Import the package of a new environment from its sources; another one may have its name later."""
    before = set(sys.modules)

    def imported(new):
        monkeypatch.syspath_prepend(str(new.folder / "src"))
        return importlib.import_module(new.package)

    yield imported
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["WordPairs", "word-pairs", "word_pairs"])
def test_every_spelling_gives_one_package_one_class_and_one_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = scaffold(name)
    assert (new.folder, new.package, new.env_class, new.env_id) == (
        Path("word_pairs"),
        "word_pairs",
        "WordPairs",
        "WordPairs-v0",
    )
    assert (tmp_path / "word_pairs" / "src" / "word_pairs" / "env.py").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_of_each_kind_passes_its_own_tests(kind, tmp_path, capsys, imported):
    main(["envs", "new", "HTTPWords2", "--kind", kind, "--dir", str(tmp_path / "mine")])
    assert "HttpWords2-v0 is in" in capsys.readouterr().out  # words are capitalised, nothing else is
    new = scaffold("HTTPWords2", tmp_path / "again", kind)
    environment = imported(new).HttpWords2
    base = {"tool": "ToolEnv", "single-turn": "SingleTurnEnv", "env": "Env"}[kind]
    assert environment.__mro__[1].__name__ == base
    path = new.folder / "tests" / "test_http_words_2.py"
    assert path.read_bytes() == (tmp_path / "mine" / "tests" / path.name).read_bytes()
    spec = importlib.util.spec_from_file_location("own_tests", path)
    own_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_tests)
    tests = [test for name, test in inspect.getmembers(own_tests) if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


@pytest.mark.parametrize("kind", KINDS)
def test_its_report_and_episodes_of_its_expert_come_with_it(kind, tmp_path, capsys, imported):
    folder = tmp_path / "mine"
    main(["envs", "new", "QuietWords", "--kind", kind, "--dir", str(folder)])
    # As if it had never been imported.
    assert "quiet_words" not in sys.modules
    report = json.loads((folder / "report.agentrl.json").read_text())
    assert (report["ok"], report["findings"]) == (True, [])
    theirs = json.loads((folder / "report.json").read_text())
    assert {result["status"] for result in theirs["results"]} == {"pass", "skip"}
    assert "RFC 008" in (folder / "report.svg").read_text()
    assert "](report.svg)" in (folder / "README.md").read_text()
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0] * 3
    tasks = imported(NewPackage(folder, "quiet_words", "QuietWords", "")).QuietWords().tasks("train")
    for row, task in zip(rows, tasks, strict=False):
        messages = messages_of(row["messages"])
        check_roles(messages)
        assert row["task"] == task.id
        assert messages[0].content == task.prompt[0].content
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["license"] in (folder / "README.md").read_text()


@pytest.mark.full
def test_uv_installs_it(tmp_path):
    new = scaffold("QuietWords", tmp_path / "mine")
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--offline", "--no-deps"]
    subprocess.run(
        [*uv, "--no-build-isolation", "--target", str(tmp_path / "site"), str(new.folder)],
        check=True,
        timeout=120,
    )
    shown = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "envs", "show", new.env_id],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert new.env_id in shown.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_as_clean_as_our_own_code(kind, tmp_path):
    new = scaffold("WordPairs", tmp_path / "mine", kind)
    for command in (["check"], ["format", "--check", "--line-length", "110"]):
        ruff = [sys.executable, "-m", "ruff", *command, "."]
        done = subprocess.run(ruff, cwd=new.folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


def test_no_index_chooses_what_agentrl_is(tmp_path):
    new = scaffold("WordPairs", tmp_path / "mine")
    project = tomllib.loads((new.folder / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert [Requirement(text).name for text in named] == ["pytest"]
    install, train = commands((new.folder / "README.md").read_text())
    installed = [line for line in (install + train).splitlines() if "pip install" in line]
    assert installed == [
        f"python -m pip install {PackageOrigin.of_this().pip_arguments()}",
        "python -m pip install -e '.[dev]'",
        f"python -m pip install {PackageOrigin.of_this().pip_arguments('train')}",
    ]
    # Where it is installed from its sources, as for these tests, they are what is installed again.
    assert f"pip install -e {shlex.quote(str(ROOT))}\n" in install


def test_the_other_commands_of_its_readme_exist(tmp_path):
    new = scaffold("WordPairs", tmp_path / "mine")
    lines = [
        line.split()
        for block in commands((new.folder / "README.md").read_text())
        for line in block.splitlines()
    ]
    own = [words for words in lines if words[0] == "agentrl"]
    assert [words[1] for words in own] == ["envs", "train", "eval"]
    for words in own:
        check_arguments(cli, words[1:])


@pytest.mark.parametrize(("direct_url", "expected"), ORIGINS.values(), ids=ORIGINS)
def test_agentrl_is_installed_from_where_pip_had_it_from(direct_url, expected):
    words = PackageOrigin(direct_url, "0.1.0").pip_arguments("train")
    assert words == expected
    (*flags, text) = shlex.split(words)
    if flags == []:
        requirement = Requirement(text)
        assert (requirement.name, requirement.extras) == ("agentrl", {"train"})
        assert (requirement.url is None) == (direct_url is None)


class Recorded:
    """A distribution with this direct_url.json."""

    version = "0.1.7"

    def __init__(self, direct_url):
        self.direct_url = direct_url

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.direct_url


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ([Recorded(None), Recorded(json.dumps(ORIGINS["wheel"][0]))], ORIGINS["wheel"][0]),
        ([], {"url": ROOT.as_uri(), "dir_info": {"editable": True}}),
        ([Recorded(None)], {"url": ROOT.as_uri(), "dir_info": {"editable": True}}),
    ],
    ids=["recorded", "not installed", "an egg-info of the source tree"],
)
def test_the_origin_is_what_pip_recorded_or_the_source_tree(installed, expected, monkeypatch):
    monkeypatch.setattr("agentrl.envs.scaffold.distributions", lambda name: installed)
    assert PackageOrigin.of_this().direct_url == expected


def test_the_origin_of_a_release_is_its_version_and_of_bare_files_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.envs.scaffold.__file__", str(tmp_path / "agentrl/envs/scaffold/__init__.py"))
    monkeypatch.setattr("agentrl.envs.scaffold.distributions", lambda name: [Recorded(None)])
    assert PackageOrigin.of_this() == PackageOrigin(None, "0.1.7")
    monkeypatch.setattr("agentrl.envs.scaffold.distributions", lambda name: [])
    with pytest.raises(UserError, match="install it with pip"):
        PackageOrigin.of_this()


@pytest.mark.parametrize(
    ("agentrl", "cause"),
    [(None, "agentrl"), (ModuleType("agentrl"), "cannot import name")],
    ids=["none", "another"],
)
def test_importing_it_without_agentrl_or_with_another_project_of_that_name_is_explained(
    agentrl, cause, tmp_path, monkeypatch, imported
):
    new = scaffold("LonelyWords", tmp_path / "mine")
    monkeypatch.setitem(sys.modules, "agentrl", agentrl)
    with pytest.raises(
        ImportError, match=r"lonely_words needs agentrl, .*; install it .* as README.md shows\."
    ) as raised:
        imported(new)
    assert cause in str(raised.value)


def test_a_missing_package_of_the_author_is_not_blamed_on_agentrl(tmp_path, imported):
    new = scaffold("BusyWords", tmp_path / "mine")
    source = new.folder / "src" / "busy_words" / "env.py"
    source.write_text(source.read_text() + "\nimport no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package'$"):
        imported(new)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_of_its_readme_install_and_test_it_in_a_fresh_environment(kind, tmp_path):
    new = scaffold("stock-room", tmp_path / "stock room", kind)
    install, _ = commands((new.folder / "README.md").read_text())
    output = run_fresh(install, new.folder, timeout_s=1200)
    assert "StockRoom-v0 passed: 0 errors, 0 warnings." in output
    assert "3 passed" in output
    (site,) = new.folder.glob(".venv/lib/python*/site-packages")
    (installed,) = distributions(name="agentrl", path=[str(site)])
    assert json.loads(installed.read_text("direct_url.json")) == {
        "url": ROOT.as_uri(),
        "dir_info": {"editable": True},
    }


@pytest.mark.parametrize("name", ["", "9lives", "a b", "über", "../x", "x" * 3 + "!", "-x"])
def test_a_bad_name_is_a_one_sentence_error(name, tmp_path):
    with pytest.raises(UserError, match="cannot be called") as caught:
        scaffold(name, tmp_path / "new")
    assert repr(name) in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_an_unknown_kind_is_a_one_sentence_error(tmp_path, capsys):
    with pytest.raises(
        UserError, match=r"no kind `singleturn` .* Did you mean `single-turn`\? Choose one of tool, "
    ):
        scaffold("WordPairs", tmp_path / "new", "singleturn")
    with pytest.raises(SystemExit) as exited:
        main(["envs", "new", "WordPairs", "--kind", "chat", "--dir", str(tmp_path / "new")])
    assert exited.value.code == 2
    assert "single-turn" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", ["json", "class", "Task", "ToolEnv", "calculator", "agentrl", "single-turn-env"]
)
def test_a_name_that_is_taken_is_a_one_sentence_error(name, tmp_path):
    with pytest.raises(UserError, match="choose another name"):
        scaffold(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_not_changed(tmp_path):
    with pytest.raises(UserError, match="exists already"):
        scaffold("WordPairs", tmp_path)
    assert list(tmp_path.iterdir()) == []
