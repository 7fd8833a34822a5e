"""The generator benchmark with a small workload: every section, and the figures of its rows."""

from __future__ import annotations

import json

import pytest

from benchmarks.generator import Generator, bench_generator
from benchmarks.instant import Player

SMALL = Generator(
    sizes=((8, 2), (16, 1)),
    payloads=((200, 8), (3_000, 8)),
    long=(12, 8),
    wait_s=0.01,
    waiting=8,
    idle=16,
    repeats=2,
)


@pytest.mark.full
def test_every_section_is_measured():
    result = bench_generator(SMALL)
    assert json.loads(json.dumps(result)) == result
    summary = result["summary"]
    assert set(summary["turns_per_s"]) == {"8", "16", "8, Python's collector", "16, Python's collector"}
    assert set(summary["payloads_to_tokenizer"]) == {"200", "3000"}
    assert 0 < summary["slowest_to_fastest"] <= 1
    assert summary["idle_bytes"]["an_episode"] > 1000
    waiting = result["sections"]["waiting_wall_s"]
    assert waiting["waiting"]["median"] >= 3 * 0.01
    assert len(waiting["instant"]["repeats"]) == 2


async def test_every_turn_of_every_episode_is_played():
    player = Player(payload=100, calls=2)
    outcomes = await player.play(16)
    episodes = [episode for outcome in outcomes for episode in outcome.episodes]
    assert len(episodes) == 16
    for episode in episodes:
        assert [len(turn.action.tool_calls) for turn in episode.turns] == [1, 1, 0]
        assert episode.step_rewards == (None, None, 1.0)
        assert episode.tools["look"].calls == 2
        assert [len(turn.observation[0].text) for turn in episode.turns[1:]] == [100, 100]


async def test_an_incomplete_episode_stops_the_benchmark():
    player = Player()
    player.engine.call = player.engine.answer  # no episode calls the tool
    with pytest.raises(AssertionError, match="was not played as it should be"):
        await player.play(8)
