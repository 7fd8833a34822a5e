"""What the list shows of a task, and what of its metadata can be chosen."""

from __future__ import annotations

import json

from agentrl.records import Outcome
from agentrl.types import Task
from agentrl.view.episodes import write_site
from tests.view.episodes.journals import entry, manifest, payloads, rows, searched, write


def site_of(run):
    return write_site(run, run / "view", title="x")


def chosen(tmp_path, metadata):
    """What can be chosen in the filter, and of each key the values of all rows by its numbers."""
    made = [
        entry(searched(f"e{n}", task=Task.ask(f"t{n}", "?", **facts)), 1.0, Outcome.EVALUATED)
        for n, facts in enumerate(metadata)
    ]
    site = site_of(write(tmp_path, {}, {("greedy", 0): made}))
    choices, part = manifest(site)["facts"], json.loads(payloads(site)["index-000000"])
    return {
        key: [words[code] if code >= 0 else None for code in part["facts"][key]]
        for key, words in choices.items()
    }


def test_short_metadata_with_several_values_can_be_chosen(tmp_path):
    metadata = [
        {"kind": "free", "n": 1, "deep": {"a": 1}, "name": "x" * 41, "solved": True, "hops": 2.5},
        {"kind": "taken", "n": 1, "deep": [1], "name": "y", "solved": False, "none": None},
        {"late": "a"},
        {"late": "b", "kind": "free", "empty": ""},
    ]
    assert chosen(tmp_path, metadata) == {
        "kind": ["free", "taken", None, "free"],
        "solved": ["true", "false", None, None],
        "late": [None, None, "a", "b"],
    }


def test_what_differs_in_every_task_is_no_choice(tmp_path):
    rows = [{"number": n, "half": n % 2, **{f"key{n}": "x"}} for n in range(51)]
    assert chosen(tmp_path, rows) == {"half": [str(n % 2) for n in range(51)]}


def test_a_long_prompt_is_cut_to_its_first_words(tmp_path):
    long = Task.ask("t", "one  two\nthree " * 1000)
    (row,) = rows(site_of(write(tmp_path, {1: [entry(searched(task=long))]})))
    assert row["prompt"] == ("one two three " * 10)[:119] + "…"
