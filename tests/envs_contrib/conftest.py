"""What environments share among episodes is closed at the end of a test."""

from __future__ import annotations

import pytest

from agentrl.tools import release_shared


@pytest.fixture(autouse=True)
async def _released():
    """Sandboxes and graders end with the test; others look for leftover processes."""
    yield
    await release_shared()
