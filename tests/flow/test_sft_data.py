"""What SFT imitates: conversations and episodes, those that it leaves out, and its errors."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

import agentrl
from agentrl.errors import AgentRLError, ConfigError
from agentrl.records import Entry, Journal, Outcome, read_journal
from agentrl.types import Author, Ending
from agentrl.weights.hf.source import open_source
from tests.data.files import write_lines
from tests.flow.runs import SHAPE, train
from tests.flow.sft import conversation, conversations, reader_of, settings_of, sft

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    conversations(folder / "c.jsonl")
    return folder


@pytest.fixture(scope="module")
def whole(place):
    """A run, for its tokenizer and its weights."""
    return sft(place / "whole", **settings_of(place))


def test_a_message_that_is_switched_off_is_read_and_not_trained(whole, tmp_path):
    write_lines(tmp_path / "on.jsonl", [conversation("left")])
    write_lines(tmp_path / "off.jsonl", [conversation("left", step_loss_mask=0)])

    async def only(name):
        imitated = await reader_of(whole.folder / "checkpoint").read([str(tmp_path / name)], "sft_data")
        ((sample,),) = imitated.units
        return sample

    on, off = asyncio.run(only("on.jsonl")), asyncio.run(only("off.jsonl"))
    assert on.token_ids.tolist() == off.token_ids.tolist()
    assert on.author.tolist() == off.author.tolist()
    decode = open_source(whole.folder / "checkpoint").decode
    assert decode(on.token_ids[on.loss_mask]) == "<press> left</press><answer> dust</answer>"
    assert decode(off.token_ids[off.loss_mask]) == "<press> left</press>"


def test_long_conversations_are_left_out_and_counted(place, tmp_path, capsys):
    rows = [conversation("left") for _ in range(6)]
    rows[2]["messages"][0]["content"] = "press 1 " * 60
    file = write_lines(tmp_path / "c.jsonl", rows)
    result = sft(tmp_path, sft_data=str(file), quiet=False)
    assert (result.taken, result.left_out) == (5, {"longer than 64 tokens": 1})
    printed = " ".join(capsys.readouterr().out.split())
    assert "sft_data: 5 taken (30 trained tokens), 1 left out (1 longer than 64 tokens)." in printed
    assert "Nothing is held out, so no loss is measured" in printed
    assert result.losses == {}


def test_what_the_format_has_no_form_for_is_left_out(whole, tmp_path):
    rows = [conversation("left"), conversation("left"), conversation("right")]
    rows[1]["messages"][1]["content"] = "I press it."
    rows[2]["messages"][1]["tool_calls"][0]["function"]["name"] = "pull"
    file = write_lines(tmp_path / "c.jsonl", rows)
    checkpoint = str(whole.folder / "checkpoint")
    result = sft(tmp_path, sft_data=str(file), hf_checkpoint=checkpoint)
    assert (result.taken, result.left_out) == (1, {"read back differently in this format": 2})


@pytest.fixture(scope="module")
def played(place, whole):
    """A run of RL whose episodes are imitated, at temperature 0.7."""
    checkpoint = str(whole.folder / "checkpoint")
    return train(
        "Bandit",
        place,
        "played",
        hf_checkpoint=checkpoint,
        num_rollout=2,
        eval_episodes=4,
        rollout_temperature=0.7,
    ).folder


def test_episodes_are_imitated_with_their_own_tokens(played, tmp_path):
    entries = [e for n in (1, 2) for e in read_journal(played / "trajectories" / f"step_{n:06d}.jsonl.gz")]
    good = [e for e in entries if e.verdicts[0].total >= 1 and e.episode.ending is Ending.COMPLETED]
    checkpoint = str(played / "checkpoint")
    result = sft(tmp_path, sft_data=str(played), min_reward=1.0, hf_checkpoint=checkpoint)
    assert result.taken == len(good) > 0
    assert result.taken + sum(result.left_out.values()) == len(entries) == 128
    assert set(result.left_out) <= {"below min_reward = 1", "truncated", "failed"}

    async def read():
        return await reader_of(checkpoint, min_reward=1.0).read([str(played)], "sft_data")

    imitated = asyncio.run(read())
    for (sample,), entry in zip(imitated.units, good, strict=True):
        (trajectory,) = entry.episode.trajectories
        parts = [
            part
            for turn in trajectory.turns
            for part in (turn.tokens.world_ids, turn.tokens.completion.token_ids)
        ]
        assert sample.token_ids.tolist() == np.concatenate(parts).tolist()
        assert (sample.loss_mask == (sample.author == Author.POLICY)).all()
        # The loss is the model's own, whatever the episode was sampled at.
        assert (sample.temperatures == 1).all()


def test_a_slice_of_a_journal_and_its_evaluations_are_named_by_their_file(played, tmp_path):
    file = played / "trajectories" / "step_000001.jsonl.gz"
    held_out = next((played / "trajectories").glob("eval_greedy*"))
    checkpoint = str(played / "checkpoint")
    result = sft(
        tmp_path, sft_data=f"{file}@[:10]", eval_sft_data=str(held_out), hf_checkpoint=checkpoint, num_epoch=1
    )
    assert result.taken + sum(result.left_out.values()) == 10
    assert set(result.losses) == {0, 1}


async def test_an_episode_that_cannot_be_imitated_is_counted_with_its_reason(played, tmp_path):
    entries = [*read_journal(played / "trajectories" / "step_000001.jsonl.gz")]
    done = next(e for e in entries if e.episode.ending is Ending.COMPLETED)

    def changed(name, **fields):
        verdicts = tuple(dataclasses.replace(v, episode_id=name) for v in done.verdicts)
        return dataclasses.replace(
            done, episode=dataclasses.replace(done.episode, id=name, **fields), verdicts=verdicts
        )

    mute = [
        dataclasses.replace(t, turns=tuple(dataclasses.replace(turn, tokens=None) for turn in t.turns))
        for t in done.episode.trajectories
    ]
    failure = agentrl.types.Failure("tool", "timeout", "late")
    written = [
        changed("cut", ending=Ending.TRUNCATED),
        Entry(
            changed("broken").episode
            and dataclasses.replace(changed("broken").episode, ending=Ending.FAILED, failure=failure),
            (),
            Outcome.DROPPED,
            "tool_timeout",
        ),
        changed("mute", trajectories=tuple(mute)),
        Entry(changed("stopped").episode, (), Outcome.DROPPED, "run_stopped"),
        changed("good"),
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").symlink_to(played / "checkpoint")
    async with Journal(tmp_path / "run") as journal:
        await journal.write_step(1, written)
    reader = reader_of(played / "checkpoint", min_reward=done.verdicts[0].total)
    imitated = await reader.read([str(tmp_path / "run")], "sft_data")
    assert len(imitated.units) == 1
    assert imitated.left_out == {"truncated": 1, "failed": 1, "played without tokens": 1, "not scored": 1}
    # Without a least reward, one that nobody scored is as good as any other.
    every = await reader_of(played / "checkpoint").read([str(tmp_path / "run")], "sft_data")
    assert len(every.units) == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "sft_data is missing: name a file of conversations"),
        ({"sft_data": "nowhere.jsonl"}, "there is no file or folder nowhere.jsonl"),
        (
            {"sft_data": "{c}", "rollout_max_context_len": 5},
            "longer than 5 tokens); raise rollout_max_context_len",
        ),
        ({"sft_data": "{c}", "eval_sft_data": "{c}@[200:]"}, "holds no conversations; check the file and"),
        ({"sft_data": "{played}", "min_reward": 7.5}, "min_reward = 7.5"),
        ({"sft_data": "{played}", "min_reward": 7.5}, "the highest reward is 1: lower min_reward"),
        ({"sft_data": "{c}", "min_reward": 1.0}, "min_reward has no effect without episodes in sft_data"),
        (
            {"sft_data": "{played}", "messages_key": "x"},
            "messages_key has no effect without files in sft_data",
        ),
        (
            {"sft_data": "{c}", "num_rollout": 3},
            "num_rollout has no effect with agentrl sft; use agentrl train",
        ),
        ({"sft_data": "{c}", "sft_lr": 1e-3}, "lr has no effect with sft_lr; drop that, or leave lr out"),
        ({"sft_data": "{c}", "env": "HopSerch-v0"}, "Did you mean `HopSearch-v0`?"),
        ({"sft_data": "{played}/trajectories/x.jsonl.gz"}, "x.jsonl.gz cannot be read as a journal"),
    ],
)
def test_a_mistake_is_one_sentence(place, played, tmp_path, settings, sentence):
    names = {"c": place / "c.jsonl", "played": played}
    filled = {k: v.format(**names) if isinstance(v, str) else v for k, v in settings.items()}
    checkpoint = {"hf_checkpoint": str(played / "checkpoint")} if "{played}" in str(settings) else {}
    with pytest.raises(AgentRLError) as caught:
        sft(tmp_path, **{**checkpoint, **filled})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x-sft" / "metrics.jsonl").exists()


def test_episodes_of_another_tokenizer_are_refused(played, place, tmp_path):
    with pytest.raises(
        ConfigError, match=r"tokens of another tokenizer .*--hf-checkpoint .*played/checkpoint"
    ):
        sft(tmp_path, sft_data=[str(place / "c.jsonl"), str(played)], vocab_size=268)


def test_a_tokenizer_without_a_chat_template_is_refused_where_one_is_needed(whole, place, tmp_path):
    shutil.copytree(whole.folder / "checkpoint", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(agentrl.UserError, match="the tokenizer has no chat template"):
        sft(tmp_path, sft_data=str(place / "c.jsonl"), hf_checkpoint=str(tmp_path / "model"), dialect="chat")


def test_without_an_environment_the_chat_dialect_needs_none(place, tmp_path):
    """A fresh model, whose tokenizer is trained on the conversations."""
    small = {**SHAPE, "inline": True, "num_epoch": 1, "quiet": True}
    result = agentrl.sft(sft_data=str(place / "c.jsonl"), output_dir=str(tmp_path), **small)
    assert result.folder == tmp_path / "seed0-sft"
    source = open_source(result.folder / "checkpoint")
    assert source.tokenizer.tokenize(" press") == ["Ġpress"]
    assert "env" not in tomllib.loads((result.folder / "config.toml").read_text())["env"]
    with pytest.raises(ConfigError, match="dialect = inline needs an environment"):
        agentrl.sft(
            sft_data=str(place / "c.jsonl"), output_dir=str(tmp_path), name="y", dialect="inline", **small
        )
    with pytest.raises(ConfigError, match="tools has no effect without env; name it"):
        agentrl.sft(
            sft_data=str(place / "c.jsonl"), output_dir=str(tmp_path), name="y", tools=["python"], **small
        )
