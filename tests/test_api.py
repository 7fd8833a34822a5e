"""The Python API stays what it is, whatever has been imported before."""

from __future__ import annotations

import pkgutil

import pytest

import agentrl


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_what_is_imported_late_is_a_function_every_time(name):
    assert callable(getattr(agentrl, name))
    assert getattr(agentrl, name) is getattr(agentrl, name)


def test_no_room_stands_in_the_way_of_a_public_name():
    rooms = {module.name for module in pkgutil.iter_modules(agentrl.__path__)}
    assert not rooms & set(agentrl.__all__)


def test_every_public_name_can_be_had():
    for name in agentrl.__all__:
        assert getattr(agentrl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = agentrl.trian
