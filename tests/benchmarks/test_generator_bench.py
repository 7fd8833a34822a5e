"""The generator benchmark with a small workload: every section, and the figures of its rows."""

from __future__ import annotations

import json

import pytest

from benchmarks.generator import Generator, bench_generator
from benchmarks.instant import Player
from benchmarks.served import Load, Served, bench_served
from tests.engine.serving import ScriptedServer, generated

SMALL = Generator(
    sizes=((8, 2), (16, 1)),
    payloads=((200, 8), (3_000, 8)),
    long=(12, 8),
    wait_s=0.01,
    waiting=8,
    idle=16,
    repeats=2,
    served=Served(
        loads=(("8", Load(8, 16)), ("long", Load(8, 16, prompt=3_000)), ("steps", Load(8, 16, step_s=0.001))),
        repeats=2,
    ),
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
    served = result["sections"]["served"]
    assert set(served) == set(summary["served"]) == {"8", "long", "steps"}
    assert served["long"]["prompts"][0] > served["8"]["prompts"][0] + 300
    assert served["steps"]["requests_per_s"]["generator"] < 8 * 4 / (4 * 16 * 0.001)
    assert all(figures["cpu_ms"]["generator"] > 0 < figures["ratio"] for figures in served.values())


async def test_both_sides_send_the_same_requests_to_a_server_that_runs_already():
    server = ScriptedServer(generated(range(1, 17)), info={"context_length": 1 << 16})
    async with server.listening() as url:
        served = Served(loads=(("8", Load(8, 16)), ("steps", Load(8, 16, step_s=1.0))), repeats=1)
        figures = await bench_served(served, url)
    assert list(figures) == ["8"], "a server that runs has steps of its own"
    lengths = [len(request["input_ids"]) for request in server.requests]
    # Each side has a run to warm up, and the generator one more; the plain client is as long in each turn.
    assert len(lengths) == 5 * 8 * 4
    assert set(figures["8"]["prompts"]) <= set(lengths)
    assert {request["sampling_params"]["max_new_tokens"] for request in server.requests} == {16}
    assert len({request["rid"] for request in server.requests}) == len(lengths)
    assert len({request["extra_key"] for request in server.requests}) == 5, "no run finds another's prefixes"


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
