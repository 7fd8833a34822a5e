"""What Python callers pass becomes what a run file holds."""

from __future__ import annotations

import sys
import types
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from pydantic import TypeAdapter

from agentrl.assembly.arguments import env_name, model_path, plain_settings, rows_beside, run_path
from agentrl.assembly.config import RunConfig
from agentrl.assembly.functions import CALLBACK, function_at
from agentrl.config import leaves
from agentrl.data import Columns, FileSource
from agentrl.envs import find
from agentrl.errors import ConfigError, UnknownEnvError
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


def half(task, answer):
    """A reward."""
    return 0.5


class Collected:
    """An object that is a function."""

    def __call__(self, step, metrics):
        """Called back."""


def test_a_function_has_the_name_by_which_a_run_file_finds_it():
    assert plain_settings({"reward": half}) == {"reward": f"{__name__}:half"}
    assert function_at("reward", f"{__name__}:half") is half


def test_a_function_of_a_function_and_an_object_are_found_in_this_process():
    def local(task, answer):
        return 1.0

    collected = Collected()
    plain = plain_settings({"reward": local, "callback": collected, "data_source_path": Collected})
    assert function_at("reward", plain["reward"]) is local
    assert function_at("callback", plain["callback"]) is collected
    assert plain["data_source_path"] == f"{__name__}:Collected"


def test_a_run_takes_functions_of_functions_wherever_it_takes_functions():
    def local(*_):
        """Of this process."""

    named = {
        name: leaf for name, (_, leaf) in leaves(RunConfig).items() if "package.module:" in leaf.description
    }
    own = {"env", "group_reward", "reward"}
    assert {*named} >= {*own, "callback", "custom_loss_function_path", "data_source_path"}
    for name in named.keys() - own:
        plain = plain_settings({name: local})
        TypeAdapter(Annotated[named[name].annotation, named[name]]).validate_python(plain[name])


def made(value):
    def reward(task, answer):
        return value

    return reward


def test_the_function_of_the_last_call_counts():
    first, second = made(1.0), made(2.0)
    path = plain_settings({"reward": first})["reward"]
    assert plain_settings({"reward": second}) == {"reward": path}
    assert function_at("reward", path) is second


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reward": lambda task, answer: 1.0}, "reward is a lambda, and a run records its functions by name"),
        ({"reward": made(1), "group_reward": made(2)}, "two functions are called"),
        ({"prompt_data": 7.5j}, "prompt_data is a complex, neither a path nor rows; pass a list of mappings"),
        (
            {"prompt_data": [{"input": "a"}, "b"]},
            "prompt_data: row 1 is a str; a row is a mapping of columns",
        ),
        ({"sft_data": [{"x": {1, 2}}]}, "row 0 cannot be written as JSON (a set is neither text"),
        ({"sft_data": [{"x": float("nan")}]}, "sft_data: row 0 cannot be written as JSON"),
    ],
)
def test_what_no_run_can_record_is_one_sentence(tmp_path, settings, sentence):
    with pytest.raises(ConfigError) as caught:
        plain_settings({"output_dir": tmp_path, **settings})
    assert sentence in str(caught.value)
    assert list((tmp_path / "data").glob("*")) == [] if (tmp_path / "data").exists() else True


@pytest.mark.parametrize(
    ("function", "sentence"),
    [("alone", "is called with a step and its metrics"), ("waits", "no coroutine function")],
)
def test_a_callback_of_another_form_is_one_sentence(function, sentence):
    def alone(step):
        """Lacks the metrics."""

    async def waits(step, metrics):
        """A coroutine."""

    path = plain_settings({"callback": {"alone": alone, "waits": waits}[function]})["callback"]
    with pytest.raises(ConfigError, match=sentence):
        CALLBACK.at(path)


ROWS = [{"input": "Grüße?", "answer": "1", "facts": {"n": [1, 2.5, None]}}, {"input": "b", "answer": "2"}]


def questions_in(path):
    source = FileSource(path, Columns("input", "answer"), shuffle=False, split="train")
    return [(source.task(n).prompt[0].text, source.task(n).answer) for n in range(source.num_tasks)]


def test_rows_are_written_to_a_file_that_has_the_name_of_their_hash(tmp_path):
    settings = {"output_dir": tmp_path, "prompt_data": ROWS, "eval_prompt_data": {"a": ROWS, "b": "b.jsonl"}}
    plain = plain_settings(settings)
    path = plain["prompt_data"]
    assert Path(path).parent == tmp_path / "data"
    assert plain["eval_prompt_data"] == {"a": path, "b": "b.jsonl"}
    assert questions_in(path) == [("Grüße?", "1"), ("b", "2")]
    assert plain_settings(settings) == plain
    other = plain_settings({"output_dir": tmp_path, "prompt_data": ROWS[:1]})["prompt_data"]
    assert other != path
    assert len(list((tmp_path / "data").iterdir())) == 2


def test_a_set_with_settings_of_its_own_may_be_rows_and_have_a_function(tmp_path):
    own = {"path": ROWS, "reward": questions_in, "temperature": 0.5, "reward_kwargs": {"a": [1]}}
    plain = plain_settings({"output_dir": tmp_path, "eval_prompt_data": {"a": own, "b": Path("b.jsonl")}})
    path = plain["eval_prompt_data"]["a"]["path"]
    assert questions_in(path) == [("Grüße?", "1"), ("b", "2")]
    assert plain["eval_prompt_data"] == {
        "a": {**own, "path": path, "reward": "tests.assembly.test_arguments:questions_in"},
        "b": "b.jsonl",
    }


def test_paths_and_weights_of_data_stay(tmp_path):
    settings = {
        "prompt_data": [Path("a.jsonl"), "b.jsonl"],
        "eval_prompt_data": {"a.jsonl": 2, "b.jsonl": 0.5},
        "sft_data": "runs/first",
        "eval_sft_data": None,
    }
    assert plain_settings(settings) == {**settings, "prompt_data": ["a.jsonl", "b.jsonl"]}


def test_a_generator_is_rows_and_dates_decimals_and_arrays_are_plain(tmp_path):
    rows = ({"input": "b", "facts": [date(2026, 1, 2), Decimal("0.10"), np.arange(2)]} for _ in range(2))
    path = plain_settings({"output_dir": tmp_path, "prompt_data": rows})["prompt_data"]
    line = '{"input": "b", "facts": ["2026-01-02", "0.10", [0, 1]]}\n'
    assert Path(path).read_text() == line * 2


def test_rows_of_an_evaluation_without_a_folder_are_gone_after_it(tmp_path):
    with rows_beside(None) as folder:
        path = Path(plain_settings({"prompt_data": ROWS}, folder)["prompt_data"])
        assert path.is_file()
    assert not path.parent.exists()
    with rows_beside(tmp_path / "scored") as folder:
        path = Path(plain_settings({"prompt_data": ROWS}, folder)["prompt_data"])
    assert path.parent == tmp_path / "data"
    assert path.is_file()
