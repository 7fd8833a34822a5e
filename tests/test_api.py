"""The Python API does not depend on what has been imported before."""

from __future__ import annotations

import inspect
import pkgutil
import re
import tomllib

import pytest

import agentrl
from tests.house.source import ROOT


@pytest.mark.parametrize("name", ["train", "sft", "evaluate"])
def test_lazy_imports_are_functions(name):
    assert callable(getattr(agentrl, name))
    assert getattr(agentrl, name) is getattr(agentrl, name)


def test_no_module_has_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(agentrl.__path__)}
    assert not modules & set(agentrl.__all__)


def test_every_public_name_exists():
    for name in agentrl.__all__:
        assert getattr(agentrl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = agentrl.trian


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert agentrl.__version__ == project["version"]


def test_dir_is_complete_and_holds_no_names_of_other_packages():
    listed = dir(agentrl)
    assert {*agentrl.__all__, "__version__", "__doc__", "tools"} <= set(listed)
    assert listed == sorted(listed)
    assert not {"annotations", "partial", "metadata", "sys", "TYPE_CHECKING"} & set(listed)
    packages = {module.name for module in pkgutil.iter_modules(agentrl.__path__)} & set(listed)
    assert packages <= {"envs", "errors", "records", "tools", "types"}


def test_every_name_of_the_reference_can_be_imported():
    text = (ROOT / "docs/reference/agentrl.md").read_text()
    names = re.findall(r"^## (?:class )?(\w+)", text, re.MULTILINE)
    assert {"TrainResult", "EvalReport", "SftResult", "train"} <= set(names)
    for name in names:
        assert getattr(agentrl, name) is not None
        assert name in dir(agentrl)


@pytest.mark.parametrize(
    ("module", "name"),
    [(agentrl, "train"), (agentrl, "sft"), (agentrl, "evaluate"), (agentrl.envs.check, "check_env")],
)
def test_every_call_that_runs_an_event_loop_has_a_twin_with_the_same_arguments(module, name):
    call, twin = getattr(module, name), getattr(module, f"{name}_async")
    assert inspect.iscoroutinefunction(twin)
    assert not inspect.iscoroutinefunction(call)
    assert inspect.signature(call) == inspect.signature(twin)
    assert f"{name}_async" in call.__doc__
    assert f"`{name}`" in twin.__doc__
