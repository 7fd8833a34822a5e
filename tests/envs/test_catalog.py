"""The catalogue: what each environment needs, families as one entry, and the table of the guide."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from agentrl import SingleTurnEnv, Task, env_ids, register
from agentrl.envs import registry
from agentrl.envs.catalog import by_family, catalog, markdown
from tests.worlds import Parrot

FAMILY = {
    f"Sized-{n}-v0": ("tests.envs.test_catalog:Scored", {"score": score}) for n, score in ((1, 0.5), (2, 1.0))
}


class Scored(SingleTurnEnv):
    """Says a word."""

    needs = ("sandbox", "pettingzoo")

    def __init__(self, score: float = 1.0) -> None:
        super().__init__()
        self.expert_score = score

    def tasks(self, split):
        return [Task.ask(f"{split}{n}", "x" * 36, "four") for n in range(4)]

    def grade(self, task, answer):
        return float(answer == task.answer)


class Half(Scored):
    """Is right every second time: 40 characters of prompt and answer."""

    group = "search"
    needs = ()

    def grade(self, task, answer):
        return super().grade(task, answer) * (int(task.id[-1]) % 2)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    point = EntryPoint("Sized-*-v0", "tests.envs.test_catalog:FAMILY", "agentrl.env_families")
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: (point,) if "families" in group else ())
    register("Half-v0", Half)
    register("Quiet-v0", Parrot)


def test_entries_are_ordered_by_group_and_say_what_is_needed_and_missing(monkeypatch):
    monkeypatch.setattr("agentrl.envs.catalog.is_installed", lambda extra: extra != "pettingzoo")
    entries = catalog(env_ids())
    assert [(entry.group, entry.id) for entry in entries] == [
        ("search", "Half-v0"),
        ("tools", "Quiet-v0"),
        ("text", "Sized-1-v0"),
        ("text", "Sized-2-v0"),
    ]
    assert (entries[3].needs, entries[3].missing) == (("sandbox", "pettingzoo"), ("pettingzoo",))
    assert [entry.has_expert for entry in entries] == [True, False, True, True]
    assert entries[1].tools == ("echo", "add")
    assert entries[0].description == "Is right every second time: 40 characters of prompt and answer."


def test_a_family_is_one_entry_with_mean_scores_where_all_of_it_is_there():
    joined = by_family(catalog(env_ids()))
    assert [entry.id for entry in joined] == ["Half-v0", "Quiet-v0", "Sized-*-v0"]
    assert (joined[2].members, joined[2].expert_score) == (2, 0.75)
    assert [entry.id for entry in by_family(catalog(["Sized-1-v0"]))] == ["Sized-1-v0"]


def test_the_table_has_a_heading_for_each_group_and_a_row_for_each_entry():
    lines = list(markdown(by_family(catalog(["Half-v0", "Quiet-v0"]))))
    assert [line for line in lines if line.startswith("###")] == ["### Search", "### Tools"]
    assert lines[4] == f"| `Half-v0` | {catalog(['Half-v0'])[0].description} | nothing | 1.00 | 2,048 |"
    assert lines[10].split(" | ")[3:] == ["none", "no limit |"]
