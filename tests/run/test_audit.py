"""The audit finds a prompt that is missing, or that was trained in part."""

from __future__ import annotations

import pytest

from agentrl.records import Entry, Journal, Outcome
from agentrl.run.audit import audit
from agentrl.types import Verdict
from tests.run.test_journal_entries import episode


async def written(folder, fates, *, used=Outcome.TRAINED):
    """A journal of one step. fates: reason of each episode by id, "" = it was used."""
    journal = Journal(folder)
    entries = []
    for id, reason in fates.items():
        outcome = Outcome.DROPPED if reason else used
        entries.append(Entry(episode(id), (Verdict(id, "env", 1.0, {}),), outcome, reason))
    await journal.write_step(1, entries)
    await journal.flush()
    return folder


WHOLE = {"g0-0": "", "g0-1": "", "g1-0": "zero_std", "g1-1": "zero_std", "g2-0": "group_incomplete"}


async def test_every_prompt_is_accounted_for(tmp_path):
    found = audit(await written(tmp_path, WHOLE))
    assert found.problems == ()
    assert (found.started, found.trained) == (3, 1)
    assert found.dropped == {"zero_std": 1, "group_incomplete": 1}


async def test_prompts_of_a_run_that_only_plays_are_accounted_for(tmp_path):
    found = audit(await written(tmp_path, WHOLE, used=Outcome.RECORDED))
    assert (found.problems, found.trained, found.recorded) == ((), 0, 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"g4-0": ""}, "1 prompts were started and stand nowhere (the first: [3])"),
        ({"g0-1": "zero_std"}, "prompt 0 was trained in part."),
        ({"x": ""}, "episode x belongs to no prompt."),
    ],
)
async def test_what_is_missing_is_named(tmp_path, change, sentence):
    found = audit(await written(tmp_path, {**WHOLE, **change}))
    assert any(sentence in problem for problem in found.problems), found.problems


async def test_what_filters_and_over_sampling_left_is_accounted_for(tmp_path):
    fates = {
        **{"g0-0": "", "g0-1": "sample_filter/truncated", "g0-1-retry1": "tool_error"},
        **{"g1-0": "tool_error", "g1-0-retry1": "over_sampled", "g1-1": "over_sampled"},
        **{"g2-0": "not_chosen", "g2-1": "not_chosen"},
        **dict.fromkeys(("g3-0", "g3-1"), "sample_filter/truncated"),
    }
    found = audit(await written(tmp_path, fates))
    assert found.problems == ()
    assert (found.started, found.trained) == (4, 1)
    assert found.dropped == {"over_sampled": 1, "not_chosen": 1, "sample_filter/truncated": 1}
