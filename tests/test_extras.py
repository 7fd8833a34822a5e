"""What an installation lacks is named, with the extra that brings it."""

from __future__ import annotations

from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

from agentrl.errors import MissingExtraError, UserError
from agentrl.extras import EXTRAS, TRAINING, missing_extra, require
from tests.house.source import requirements


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_table_says_what_pyproject_says(extra):
    own = {one.name for one in requirements(extra)} - {one.name for one in requirements()}
    shared = set() if extra == "train" else set(EXTRAS["train"].values())
    assert set(EXTRAS[extra].values()) == own - shared


def test_every_module_is_held_by_the_package_that_is_named():
    owners = {
        name: {canonicalize_name(one) for one in held} for name, held in packages_distributions().items()
    }
    table = [held for modules in EXTRAS.values() for held in modules.items()]
    assert [module for module, package in table if package not in owners[module]] == []


def test_what_is_there_is_not_complained_about():
    require("training", *TRAINING)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (TRAINING, "training needs torch: pip install 'agentrl[train]'."),
        (("matplotlib",), "training needs matplotlib: pip install 'agentrl[train]'."),
        (("megatron",), "training needs megatron-core: pip install 'agentrl[megatron]'."),
        (("faiss",), "training needs faiss-cpu: pip install 'agentrl[search]'."),
    ],
)
def test_the_first_that_is_missing_is_named_with_its_extra(monkeypatch, modules, says):
    for module in modules:
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError) as raised:
        require("training", *modules)
    assert str(raised.value) == says
    assert isinstance(raised.value, UserError)


def failed_import(name):
    with pytest.raises(ModuleNotFoundError) as raised:
        __import__(name)
    return raised.value


def test_an_import_that_failed_is_a_sentence_only_where_an_extra_mends_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    found = missing_extra(failed_import("faiss.contrib"))
    assert str(found) == "this needs faiss-cpu: pip install 'agentrl[search]'."
    assert missing_extra(failed_import("no_such_module")) is None
    # torch is installed: what it lacks is not mended by installing it.
    assert missing_extra(failed_import("torch.no_such_module")) is None
