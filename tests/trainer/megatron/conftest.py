"""Ranks that the tests of a file share."""

from __future__ import annotations

import pytest

from tests.trainer.megatron.together import Ranks


@pytest.fixture(scope="package")
def single():
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def pair():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def four():
    with Ranks(4) as ranks:
        yield ranks
