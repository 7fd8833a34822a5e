"""Ranks that the tests of a file share."""

from __future__ import annotations

import pytest

from tests.trainer.megatron.together import Ranks


@pytest.fixture(scope="module")
def single():
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pair():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks
