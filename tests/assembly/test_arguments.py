"""What Python callers pass becomes what a run file holds."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from agentrl.assembly.arguments import env_name, model_path, plain_settings, run_path
from agentrl.envs import find
from agentrl.errors import UnknownEnvError
from tests.flow.worlds import Bandit


def test_a_class_has_the_name_by_which_a_run_file_finds_it():
    assert env_name(Bandit) == "tests.flow.worlds:Bandit"
    assert find("tests.flow.worlds:Bandit").env_class is Bandit
    assert env_name("HopSearch-v0") == "HopSearch-v0"


def test_a_class_that_no_module_holds_is_found_in_this_process():
    class Local(Bandit):
        """Defined in a function."""

    name = env_name(Local)
    assert name.startswith(f"{__name__}:")
    assert find(name).env_class is Local
    assert find(name).make().id == name


def test_a_class_that_is_defined_again_as_in_a_notebook_takes_the_place_of_the_first(monkeypatch):
    notebook = types.ModuleType("notebook_of_a_user")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    first, second = (type("Maze", (Bandit,), {"__module__": notebook.__name__}) for _ in range(2))
    notebook.Maze = first
    assert env_name(first) == "notebook_of_a_user:Maze"
    notebook.Maze = second
    assert find("notebook_of_a_user:Maze").env_class is second
    # The class that is passed counts, whatever the name means now.
    assert find(env_name(first)).env_class is first
    assert find(env_name(second)).env_class is second
    del notebook.Maze
    with pytest.raises(UnknownEnvError, match="Maze"):
        find("notebook_of_a_user:Maze")


def test_paths_are_text_and_the_rest_stays():
    settings = {"env": Bandit, "output_dir": Path("runs") / "a", "seed": 3, "env_kwargs": {"size": 1}}
    assert plain_settings(settings) == {
        "env": "tests.flow.worlds:Bandit",
        "output_dir": "runs/a",
        "seed": 3,
        "env_kwargs": {"size": 1},
    }
    assert (run_path(Path("run.toml"), "train"), run_path(None, "train")) == ("run.toml", None)
    assert (model_path(Path("a") / "b"), model_path("c"), model_path(None)) == ("a/b", "c", None)
