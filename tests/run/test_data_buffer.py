"""The data buffer holds so many groups, gives out so many, and is in a checkpoint by their names."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError, UserError
from agentrl.rollout.config import RolloutConfig
from agentrl.run.data_buffer import DataBuffer, data_buffer_metrics
from tests.algorithms.episodes import group


def names(kept):
    return [(step, group.id) for step, group in kept]


async def filled(**settings):
    buffer = DataBuffer(**{"size": 4, "number": 2, **settings})
    for step in (1, 2):
        buffer.add(step, [group(f"g{step}{letter}", [0.0, 1.0]) for letter in "abc"])
    return buffer


async def test_the_oldest_are_taken_and_the_oldest_make_room():
    buffer = await filled()
    assert names(buffer.kept) == [(1, "g1c"), (2, "g2a"), (2, "g2b"), (2, "g2c")]
    assert names(await buffer.take()) == [(1, "g1c"), (2, "g2a")]
    assert names(await buffer.take()) == [(2, "g2b"), (2, "g2c")]
    assert await buffer.take() == []
    buffer.add(3, [group("g3a", [0.0, 1.0])])
    assert names(await buffer.take()) == [(3, "g3a")]


async def test_a_function_chooses():
    def last(groups, number):
        return list(groups)[-number:]

    buffer = await filled(choose=last)
    assert names(await buffer.take()) == [(2, "g2b"), (2, "g2c")]
    assert names(buffer.kept) == [(1, "g1c"), (2, "g2a")]
    buffer = await filled(choose=lambda groups, number: groups)
    with pytest.raises(
        UserError, match=r"the data buffer's filter failed \(ValueError: a buffer filter returns 2"
    ):
        await buffer.take()


async def test_a_checkpoint_has_its_names_and_the_journal_the_rest():
    buffer = await filled()
    journal = {
        1: [group("g1a", [0.0, 1.0]), group("g1c", [0.0, 1.0])],
        2: [group(f"g2{x}", [0.0, 1.0]) for x in "abcd"],
    }
    again = DataBuffer(4, 2)
    again.restore(buffer.saved, journal.__getitem__)
    assert names(again.kept) == names(buffer.kept)
    assert again.kept[0].group is journal[1][1]
    journal[2].pop(0)
    with pytest.raises(ConfigError, match="the journal lacks group g2a of step 2; restore its files"):
        again.restore(buffer.saved, journal.__getitem__)


async def test_metrics_say_how_many_and_how_old():
    buffer = await filled()
    taken = await buffer.take()
    assert data_buffer_metrics(taken, buffer, step=4) == {
        "rollout/data_buffer/groups": 2.0,
        "rollout/data_buffer/age": 2.5,
        "rollout/data_buffer/size": 2.0,
    }


def test_without_groups_to_take_there_is_none():
    assert DataBuffer.of(RolloutConfig(), None) is None
    assert DataBuffer.of(RolloutConfig(data_buffer_groups=2, data_buffer_size=3), max) == DataBuffer(
        3, 2, max
    )
