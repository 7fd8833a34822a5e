"""What graders hold open is closed at the end of a test."""

from __future__ import annotations

import pytest

from agentrl.tools import release_shared


@pytest.fixture
async def released():
    """Whatever a grader holds open is closed after the test."""
    yield
    await release_shared()
