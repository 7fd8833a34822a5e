"""Who does not compute on a card never touches one: no import, no index and no driver of a run does."""

from __future__ import annotations

import pytest

from agentrl.config import read_toml
from tests.laws.untouched import touches


@pytest.mark.timeout(600)
def test_no_module_and_no_index_touches_a_card(tmp_path):
    assert touches(tmp_path, "everything") == []


def test_an_index_is_made_without_a_jax_that_is_there_already(tmp_path):
    assert touches(tmp_path, "after_jax") == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_driver_player_or_engine_of_a_run_touches_a_card_though_its_rank_has_one(tmp_path):
    assert touches(tmp_path, "run") == []
    assert read_toml(tmp_path / "run" / "config.toml")["trainer"]["bf16"] is True


def test_each_touch_is_seen(tmp_path):
    imported = ["import jax", "import jax.lax", "import tensorflow"]
    used = ["jax.lax.top_k", "tensorflow.constant", "CUDA in touching"]
    assert touches(tmp_path, "touching") == [*imported, *used]
