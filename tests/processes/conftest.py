"""One Ray of one machine for all tests of a file that need one: starting it takes seconds."""

from __future__ import annotations

import os

import pytest

from agentrl.processes.config import ClusterConfig
from agentrl.processes.placement import RankNeeds, layout_of
from agentrl.processes.ray.placement import placed
from agentrl.processes.ray.session import connected


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with connected(ClusterConfig(cluster="ray"), tmp_path_factory.mktemp("run"), os.environ) as session:
        yield session


@pytest.fixture(scope="module")
def placement(session):
    """Allocations for two ranks."""
    placement = placed(session, layout_of(RankNeeds(1, 2, 0.5, 0), [], colocate=False), 60)
    yield placement
    placement.remove()
