"""The benchmark of the trainer: equal work on all sides, and a figure for every repeat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from agentrl.errors import UserError
from benchmarks.batches import batch_of
from benchmarks.models import tiny_model
from benchmarks.trainer import beside_trl as trl
from benchmarks.trainer import memory, rows
from benchmarks.trainer.context import TrainerContext
from benchmarks.trainer.everything import bench_trainer
from benchmarks.trainer.settings import TrainerBench, long_tailed
from tests.assembly.test_memory import measured
from tests.trainer.tiny import gradients_of

TINY = TrainerBench(
    make=tiny_model,
    threads=1,
    repeats=2,
    prompts=2,
    siblings=2,
    prompt=5,
    new=3,
    row_tokens=600,
    padded=2,
    longest=90,
    head=(512, 16, 3000),
)


@pytest.fixture
def context(tmp_path):
    return TrainerContext(tmp_path, TINY, None, lambda line: None)


async def test_padded_batches_have_the_gradient_of_rows(context, monkeypatch):
    lengths = long_tailed(6, 90)
    batch = batch_of(lengths, 200)
    gradients = []
    for side in (context.updating, lambda batch: rows._padded(context, batch)):
        model = context.model()
        monkeypatch.setattr(TrainerContext, "model", lambda _, model=model: model)
        step = side(batch)
        with gradients_of(model) as found:
            await step()
        gradients.append(found)
        monkeypatch.undo()
    ours, padded = gradients
    assert ours.keys() == padded.keys()
    for name, gradient in ours.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(padded[name], gradient, rtol=1e-3, atol=2e-4 * scale, msg=name)


async def test_the_bare_side_trains_on_every_token(context, monkeypatch):
    batch = batch_of([16] * 4, 200)
    model, seen = context.model(), []
    monkeypatch.setattr(TrainerContext, "model", lambda _: model)
    model.register_forward_hook(lambda _, __, options, out: seen.append((options, out)), with_kwargs=True)
    await rows._bare(context, batch)()
    ids = torch.stack([torch.tensor(sample.token_ids.tolist()) for sample in batch.samples])
    assert torch.equal(torch.cat([options["labels"] for options, _ in seen]), ids)


@pytest.mark.parametrize("scores", [memory._chunked, memory._naive])
def test_the_memory_that_is_counted_is_what_torch_takes(scores, tmp_path):
    tokens, width, vocabulary = head = (2048, 32, 20_000)
    states = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    ids = torch.zeros(tokens, dtype=torch.int64)
    taken = measured(lambda: scores(states, weight, ids).sum().backward(), tmp_path / "trace.json")
    assert memory.peak(scores, head, torch.float32) == pytest.approx(taken, rel=0.05)


def test_both_ways_give_the_same_scores():
    states, weight = torch.randn(9, 8), torch.randn(50, 8)
    ids = torch.arange(9)
    torch.testing.assert_close(memory._chunked(states, weight, ids), memory._naive(states, weight, ids))


def test_a_row_for_each_section_and_none_of_trl_where_there_is_none(monkeypatch):
    lines = []
    result = bench_trainer(None, bench=TINY, on_event=lines.append)
    assert [*result["summary"]] == ["memory", "packed", "bare"]
    assert len(lines) == 3
    _, packed, bare = result["rows"]
    assert [*packed["sides"]] == ["agentrl", "padded"]
    assert [*bare["sides"]] == ["agentrl", "bare"]
    assert [len(side["tokens_per_s"]) for side in packed["sides"].values()] == [2, 2]
    json.dumps(result)
    with pytest.raises(UserError, match="name an interpreter that has trl"):
        bench_trainer(None, only=["step"], bench=TINY, on_event=lines.append)


STAND_IN = """
import json, sys, time
settings = json.loads(sys.argv[-1])
print(json.dumps({"step": 0}), flush=True)
for number, line in enumerate(sys.stdin, 1):
    if settings.get("rows"):
        rows = json.loads(open(settings["rows"]).read())
        assert all(len(row["ids"]) == len(row["mask"]) > row["prompt"] > 0 for row in rows)
        assert all(row["mask"][row["prompt"]] and not any(row["mask"][: row["prompt"]]) for row in rows)
    print(json.dumps({"seconds": 0.0, "step": number}), flush=True)
"""


async def test_steps_of_trl_are_asked_for_in_turns(tmp_path, monkeypatch):
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(trl, "_PROGRAM", program)
    context = TrainerContext(tmp_path, TINY, Path(sys.executable), lambda line: None)
    (ragged,) = await trl.bench_ragged(context)
    assert [*ragged.figures["sides"]] == ["agentrl", "trl"]
    seen = []
    monkeypatch.setattr(trl, "_drawn", lambda group, drawn=trl._drawn: seen.append(drawn(group)) or seen[-1])
    (step,) = await trl.bench_step(context)
    rewards = [[verdict.total for verdict in group.verdicts] for group in seen]
    assert any(len(set(each)) > 1 for each in rewards)
    assert all(len(side["tokens_per_s"]) == 2 for side in step.figures["sides"].values())
