"""What can be replayed of a journal, and the sentences about what cannot."""

from __future__ import annotations

import json

import pytest

from agentrl.assembly.load import load_config
from agentrl.config import write_toml
from agentrl.errors import ConfigError
from agentrl.records import Entry, Journal, Outcome, members
from agentrl.run.parts import algorithm_of
from agentrl.run.replay import Replay
from agentrl.types import Verdict
from tests.algorithms.episodes import episode, turn
from tests.worlds import Talk

PLAYED = {"env": "E-v0", "rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 4}


def groups(*ordinals, size=2, token=5):
    """Entries of complete groups; their tokens have version 3."""
    for ordinal in ordinals:
        for k in range(size):
            id = f"g{ordinal}-{k}"
            yield Entry(
                episode(id, [turn([1, 2], [3, token])]), (Verdict(id, "s", float(k)),), Outcome.TRAINED
            )


def stopped(*ordinals):
    for entry in groups(*ordinals):
        yield Entry(entry.episode, (), Outcome.DROPPED, "run_stopped")


@pytest.fixture
def write(tmp_path):
    async def write(*steps, **settings):
        """A run's folder with these steps, from 1 on."""
        folder = tmp_path / "played"
        folder.mkdir(exist_ok=True)
        async with Journal(folder) as journal:
            for step, entries in enumerate(steps, start=1):
                await journal.write_step(step, entries)
        write_toml(load_config(None, {**PLAYED, **settings}), folder / "config.toml")
        return folder

    return write


def opened(folder, *, vocab_size=10, **settings):
    """The replay, and the warnings about it."""
    warnings = []
    config = load_config(None, {"env": "E-v0", "num_rollout": 2, "replay": str(folder), **settings})
    return Replay.of(config, vocab_size=vocab_size, on_event=warnings.append), warnings


async def test_steps_are_taken_in_order_and_their_prompts_counted(write):
    folder = await write(groups(0, 2), groups(3, 4))
    rows = [{"step": 1, "rollout/skipped/prompt_too_long": 1}, {"step": 2, "rollout/raw_reward": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    replay, warnings = opened(folder)
    assert warnings == []
    assert (replay.num_steps, replay.next_ordinal, replay.version) == (2, 0, 0)
    for step, (ids, next_ordinal, skipped) in enumerate(
        [(["g0", "g2"], 3, {"prompt_too_long": 1}), (["g3", "g4"], 5, {})]
    ):
        assert [outcome.group.id for outcome in await replay.take()] == ids
        # The policy that trains is not behind the one that played.
        assert (replay.next_ordinal, replay.version) == (next_ordinal, 3)
        replay.advance(step + 1, version=step + 1)
        assert replay.version == step + 1
        assert replay.take_skipped() == skipped
    resumed, _ = opened(folder)
    resumed.resume(1, version=1, next_ordinal=3)
    assert [outcome.group.id for outcome in await resumed.take()] == ["g3", "g4"]


async def test_the_last_step_of_a_run_that_was_stopped_is_left_out(write):
    for last in (stopped(2, 3), [*groups(2), *stopped(3)], groups(2), groups(2, 3, size=1)):
        replay, warnings = opened(await write(groups(0, 1), last), num_rollout=5)
        assert replay.num_steps == 1
        (warning,) = warnings
        assert "holds 1 of num_rollout = 5 steps; the training ends after these" in warning
        for path in replay.folder.rglob("*.gz"):
            path.unlink()


async def test_a_step_in_the_middle_that_is_incomplete_is_one_sentence(write):
    replay, _ = opened(await write(groups(0, 1), groups(2), groups(4, 5)))
    await replay.take()
    replay.advance(1, version=1)
    with pytest.raises(ConfigError, match=r"step_000002.jsonl.gz is incomplete; replay fewer steps"):
        await replay.take()


@pytest.mark.parametrize(
    ("steps", "settings", "sentence"),
    [
        ((), {}, "its journal holds no complete step; name the folder of a run that `agentrl train` or"),
        ((stopped(0, 1),), {}, "its journal holds no complete step"),
        (
            (groups(0, 1, token=10),),
            {},
            "holds token 10, and the model has 10 tokens: it was played with another",
        ),
    ],
)
async def test_a_journal_that_cannot_be_replayed_is_one_sentence(write, steps, settings, sentence):
    folder = await write(*map(list, steps))
    with pytest.raises(ConfigError, match=sentence):
        opened(folder, **settings)


async def test_a_folder_without_a_run_and_a_damaged_file_are_one_sentence(write, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: there is no config\.toml in it"):
        opened(tmp_path)
    folder = await write(groups(0, 1), groups(2, 3))
    path = folder / "trajectories" / "step_000001.jsonl.gz"
    members.append(path, [b"{}\n"], at=path.stat().st_size)
    with pytest.raises(ConfigError, match=r"cannot be replayed: .* holds no entry of a journal"):
        opened(folder)


async def test_a_replay_names_what_differs_from_the_run_that_played(write):
    folder = await write(groups(0, 1), groups(2, 3))
    _, warnings = opened(folder, env="Other-v0")
    assert "was played in E-v0; Other-v0 gives the limits" in warnings[0]
    assert "other settings of the initial weights" in warnings[1]
    assert "other settings of the initial weights" in opened(folder, seed=1)[1][0]
    assert "other settings of the initial weights" in opened(folder, warm_start_steps=1)[1][0]
    assert opened(folder, advantage_estimator="rloo", lr=1.0)[1] == []


async def test_an_estimator_that_compares_siblings_refuses_groups_of_one(write):
    folder = await write(
        groups(0, 1, size=1), n_samples_per_prompt=1, advantage_estimator="reinforce_plus_plus"
    )
    with pytest.raises(ConfigError, match=r"`grpo` compares siblings, and groups in .* are of one"):
        opened(folder)
    assert opened(folder, advantage_estimator="ppo", num_rollout=1)[1] == []


async def test_a_journal_of_older_tokens_needs_a_correction(write):
    folder = await write(groups(0, 1), groups(2, 3), max_staleness=2, correction="tis")
    with pytest.raises(
        ConfigError, match=r"played with max_staleness = 2, trains on tokens of older weights"
    ):
        opened(folder)
    assert opened(folder, i_accept_bias=True)[1] == []
    config = load_config(None, {"env": "E-v0", "replay": str(folder), "i_accept_bias": True})
    algorithm = algorithm_of(config, Talk())
    assert (algorithm.max_staleness, algorithm.roles) == (2, ("old",))


async def test_another_journal_than_the_one_that_a_run_began_with_is_refused(write):
    replay, _ = opened(await write(groups(0, 1), groups(2, 3)))
    replay.check(replay.fingerprint)
    with pytest.raises(ConfigError, match="is not the journal that the run began with"):
        replay.check("another")
