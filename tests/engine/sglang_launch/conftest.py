"""Every test of launching leaves no process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.mcp.watching import servers


@pytest.fixture(autouse=True)
def _no_process_remains() -> Iterator[None]:
    before = servers()
    yield
    assert servers() - before == set()
