"""The benchmark of players runs, and its sides play where they say."""

from __future__ import annotations

import pytest

from benchmarks.players import PlayersBench, bench_players, sides_of

SMALL = PlayersBench(episodes=16, free_episodes=16, calls=1, work=10, repeats=2)


@pytest.mark.full
def test_every_side_plays_its_episodes():
    result = bench_players(SMALL)
    assert set(result["summary"]) == {*sides_of(SMALL), "load_average"}
    for section, sides in sides_of(SMALL).items():
        assert {
            name: len(row["repeats"]) for name, row in result["turns_per_s"][section].items()
        } == dict.fromkeys(sides, 2)


def test_the_smaller_side_has_one_process_and_both_the_same_work():
    sections = sides_of(PlayersBench())
    for section in ("inside", "driver", "instant"):
        smaller, larger = sections[section].values()
        assert larger.players == 2
        assert smaller.players == (1 if section == "inside" else 0)
        assert larger._replace(players=0) == smaller._replace(players=0)
        assert larger.own_engine == (section == "inside")
        assert bool(larger.work) == (section != "instant")
    through_the_driver, by_themselves = sections["servers"].values()
    assert through_the_driver == by_themselves._replace(sends_itself=False)
    assert by_themselves.sends_itself
