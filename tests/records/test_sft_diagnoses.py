"""The diagnoses of supervised training, on losses made by hand at the edges of the thresholds.

`tests/flow/test_sft.py` has those of whole runs.
"""

from __future__ import annotations

import math
import random
import time
from statistics import median

import pytest

from agentrl.records.diagnoses import MIN_FLAT_STEPS, SFT_CONDITIONS, Diagnoses
from agentrl.records.trends import MetricHistory, RunFacts
from tests.records.test_diagnoses import diagnosed, sentences_of


def supervised(losses, held_out=(), every=10, **metrics):
    """Optimizer steps with these losses, evaluated before the first and after every tenth."""
    rows = [(0, {"eval/loss": held_out[0]})] if held_out else []
    for step, loss in enumerate(losses, start=1):
        rows.append((step, {"train/loss": loss, "train/grad_norm": 1.0, **metrics}))
        if held_out and step % every == 0:
            rows.append((step, {"eval/loss": held_out[step // every]}))
    return rows


def noisy(levels, share=0.03):
    """Losses around these levels, as batches have them."""
    noise = random.Random(0)
    return [level * (1 + share * noise.gauss(0, 1)) for level in levels]


def test_a_loss_that_does_not_fall_is_named(tmp_path):
    assert diagnosed(tmp_path, supervised([2.0] * 60), is_supervised=True) == {
        "loss-flat": 2 * MIN_FLAT_STEPS
    }
    # The more batches differ, the more of them it takes.
    steps = [
        diagnosed(tmp_path, supervised(noisy([2.0] * 300, share)), is_supervised=True)["loss-flat"]
        for share in (0.005, 0.02)
    ]
    assert 2 * MIN_FLAT_STEPS <= steps[0] < steps[1] < 300
    rising = supervised(noisy([2.0 + 0.01 * n for n in range(60)]))
    assert diagnosed(tmp_path, rising, is_supervised=True) == {"loss-flat": 2 * MIN_FLAT_STEPS}


@pytest.mark.parametrize(
    "levels",
    [
        [2.0 * 0.98**n for n in range(300)],
        [0.3 * 0.9995**n for n in range(300)],
        [2.0, 1.0, *[0.5] * 600],
        [2.0] * (2 * MIN_FLAT_STEPS - 1),
    ],
    ids=["it falls", "a trained model's falls a little", "it fell at once", "too few steps"],
)
def test_other_losses_are_not(tmp_path, levels):
    for share in (0.0, 0.03, 0.1):
        assert diagnosed(tmp_path, supervised(noisy(levels, share)), is_supervised=True) == {}


@pytest.mark.parametrize(
    ("held_out", "made"),
    [
        ([2.0, 1.0, 0.8, 0.9, 1.2], {"overfitting": 30}),
        ([2.0, 2.3, 2.5, 2.6, 2.9], {"overfitting": 10}),
        ([2.0, 1.0, 0.8, 0.85, 0.87], {}),
        ([2.0, 1.0, 0.8, 0.7, 0.6], {}),
        ([2.0, 0.04, 0.01, 0.02, 0.029], {}),
    ],
    ids=["it rises again", "from the beginning", "a little", "it falls", "next to nothing"],
)
def test_a_held_out_loss_that_rises_while_training_goes_on_is_overfitting(tmp_path, held_out, made):
    falling = [2.0 * 0.95**n for n in range(40)]
    assert diagnosed(tmp_path, supervised(falling, held_out), is_supervised=True) == made
    # A training that breaks down is another fault.
    assert "overfitting" not in diagnosed(
        tmp_path, supervised(falling[::-1], [*sorted(held_out)]), is_supervised=True
    )


def test_numbers_that_are_not_finite_are_named(tmp_path):
    rows = supervised([2.0 * 0.98**n for n in range(30)], [2.0, 1.8, 1.6, 1.4])
    assert diagnosed(tmp_path, rows, is_supervised=True) == {}
    for broken in (float("nan"), float("inf"), None):
        worse = [(s, row | {"train/grad_norm": broken} if s in (4, 9, 11) else row) for s, row in rows]
        assert diagnosed(tmp_path, worse, is_supervised=True) == {"not-finite": 11}
        assert diagnosed(tmp_path, worse[:12], is_supervised=True) == {}
        evaluated = [*rows, (40, {"eval/loss": broken})]
        assert diagnosed(tmp_path, evaluated, is_supervised=True) == {"not-finite": 40}


def test_a_step_costs_no_more_to_watch_however_long_the_run_is(tmp_path):
    diagnoses, spent = Diagnoses(tmp_path, is_supervised=True), []
    rows = supervised([2.0 * 0.999**n for n in range(10_000)])
    for first in range(0, len(rows), 1000):
        began = time.process_time()
        for step, row in rows[first : first + 1000]:
            diagnoses.add(step, row)
        spent.append(time.process_time() - began)
    assert median(spent[-3:]) < 3 * median(spent[:3])  # 5.7 times where a step reads all that came before it


def test_none_is_made_of_nothing_and_every_sentence_has_the_form_of_the_others(tmp_path):
    assert all(condition(MetricHistory(), RunFacts()) is None for condition in SFT_CONDITIONS.values())
    faults = [
        [(0, {"eval/loss": math.inf})],
        supervised([2.0, 1.9, 1.8], **{"train/grad_norm": math.nan}),
        supervised([2.0] * 40),
        supervised([2.0 * 0.95**n for n in range(20)], [2.0, 1.0, 1.5]),
    ]
    made = sentences_of(faults, tmp_path, is_supervised=True)
    assert [item.name for item in made] == ["not-finite", *SFT_CONDITIONS]
    assert made[2].text == (
        "the loss does not fall: its mean was 2 over the first 20 steps, and is 2 over the last 20."
    )
