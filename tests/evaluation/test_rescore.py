"""Other rewards for saved episodes: nothing is played, and the journal stays as it is."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace

import pytest

from agentrl import GroupReward
from agentrl.cli import main
from agentrl.errors import ConfigError, RunBusyError
from agentrl.evaluation.recorded import recorded_env
from agentrl.evaluation.rescore import NewRewards, Rescorer
from agentrl.records import members, read_journal
from agentrl.records.history import locked
from agentrl.records.journal import to_line
from tests.evaluation.benchmark.test_run import W, play, suite_of
from tests.evaluation.benchmark.worlds import Guess
from tests.records.test_history import contents

RANK = GroupReward(lambda siblings: list(range(len(siblings))), weight=0.5, name="rank")


def breaks(episode):
    raise ValueError("no")


def too_many(a, b, c):
    return 0.0


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """Six tasks played at random, twice each: a journal with right and wrong answers."""
    folder = tmp_path_factory.mktemp("bench") / "b"
    play(folder, suite_of(["Guess"], models=("random",), n=6, n_samples_per_eval_prompt=4))
    (path,) = (folder / "cells").iterdir()
    return path


async def rescored(cell, name, steps="keep", **options):
    return await Rescorer(cell, NewRewards.of([name], steps), **options).run("*")


def entries_of(cell):
    (journal,) = (cell / "trajectories").iterdir()
    return list(read_journal(journal)), journal


async def test_a_function_of_an_episode_is_added_to_the_recorded_step_rewards(cell):
    entries, journal = entries_of(cell)
    before = journal.read_bytes()
    rescoring = await rescored(cell, f"{W}:length")
    assert journal.read_bytes() == before
    lengths = [len(entry.episode.turns[-1].action.text) for entry in entries]
    (row,) = rescoring.rows()
    assert row["rollouts"] == 24
    assert row["old_mean"] == pytest.approx(sum(entry.verdict.total for entry in entries) / 24)
    assert row["new_mean"] == pytest.approx(row["old_mean"] + sum(lengths) / 24)
    assert row["changed"] == sum(length > 0 for length in lengths)
    verdicts = list(members.read(rescoring.folder / journal.name))
    assert [verdict["episode_id"] for verdict in verdicts] == [entry.episode.id for entry in entries]
    assert {verdict["scorer"] for verdict in verdicts} == {rescoring.folder.name}
    assert rescoring.folder.name.startswith("length-")
    largest = rescoring.largest(3)
    assert abs(largest[0].new - largest[0].old) == max(lengths)


async def test_verdicts_that_another_process_writes_stay_as_they_are(cell):
    folder = (await rescored(cell, f"{W}:length")).folder
    with locked(folder):
        before = contents(folder)
        with pytest.raises(RunBusyError, match=f"another process works on {folder} "):
            await rescored(cell, f"{W}:length")
        assert contents(folder) == before


async def test_a_function_of_a_task_and_an_answer_can_replace_the_step_rewards(cell):
    entries, _ = entries_of(cell)
    (row,) = (await rescored(cell, f"{W}:is_no", "drop")).rows()
    noes = sum(entry.episode.turns[-1].action.text == "no" for entry in entries)
    assert noes
    assert row["new_mean"] == pytest.approx(noes / 24)
    (built_in,) = (await rescored(cell, "exact_match", "drop")).rows()
    assert built_in["new_mean"] == pytest.approx(built_in["old_mean"]), "the label is yes"


async def test_step_rewards_are_computed_again_by_the_environment_as_it_is_now(cell, monkeypatch):
    make_env, _ = recorded_env(cell, f"{W}:Guess", None, None)

    async def step(self, action):
        return (await old_step(self, action))._replace(reward=0.25)

    old_step = Guess.step
    monkeypatch.setattr(Guess, "step", step)
    rescoring = await rescored(cell, f"{W}:is_no", "again", make_env=make_env)
    noes = sum(e.episode.turns[-1].action.text == "no" for e in entries_of(cell)[0])
    (row,) = rescoring.rows()
    assert row["new_mean"] == pytest.approx(0.25 + noes / 24)


async def test_siblings_are_compared_with_each_other(cell):
    (row,) = (await rescored(cell, "tests.evaluation.test_rescore:RANK", "drop")).rows()
    assert row["new_mean"] == pytest.approx(0.5 * (0 + 1 + 2 + 3) / 4)


async def test_a_reward_that_fails_is_counted_and_if_it_always_does_it_is_an_error(cell):
    with pytest.raises(ConfigError, match=r"no episode can be scored.*`breaks` failed"):
        await rescored(cell, "tests.evaluation.test_rescore:breaks")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such", "no reward `no_such`"),
        ("no.module:f", "no reward `no.module:f`"),
        ("tests.evaluation.test_rescore:W", "name a function"),
        ("tests.evaluation.test_rescore:too_many", "takes neither an episode"),
    ],
)
def test_a_name_that_is_no_reward_is_one_sentence(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        NewRewards.of([name], "keep")


def test_the_label_changes_with_the_code_and_the_step_rewards(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def label(text, steps="keep"):
        (tmp_path / "my_reward.py").write_text(f"def f(episode):\n    return {text}\n")
        sys.modules.pop("my_reward", None)
        importlib.invalidate_caches()
        return NewRewards.of(["my_reward:f"], steps).label

    assert label("1.0") == label("1.0")
    assert len({label("1.0"), label("2.0"), label("1.0", "drop")}) == 3


def test_the_command_prints_means_and_the_largest_changes(cell, capsys):
    main(["rescore", str(cell), "--reward", f"{W}:is_no", "--step-rewards", "drop", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"][0]["changed"] == len(printed["largest"]) or len(printed["largest"]) == 10
    main(["rescore", str(cell), "--reward", f"{W}:is_no", "--step-rewards", "again"])
    out = capsys.readouterr().out
    assert "New verdicts: " in out
    with pytest.raises(SystemExit) as ended:
        main(["rescore", str(cell), "--reward", "exact_match", "--files", "step_*"])
    assert ended.value.code == 2
    assert "has no episodes in files" in capsys.readouterr().err


async def test_episodes_without_a_score_before_are_counted_apart(cell, tmp_path):
    """As those of a gateway: nothing is compared, and they have a mean."""
    entries, journal = entries_of(cell)
    partly = [replace(entry, verdicts=()) if index < 10 else entry for index, entry in enumerate(entries)]
    for name, kept in (("none", partly[:10]), ("some", partly)):
        folder = tmp_path / name / "trajectories"
        folder.mkdir(parents=True)
        members.append(folder / journal.name, map(to_line, kept), at=0)
    lengths = [len(entry.episode.turns[-1].action.text) for entry in entries]
    file = f"{journal.name}, not scored before"
    rows = list((await rescored(tmp_path / "none", f"{W}:length", "drop")).rows())
    assert [(row["episodes of"], row["rollouts"], row["old_mean"]) for row in rows] == [(file, 10, None)]
    assert rows[0]["new_mean"] == pytest.approx(sum(lengths[:10]) / 10)
    compared, first = (await rescored(tmp_path / "some", f"{W}:length", "drop")).rows()
    assert (compared["rollouts"], first["rollouts"]) == (14, 10)
    assert compared["new_mean"] == pytest.approx(sum(lengths[10:]) / 14)
    old = [entry.verdict.total for entry in entries[10:]]
    assert compared["old_mean"] == pytest.approx(sum(old) / 14)
