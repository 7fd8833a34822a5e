"""The Megatron trainer does what the torch trainer does, on several processes, and leaves none behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.errors import EngineError, TrainerError
from agentrl.losses import KlTerm, PolicyLoss, ValueLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.plan import MegatronPlan
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch import AuxiliaryModels, Critic, TorchTrainer, critic_over
from agentrl.types import ROUTED_EXPERTS
from agentrl.weights.hf.export import save_model
from tests.engine.routes import routes_of
from tests.trainer.megatron.launching import megatron_trainer
from tests.trainer.megatron.models import model_of
from tests.trainer.routes import routed
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, settings, tokenizer

STEPS = {
    "lr": 1e-2,
    "lr_warmup_iters": 2,
    "lr_decay_style": "linear",
    "clip_grad": 0.5,
    "max_tokens_per_gpu": 20,
}
LAYOUTS = {
    "TP2": {"tensor_model_parallel_size": 2},
    "DP2": {},
    "PP2, virtual": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "CP2": {"context_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
    # Of all else the optimizer's state is sharded over four ranks, of an expert over two.
    "EP2 x DP2": {"expert_model_parallel_size": 2, "ranks": 4},
    "TP2+SP, ETP1": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    },
    # Both ranks have a part of each expert, and all of its last bias.
    "ETP2, biases": {"expert_tensor_parallel_size": 2},
}


def kind_for(layout: str) -> str:
    """A kind of model that can be laid out so."""
    if "biases" in layout:
        return "gpt_oss"
    return "qwen3_moe" if "E" in layout else "qwen3"


# Of metrics and logprobs after two steps, and of weights relative to their norm. With experts the torch
# trainer's own differ by up to 1.8e-3 and 7e-5, where each weight that it begins with is changed by 1e-7 of
# itself (GSPO, four draws).
NOISE = {"qwen3": (2e-4, 1e-4), "qwen3_moe": (4e-3, 3e-4), "gpt_oss": (4e-3, 3e-4)}


LOSSES = {
    "grpo": PolicyLoss(entropy_coef=0.01, kl=KlTerm(0.1)),
    "gspo": PolicyLoss(objective="gspo", eps_clip=3e-4, eps_clip_high=4e-4),
}


class Breaks:
    """A loss that fails where it runs."""

    def __call__(self, outputs, inputs):
        raise RuntimeError("the loss has a mistake")


CRITIC = ValueLoss(value_clip=0.3)


def learns(**changes):
    return settings(**{"weight_decay": 0.1, **STEPS, **changes})


@contextmanager
def trainer_on(
    folder: Path,
    kind: str = "qwen3",
    loss=LOSSES["grpo"],
    *,
    ref=True,
    critic=False,
    ranks=2,
    bf16=False,
    models=(),
    changes=(),
    **sizes,
):
    how = {"bf16": bf16, **dict(changes)}
    model = folder / "model"
    save_model(model_of(kind), tokenizer(), str(model))
    policy_loss = loss if ref or isinstance(loss, Breaks) else PolicyLoss()
    plan = MegatronPlan(
        layout=MegatronConfig(actor_num_gpus_per_node=ranks, **sizes),
        policy=Learning(policy_loss, learns(**how), 6),
        models={"old": str(model), **({"ref": str(model)} if ref else {}), **dict(models)},
        critic=Learning(CRITIC, learns(**how, lr=3e-2), 6) if critic else None,
        critic_warmup=1,
        moves_reference=ref,
    )
    trainer = megatron_trainer(plan, folder / "ranks")
    try:
        yield trainer
    finally:
        trainer.ranks.close()
        assert not any(alive(pid) for pid in trainer.ranks.pids)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class RecordingSink:
    """A sink that keeps what it is sent; it breaks after some buckets, where it is told to."""

    def __init__(self, breaks: bool = False):
        self.breaks, self.tensors, self.manifest, self.checksum = breaks, {}, None, None

    def begin(self, manifest, version):
        self.manifest = manifest
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    async def put(self, bucket):
        from agentrl.weights.codec import unpack

        if self.breaks:
            raise EngineError("no room")
        self.tensors |= dict(unpack(bucket))

    async def commit(self, checksum):
        self.checksum = checksum


async def both(folder, kind, loss, **sizes):
    """Three steps of both trainers; the reports of each, the scores, the weights at the end."""
    train_batch, model = with_returns(batch()), model_of(kind)
    critic = Critic(critic_over(model_of(kind)), Learning(CRITIC, learns(lr=3e-2), 6), warmup=1)
    roles = ("old", "ref", "values") if sizes.get("critic") else ("old", "ref")
    plain = TorchTrainer(
        model,
        loss,
        learns(),
        tokenizer=tokenizer(),
        total_steps=6,
        auxiliary=AuxiliaryModels(
            critic if sizes.get("critic") else None, ref=model_of(kind), moves_reference=True
        ),
    )
    results = []
    with trainer_on(folder, kind, loss, **sizes) as spread:
        for trainer in (plain, spread):
            reports, scores = [], []
            for _ in range(3):
                scores.append(await trainer.score(train_batch.samples, roles, statistics=True))
                scores_ = replace(train_batch.scores, ref=scores[-1].ref, values=scores[-1].values)
                reports.append(await trainer.update(replace(train_batch, scores=scores_)))
                await trainer.move_reference(0.5)
            sink = RecordingSink()
            published = await trainer.publish(sink, version=3)
            assert published.num_bytes == sum(t.nbytes for t in sink.tensors.values())
            results.append((reports, scores, sink))
    return results


def assert_same(plain, spread, kind="qwen3"):
    noise, of_weights = NOISE[kind]
    for ours, theirs in zip(spread[0], plain[0], strict=True):
        assert ours.num_tokens == theirs.num_tokens
        assert ours.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            assert ours.metrics[name] == pytest.approx(value, rel=noise, abs=2e-5), name
    for ours, theirs in zip(spread[1], plain[1], strict=True):
        for role in ("proximal", "ref", "values", "entropy", "sum_pi_squared"):
            assert (getattr(ours, role) is None) == (getattr(theirs, role) is None)
            for a, b in zip(getattr(ours, role) or (), getattr(theirs, role) or (), strict=True):
                np.testing.assert_allclose(a, b, atol=noise)
    ours, theirs = spread[2], plain[2]
    assert {spec.name: spec for spec in ours.manifest} == {spec.name: spec for spec in theirs.manifest}
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        # What is added to all keys alike changes no attention: where positions do not turn it, their bias
        # has a gradient of nothing but noise, and Adam divides a gradient by its size, whatever it is.
        tolerance = 1e-2 if name.endswith("k_proj.bias") else of_weights
        assert (ours.tensors[name] - tensor).norm() <= tolerance * tensor.norm(), name


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
async def test_it_trains_as_the_torch_trainer_does(tmp_path, layout, loss):
    kind = kind_for(layout)
    assert_same(*await both(tmp_path, kind, LOSSES[loss], **LAYOUTS[layout]), kind)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_critic_learns_as_the_torch_trainers_does(tmp_path, layout):
    kind = kind_for(layout)
    plain, spread = await both(tmp_path, kind, LOSSES["grpo"], critic=True, **LAYOUTS[layout])
    assert_same(plain, spread, kind)
    # Alone in the first step, then beside the policy; and it has learned something.
    assert "train/critic_grad_norm" in spread[0][0].metrics
    assert "train/grad_norm" not in spread[0][0].metrics
    assert {"train/grad_norm", "train/value_loss"} <= spread[0][1].metrics.keys()
    assert all(not values.any() for values in spread[1][0].values)
    assert any(values.any() for values in spread[1][2].values)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["DP2", "CP2", "EP2", "EP2 x DP2", "TP2+SP, ETP1"])
async def test_the_optimizers_state_may_be_whole_on_every_rank(tmp_path, layout):
    kind, sizes = kind_for(layout), {"use_distributed_optimizer": False, **LAYOUTS[layout]}
    assert_same(*await both(tmp_path, kind, LOSSES["grpo"], **sizes), kind)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["EP2", "CP2", "PP2, virtual"])
@pytest.mark.parametrize("replay", ["R2", "R3"])
async def test_routing_is_replayed_as_the_torch_trainer_does(tmp_path, replay, layout):
    """Both report the same experts, and learn through others that are put in their place."""
    kind, random_samples = "qwen3_moe", routed(batch().samples, layers=3, experts=4, k=2)
    train_batch = replace(batch(), samples=random_samples) if replay == "R3" else batch()
    plain = TorchTrainer(
        *(model_of(kind), PolicyLoss(), learns(router_replay=replay)),
        tokenizer=tokenizer(),
        total_steps=6,
    )
    changes, results, reported = {"router_replay": replay}, [], []
    with trainer_on(tmp_path, kind, PolicyLoss(), ref=False, changes=changes, **LAYOUTS[layout]) as spread:
        for trainer in (plain, spread):
            scores = await trainer.score(train_batch.samples)
            reported.append(scores.routed)
            experts = tuple(sample.extras[ROUTED_EXPERTS].values for sample in random_samples)
            planted = replace(train_batch.scores, routed=experts if replay == "R2" else None)
            # The second step is of other weights, and the experts stay.
            reports = [await trainer.update(replace(train_batch, scores=planted)) for _ in range(2)]
            sink = RecordingSink()
            await trainer.publish(sink, version=1)
            results.append((reports, [scores, await trainer.score(train_batch.samples)], sink))
    assert_same(*results, kind)
    if replay == "R3":
        assert reported == [None, None]
        return
    for rows, theirs, sample in zip(reported[1], reported[0], train_batch.samples, strict=True):
        # A row ends before the last token that it predicts.
        end = int(np.flatnonzero(sample.loss_mask)[-1]) if sample.loss_mask.any() else 0
        np.testing.assert_array_equal(np.sort(rows[:end], -1), np.sort(theirs[:end], -1))
        expected = routes_of(model_of(kind), sample.token_ids[:end].tolist()) if end else rows[:0]
        np.testing.assert_array_equal(np.sort(rows[:end], -1), expected)


@pytest.mark.full
async def test_networks_that_rest_are_as_they_were(tmp_path):
    assert_same(*await both(tmp_path, "qwen3", LOSSES["grpo"], critic=True, offload=True, **LAYOUTS["DP2"]))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen2", "llama", "glm4"])
async def test_every_family_trains(tmp_path, kind):
    assert_same(*await both(tmp_path, kind, LOSSES["grpo"], **LAYOUTS["PP2"]))


@pytest.mark.full
async def test_an_engine_serves_what_it_publishes_and_transformers_loads_what_it_saves(tmp_path):
    train_batch = batch()
    with trainer_on(tmp_path, ref=False, **LAYOUTS["PP2, virtual"]) as trainer:
        engine = EmbeddedEngine.from_model(model_of("qwen3"), max_slots=2, max_context_len=64)
        before = await trainer.score(train_batch.samples)
        await trainer.update(train_batch)
        # The engine compares checksums.
        await trainer.publish(engine.sink, version=1)
        assert engine.version == 1
        await engine.close()
        after = await trainer.score(train_batch.samples)
        with pytest.raises(EngineError, match="no room"):
            await trainer.publish(RecordingSink(breaks=True), version=2)
        await trainer.save(str(tmp_path / "saved"))
        assert (await trainer.score(train_batch.samples)).proximal[3].tolist() == after.proximal[
            3
        ].tolist(), "it goes on"
    assert max(np.abs(a - b).max() for a, b in zip(before.proximal, after.proximal, strict=True)) > 1e-3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    plain = TorchTrainer(loaded, LOSSES["grpo"], settings(), tokenizer=tokenizer(), total_steps=6)
    for ours, theirs in zip(after.proximal, (await plain.score(train_batch.samples)).proximal, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").vocab_size == tokenizer().vocab_size
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.full
async def test_a_teacher_is_another_model(tmp_path):
    train_batch, wise = batch(), model_of("qwen3")
    with torch.no_grad():
        wise.model.norm.weight.mul_(1.5)
    save_model(wise, tokenizer(), str(tmp_path / "teacher"))
    plain = TorchTrainer(
        model_of("qwen3"),
        PolicyLoss(),
        learns(),
        tokenizer=tokenizer(),
        total_steps=6,
        auxiliary=AuxiliaryModels(teacher=wise),
    )
    models = {"teacher": str(tmp_path / "teacher")}
    with trainer_on(tmp_path, ref=False, models=models, ranks=1) as trainer:
        scored = [
            await trained.score(train_batch.samples, ("old", "teacher")) for trained in (trainer, plain)
        ]
        for role in ("proximal", "teacher"):
            for ours, theirs in zip(*(getattr(trained, role) for trained in scored), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert (
            max(np.abs(a - b).max() for a, b in zip(scored[0].proximal, scored[0].teacher, strict=True)) > 0.1
        )


@pytest.mark.full
async def test_a_gradient_that_is_no_number_is_thrown_away(tmp_path):
    train_batch = batch()
    poisoned = replace(
        train_batch,
        credit=replace(
            train_batch.credit, advantages=tuple(a * np.nan for a in train_batch.credit.advantages)
        ),
    )
    with trainer_on(tmp_path, ref=False, **LAYOUTS["TP2"]) as trainer:
        before = await trainer.score(train_batch.samples)
        report = await trainer.update(poisoned)
        assert report.metrics["train/skipped_steps"] == 1
        after = await trainer.score(train_batch.samples)
        assert all((a == b).all() for a, b in zip(before.proximal, after.proximal, strict=True))
        await trainer.update(train_batch)
        moved = await trainer.score(train_batch.samples)
        assert not all((a == b).all() for a, b in zip(before.proximal, moved.proximal, strict=True))


@pytest.mark.full
async def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path):
    with trainer_on(tmp_path, ref=False, **LAYOUTS["TP2"]) as trainer:
        victim = trainer.ranks.pids[1]

        async def strike():
            await asyncio.sleep(0.3)
            os.kill(victim, signal.SIGKILL)

        loop = asyncio.get_running_loop()
        # In mid-update: the driver's thread waits for answers meanwhile.
        killing = loop.run_in_executor(None, lambda: asyncio.run(strike()))
        began = time.monotonic()

        async def for_a_minute():
            while time.monotonic() - began < 60:
                await trainer.update(batch())

        with pytest.raises(TrainerError, match=rf"rank 1 .*process {victim}\) was ended by SIGKILL"):
            await for_a_minute()
        await killing
        assert not any(alive(pid) for pid in trainer.ranks.pids)


@pytest.mark.full
async def test_a_rank_that_fails_says_why(tmp_path):
    with trainer_on(tmp_path, loss=Breaks(), ref=False, ranks=1) as trainer:
        with pytest.raises(TrainerError, match=r"rank 0 .* has failed: RuntimeError: the loss has a mistake"):
            await trainer.update(batch())
        assert "Traceback" in (tmp_path / "ranks" / "rank-0.log").read_text()


@pytest.mark.full
async def test_greedy_samples_are_refused_and_no_rank_is_lost(tmp_path):
    train_batch = batch()
    greedy = replace(
        train_batch,
        samples=tuple(
            replace(sample, temperatures=0 * sample.temperatures) for sample in train_batch.samples
        ),
    )
    with trainer_on(tmp_path, ref=False, ranks=1) as trainer:
        with pytest.raises(ValueError, match="were sampled at temperature 0; sample training data above 0"):
            await trainer.update(greedy)
        with pytest.raises(ValueError, match="were sampled at temperature 0"):
            await trainer.score(greedy.samples)
        assert (await trainer.update(train_batch)).metrics["train/skipped_steps"] == 0


@pytest.mark.full
async def test_nobody_scores_in_a_role_that_nobody_has(tmp_path):
    with trainer_on(tmp_path, ref=False, ranks=1) as trainer:
        assert "attention: torch" in (tmp_path / "ranks" / "rank-0.log").read_text()
        with pytest.raises(ValueError, match="no network in the role `ref`"):
            await trainer.score(batch().samples, ("ref",))
        empty = replace(
            batch(), samples=tuple(replace(s, loss_mask=s.loss_mask * False) for s in batch().samples)
        )
        with pytest.raises(ValueError, match="no token of the batch is under the loss mask"):
            await trainer.update(empty)
