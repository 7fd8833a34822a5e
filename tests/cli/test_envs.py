"""`agentrl envs list` and `agentrl envs show`: a table for people, JSON for machines."""

from __future__ import annotations

import json

import gymnasium
import pytest

from agentrl import GymEnv, env_ids, make, register
from agentrl.cli import main
from agentrl.envs import registry
from agentrl.envs.base import FACILITIES, GROUPS
from agentrl.envs.catalog import by_family, catalog
from agentrl.envs.registry import families
from agentrl.runtime.extras import EXTRAS
from tests.worlds import Parrot


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def printed(capsys, *arguments):
    main(["envs", *arguments])
    return capsys.readouterr().out


def test_the_list_holds_everything_installed_with_splits_scores_and_tools(capsys):
    rows = {row["id"]: row for row in json.loads(printed(capsys, "list", "--json"))}
    assert set(rows) == set(env_ids())
    assert rows["HopSearch-v0"]["splits"] == ["demo", "train", "validation", "test"]
    assert rows["HopSearch-v0"]["tools"] == ["search"]
    assert (rows["Taxi-v0"]["expert_score"], rows["Taxi-v0"]["tools"]) == (0.698, ["act"])
    assert rows["CalendarQuestions-v0"]["chance_score"] == 0.25
    assert all(row["description"] for row in rows.values())
    assert rows["ReasoningGym-gcd-v0"]["needs"] == ["reasoning-gym"]
    assert rows["SingleTurn-v0"]["needs"] == ["data"]
    assert {row["group"] for row in rows.values()} <= set(GROUPS)
    assert rows["Wordle-v0"]["has_expert"]
    assert not rows["TextArena-Bandit-v0"]["has_expert"]


def test_what_an_environment_needs_is_an_extra_or_a_facility(capsys):
    for row in json.loads(printed(capsys, "list", "--json")):
        assert set(row["needs"]) <= set(EXTRAS) | set(FACILITIES), row["id"]


def test_people_are_shown_groups_and_lines(capsys, own_registry, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    register("Parrot-v0", Parrot)
    lines = printed(capsys, "list").splitlines()
    place = lines.index("  Parrot-v0  chance 0  tools echo, add")
    assert lines[place - 1] == "tools"
    assert lines[place + 1].startswith("      Two small tools")
    output = printed(capsys, "show", "Parrot-v0")
    for word in ("Parrot-v0", "expert_score", "chance_score", '"train": 5', "How many are 0 and 1?"):
        assert word in output


def test_a_list_of_80_columns_is_grouped_and_cuts_nothing_short(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = printed(capsys, "list")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in out
    assert [line for line in lines if line in GROUPS.values()] == [
        name for name in GROUPS.values() if name in lines
    ]
    words = set(out.split())
    for entry in by_family(catalog(env_ids())):
        assert set(entry.description.split()) <= words, entry.id
    members = {id for family in families().values() for id in family}
    assert [id for id in {*env_ids(), *families()} - members if id not in out] == []
    assert "ReasoningGym-gcd-v0" not in out


@pytest.mark.parametrize(
    "arguments", [["ReasoningGym-g*"], ["ReasoningGym-*-v0"], ["ReasoningGym-*", "--all"]]
)
def test_a_pattern_lists_the_members_of_a_family(capsys, arguments):
    out = printed(capsys, "list", *arguments)
    assert "ReasoningGym-gcd-v0" in out
    assert "HopSearch-v0" not in out


def test_a_pattern_without_an_environment_is_a_one_sentence_error(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["envs", "list", "Chess-*"])
    assert exited.value.code == 2
    err = capsys.readouterr().err
    assert "no environment `Chess-*`" in err
    assert "ReasoningGym-*-v0" in err
    assert "ReasoningGym-gcd" not in err


def test_one_broken_environment_does_not_hide_the_others(capsys, own_registry):
    register("Parrot-v0", Parrot)
    register("Pendulum-v0", GymEnv, gym_id="Pendulum-v1")
    register("Wrong-v0", Parrot, colour="red")
    rows = {row["id"]: row for row in json.loads(printed(capsys, "list", "--json"))}
    assert rows["Parrot-v0"]["tools"] == ["echo", "add"]
    assert "only discrete and text actions" in rows["Pendulum-v0"]["error"]
    assert "Wrong-v0: " in rows["Wrong-v0"]["error"]
    assert "only discrete and text actions" in " ".join(printed(capsys, "list").split())
    assert rows["Wrong-v0"]["expert_score"] is None


def test_one_environment_is_shown_whole(capsys, own_registry):
    register("lab/Lake-v0", GymEnv, gym_id="FrozenLake-v1", actions=("left", "down", "right", "up"))
    facts = json.loads(printed(capsys, "show", "lab/Lake-v0", "--json"))
    assert (facts["id"], facts["gymnasium_id"]) == ("lab/Lake-v0", "agentrl/lab.Lake-v0")
    assert facts["gymnasium_id"] in gymnasium.registry
    assert facts["splits"] == {"train": 2000, "test": 500}
    assert facts["tools"][0]["parameters"]["properties"]["action"]["enum"][1] == "down"
    assert facts["limits"]["max_turns"] == make("lab/Lake-v0").limits.max_turns == 100
    assert (facts["expert_score"], facts["chance_score"]) == (1.0, 0.0)
    assert facts["kwargs"] == {"gym_id": "FrozenLake-v1", "actions": "('left', 'down', 'right', 'up')"}


def test_arguments_of_the_constructor_make_another_instance(capsys):
    facts = json.loads(printed(capsys, "show", "HopSearch-v0", "--env-kwargs", '{"seed": 7}', "--json"))
    usual = json.loads(printed(capsys, "show", "HopSearch-v0", "--json"))
    assert (facts["kwargs"], usual["kwargs"]) == ({"seed": 7}, {})
    assert facts["first_task"] != usual["first_task"]
