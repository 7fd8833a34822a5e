"""The Python API does not depend on what has been imported before."""

from __future__ import annotations

import pkgutil

import pytest

import agentrl


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
