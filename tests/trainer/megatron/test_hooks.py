"""Functions by path in Megatron's ranks: each is called in every rank, in its place."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from agentrl.errors import ConfigError, TrainerError
from tests.trainer.megatron.models import model_of
from tests.trainer.megatron.test_megatron_trainer import trainer_on
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch

HERE = "tests.trainer.megatron.hooked"
LAYOUT = {"tensor_model_parallel_size": 2}


@pytest.fixture
def notes(tmp_path, monkeypatch):
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv("AGENTRL_TEST_NOTES", str(folder))
    return lambda: [path.read_text().splitlines() for path in sorted(folder.glob("*.txt"))]


async def steps_of(folder, **settings):
    """Two steps; the weights' checksum, the reports, and the reference's scores before."""
    train_batch = with_returns(batch())
    with trainer_on(folder, **LAYOUT, **settings) as trainer:
        scores = await trainer.score(train_batch.samples, ("old", "ref", "values"))
        scored = replace(train_batch.scores, ref=scores.ref, values=scores.values)
        reports = [await trainer.update(replace(train_batch, scores=scored)) for _ in range(2)]
        await (await trainer.save_state(str(folder / "state")))
        return [report.metrics for report in reports], scores


async def test_each_rank_calls_them_in_their_places_and_a_provider_that_changes_nothing_changes_no_bit(
    tmp_path, notes
):
    plain, before = await steps_of(tmp_path / "plain", critic=True)
    hooked, scores = await steps_of(
        tmp_path / "hooked",
        critic=True,
        custom_megatron_init_path=f"{HERE}:begun",
        custom_model_provider_path=f"{HERE}:noted_model",
        custom_megatron_before_train_step_hook_path=f"{HERE}:steps",
        custom_megatron_after_train_step_hook_path=f"{HERE}:stepped",
        custom_megatron_before_save_hook_path=f"{HERE}:saves",
    )
    assert hooked == plain
    for ours, theirs in zip(scores.proximal, before.proximal, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # The critic learns alone in the first step, then both; policy, critic and reference are three networks.
    learned = [f"{what} {role} True" for role in ("values", "old", "values") for what in ("step", "stepped")]
    expected = ["init 2", *["model of RMSNorm"] * 3, *learned, "saves old 1", "saves values 1"]
    assert notes() == [expected, expected]


async def test_what_a_hook_does_to_a_network_before_it_scores_is_in_the_scores(tmp_path, notes):
    train_batch = batch()
    even = {"custom_megatron_before_log_prob_hook_path": f"{HERE}:even"}
    with trainer_on(tmp_path, ref=False, **LAYOUT, **even) as trainer:
        scores = await trainer.score(train_batch.samples)
    expected = -math.log(model_of("qwen3").config.vocab_size)
    for sample, logprobs in zip(train_batch.samples, scores.proximal, strict=True):
        np.testing.assert_allclose(logprobs[1:], np.full(len(sample) - 1, expected), rtol=1e-5)
    assert notes() == [["score old"]] * 2


@pytest.mark.parametrize(
    ("setting", "name", "sentence"),
    [
        (
            "custom_megatron_before_log_prob_hook_path",
            "mistaken",
            "hooked:mistaken failed in a rank: KeyError",
        ),
        ("custom_model_provider_path", "other_model", "other_model returned a Linear; return a GPTModel"),
        ("custom_megatron_init_path", "nowhere", "no function in Megatron's ranks `.*nowhere`"),
    ],
)
async def test_one_that_fails_is_a_sentence_with_its_name(tmp_path, setting, name, sentence):
    with (
        pytest.raises((TrainerError, ConfigError), match=sentence),
        trainer_on(tmp_path, ref=False, ranks=1, **{setting: f"{HERE}:{name}"}) as trainer,
    ):
        await trainer.score(batch().samples)
