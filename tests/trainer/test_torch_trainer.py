import dataclasses
import math
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.algorithms.weights import token_mean
from agentrl.errors import DivergedError, ModelLoadError
from agentrl.losses import sft_loss
from agentrl.types import Credit, Scores, TrainBatch
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import named_weights, unpack
from agentrl.weights.hf.export import save_model
from tests.trainer.tiny import (
    MASKS,
    SHAPE,
    batch,
    divisor,
    gradients_of,
    llama,
    qwen2,
    qwen3,
    tokenizer,
    trainer,
)

NAMES = {
    f"train/{name}"
    for name in (
        "loss",
        "pg_loss",
        "pg_clipfrac",
        "ppo_kl",
        "entropy_loss",
        "grad_norm",
        "lr",
        "train_rollout_logprob_abs_diff",
        "skipped_steps",
    )
}


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def with_advantages(train_batch: TrainBatch, value: float) -> TrainBatch:
    advantages = tuple(np.full(len(s), value, np.float32) * s.loss_mask for s in train_batch.samples)
    return dataclasses.replace(train_batch, credit=Credit(advantages, token_mean(train_batch.samples)))


@pytest.mark.parametrize("make", [qwen3, qwen2, llama])
@pytest.mark.parametrize("max_tokens", [1, 11, 1000])
async def test_scores_are_the_logprobs_of_every_token_at_its_samples_temperature(make, max_tokens):
    model, train_batch = make(), batch()
    scores = await trainer(model, max_tokens_per_gpu=max_tokens).score(train_batch.samples)
    for sample, logprobs in zip(train_batch.samples, scores.proximal, strict=True):
        ids = torch.tensor(sample.token_ids.tolist())
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0] / divisor(sample)
        expected = [0.0] + [float(logits[t - 1].log_softmax(0)[ids[t]]) for t in range(1, len(ids))]
        assert logprobs.dtype == np.float32
        assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 1000])
async def test_statistics_of_the_policy_are_those_of_its_distributions(max_tokens):
    model, train_batch = qwen3(), batch()
    scored = trainer(model, max_tokens_per_gpu=max_tokens)
    scores = await scored.score(train_batch.samples, statistics=True)
    plain = await scored.score(train_batch.samples)
    assert (plain.entropy, plain.sum_pi_squared) == (None, None)
    for i, sample in enumerate(train_batch.samples):
        ids = torch.tensor(sample.token_ids.tolist())
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0] / divisor(sample)
        pi = logits[:-1].double().softmax(-1)
        assert scores.proximal[i].tolist() == plain.proximal[i].tolist()
        assert scores.entropy[i][1:].tolist() == pytest.approx((-pi * pi.log()).sum(-1).tolist(), abs=1e-5)
        assert scores.sum_pi_squared[i][1:].tolist() == pytest.approx((pi**2).sum(-1).tolist(), abs=1e-5)
        assert scores.entropy[i][0] == scores.sum_pi_squared[i][0] == 0


async def test_scoring_leaves_no_gradient():
    model = qwen3()
    await trainer(model).score(batch().samples)
    assert all(p.grad is None for p in model.parameters())


async def test_an_update_makes_what_paid_likelier_and_what_did_not_less_likely():
    for sign in (1.0, -1.0):
        torch_trainer, train_batch = trainer(qwen3(), lr=1e-3), with_advantages(batch(), sign)
        before = await torch_trainer.score(train_batch.samples)
        train_batch = dataclasses.replace(train_batch, scores=before)
        await torch_trainer.update(train_batch)
        after = await torch_trainer.score(train_batch.samples)
        moved = [
            float((new - old)[s.loss_mask].sum())
            for new, old, s in zip(after.proximal, before.proximal, train_batch.samples, strict=True)
        ]
        assert sign * sum(moved) > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
async def test_imitation_learns_its_batch_by_heart(optimizer):
    torch_trainer, train_batch = (
        trainer(qwen3(torch.float32), sft_loss, lr=1e-2, optimizer=optimizer),
        batch(),
    )
    train_batch = with_advantages(train_batch, 0.0)
    losses = [(await torch_trainer.update(train_batch)).metrics["train/loss"] for _ in range(60)]
    assert losses[0] > 2.0
    assert losses[-1] < 0.2


async def test_metrics_bear_the_fields_names():
    torch_trainer = trainer(qwen3(), lr=1e-3, lr_warmup_iters=2)
    first, second = await torch_trainer.update(batch()), await torch_trainer.update(batch())
    assert first.metrics.keys() == NAMES
    assert [r.metrics["train/lr"] for r in (first, second)] == [0.5e-3, 1e-3]
    assert all(isinstance(value, float) and math.isfinite(value) for value in first.metrics.values())
    train_batch = batch()
    on_mask = [
        abs(new - engine)
        for s, scored in zip(
            train_batch.samples, (await trainer(qwen3()).score(train_batch.samples)).proximal, strict=True
        )
        for new, engine in zip(scored[s.loss_mask], s.logprobs[s.loss_mask], strict=True)
    ]
    assert first.metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(np.mean(on_mask), rel=1e-5)


async def test_a_decay_is_spread_over_all_steps():
    torch_trainer = trainer(qwen3(), lr=1.0e-3, lr_decay_style="linear", total_steps=2)
    assert [(await torch_trainer.update(batch())).metrics["train/lr"] for _ in range(3)] == [
        1e-3,
        0.5e-3,
        0.0,
    ]


async def test_a_long_gradient_is_scaled_down_to_the_limit_and_reported_whole():
    norms = []
    for limit in (1e9, 1e-3):
        model = qwen3()
        with gradients_of(model) as gradients_:
            report = await trainer(model, clip_grad=limit).update(batch())
        applied = math.sqrt(sum(float(g.square().sum()) for g in gradients_.values()))
        norms.append((report.metrics["train/grad_norm"], applied))
    assert norms[0][0] == pytest.approx(norms[0][1])
    assert norms[0][0] == pytest.approx(norms[1][0])
    assert norms[1][1] == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
async def test_a_gradient_that_is_not_finite_is_never_applied(poison, optimizer):
    model = qwen3()
    torch_trainer = trainer(model, lr=1e-3, optimizer=optimizer, lr_decay_style="linear", total_steps=4)
    await torch_trainer.update(batch())
    before = weights_of(model)
    train_batch = batch(1)
    train_batch.credit.advantages[0].setflags(write=True)
    train_batch.credit.advantages[0][-1] = poison

    report = await torch_trainer.update(train_batch)
    assert report.metrics["train/skipped_steps"] == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    report = await torch_trainer.update(batch(2))
    assert report.metrics["train/skipped_steps"] == 1
    assert report.metrics["train/lr"] == 0.5e-3
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


async def test_no_gradient_is_carried_from_one_step_to_the_next():
    fresh, after = qwen3(), qwen3()
    second = trainer(after, lr=1e-30)
    await second.update(batch(1))
    with gradients_of(after) as after_others:
        await second.update(batch(2))
    with gradients_of(fresh) as on_its_own:
        await trainer(fresh, lr=1e-30).update(batch(2))
    for name, gradient in on_its_own.items():
        torch.testing.assert_close(after_others[name], gradient)


async def test_a_batch_without_loss_tokens_is_refused():
    with pytest.raises(ValueError, match="loss mask"):
        await trainer(qwen3()).update(batch(0, [[0, 0], [0]]))


async def test_one_masked_token_in_all_is_enough():
    report = await trainer(qwen3(), sft_loss).update(batch(0, [[0], [0, 1], [0, 0]]))
    assert math.isfinite(report.metrics["train/loss"])
    assert report.metrics["train/grad_norm"] > 0


class Recorder:
    """A sink that keeps what it is sent."""

    def __init__(self) -> None:
        self.buckets = []
        self.committed = None

    @asynccontextmanager
    async def begin(self, manifest, version):
        self.manifest, self.version = manifest, version
        yield self

    async def put(self, bucket):
        self.buckets.append(bucket)

    async def commit(self, checksum):
        self.committed = checksum


@pytest.mark.parametrize("make", [qwen3, qwen2, llama])
async def test_published_weights_arrive_bit_for_bit_under_their_names(make):
    model, sink = make(torch.float32), Recorder()
    torch_trainer = trainer(model, lr=1e-2)
    await torch_trainer.update(batch())
    report = await torch_trainer.publish(sink, version=7)

    arrived = {name: tensor for bucket in sink.buckets for name, tensor in unpack(bucket)}
    expected = dict(model.named_parameters())
    assert arrived.keys() == expected.keys() == {spec.name for spec in sink.manifest}
    assert all(torch.equal(arrived[name], p) for name, p in expected.items())
    assert sink.committed == checksum(arrived.items()) == checksum(named_weights(model))
    assert (report.version, sink.version) == (7, 7)
    assert report.num_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert report.seconds > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
async def test_weights_that_are_not_finite_are_not_published(poison):
    model, sink = qwen3(torch.float32), Recorder()
    torch_trainer = trainer(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = poison
    with pytest.raises(
        DivergedError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds weights .* lower lr"
    ):
        await torch_trainer.publish(sink, version=1)
    assert sink.committed is None


class FullDisk:
    def save_pretrained(self, directory) -> None:
        raise OSError("disk full")


async def test_saved_weights_come_back_through_transformers(tmp_path):
    model = qwen3(torch.float32)
    target = tmp_path / "runs" / "checkpoint"
    await trainer(model).save(str(target))
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert all(torch.equal(p, dict(loaded.named_parameters())[name]) for name, p in model.named_parameters())
    assert AutoTokenizer.from_pretrained(target).encode("w3 w5") == [3, 5]
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint"]


async def test_saving_again_replaces_and_leaves_nothing_beside(tmp_path):
    target = tmp_path / "checkpoint"
    model = qwen3(torch.float32)
    torch_trainer = trainer(model)
    await torch_trainer.save(str(target))
    (target / "stale").touch()
    (tmp_path / ".checkpoint.coming").mkdir()
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)
    await torch_trainer.save(str(target))
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert torch.all(loaded.model.norm.weight == 2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert not (target / "stale").exists()


def test_a_save_that_fails_leaves_the_old_checkpoint_whole(tmp_path):
    target = tmp_path / "checkpoint"
    model = qwen3(torch.float32)
    save_model(model, tokenizer(), str(target))
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)
    with pytest.raises(OSError, match="disk"):
        save_model(model, FullDisk(), str(target))
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert torch.all(loaded.model.norm.weight == 1.0)


async def test_saving_is_silent(tmp_path, capfd):
    await trainer(qwen3(torch.float32)).save(str(tmp_path / "checkpoint"))
    assert capfd.readouterr() == ("", "")


def test_weights_in_half_precision_are_refused_in_a_sentence():
    with pytest.raises(ModelLoadError, match="load it in float32"):
        trainer(qwen3(torch.bfloat16))


async def test_dropout_is_off_so_that_scores_repeat():
    config = Qwen3Config(**SHAPE, attention_dropout=0.5)
    model = Qwen3ForCausalLM(config).train()
    torch_trainer = trainer(model)
    first, second = [await torch_trainer.score(batch(0, MASKS).samples) for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(first.proximal, second.proximal, strict=True))
    assert isinstance(first, Scores)
