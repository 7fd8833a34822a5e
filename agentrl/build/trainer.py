"""From the configuration to what learns."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.build.config import RunConfig
from agentrl.build.ranks import seat_of
from agentrl.checkpoints.loading import open_directory
from agentrl.checkpoints.source import ModelSource, open_tokenizer
from agentrl.errors import ConfigError
from agentrl.extras import require
from agentrl.losses import Loss, ValueLoss, sft_loss
from agentrl.protocols import Trainer
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.files.checkpoint import Checkpoint
from agentrl.trainer.megatron.launch.guests import Guests
from agentrl.trainer.megatron.launch.members import check_gpus
from agentrl.trainer.megatron.model.shape import check_layout, shape_of
from agentrl.trainer.megatron.plan import Learning, Plan
from agentrl.trainer.megatron.trainer import MegatronTrainer
from agentrl.trainer.torch import Beside, Critic, TorchTrainer, critic_over
from agentrl.types import ScoreRole


def opened_beside(source: ModelSource, config: RunConfig) -> Beside:
    """The networks that the algorithm asks and that are read from a directory, before anything is played.

    Megatron's ranks read their own shards of them: here they are only looked at.

    Raises:
        UserError: one cannot be opened, or has another vocabulary than the policy; or trainer = megatron, and
            its layout does not divide it, or Megatron does not train such a model.
    """
    algorithm = config.algorithm
    judges = [
        None if directory is None or not asked else _judge(directory, source, config)
        for directory, asked in (
            (algorithm.ref_load, algorithm.has_reference),
            (algorithm.opd_teacher_load, algorithm.use_opd),
        )
    ]
    return Beside(None, *judges)


def check_trainable(source: ModelSource, config: RunConfig) -> None:
    """See before anything is played that the trainer can train such a model.

    Raises:
        MissingExtraError: trainer = megatron, and it is not installed.
        ConfigError: its layout does not divide the model, or it wants more GPUs than there are.
        ModelLoadError: Megatron does not train such a model.
    """
    if config.trainer.trainer != "megatron":
        return
    require("trainer = megatron", "megatron")
    if seat_of(config) is None:
        check_gpus(config.megatron.world_size)
    check_layout(shape_of(source.config), config.megatron)


def build_trainer(
    source: ModelSource,
    config: RunConfig,
    loss: Loss,
    opened: Beside,
    folder: Path,
    guests: Guests | None = None,
) -> Trainer:
    """The RL trainer: on the model's own weights, with the networks that the algorithm asks.

    opened: by `opened_beside`. A critic, and a reference that was not opened, begin as the policy is now.
    folder: for what processes of the trainer read and print. guests: those that a launcher started.

    Raises:
        TrainerError: a process of the trainer does not come up.
    """
    if config.trainer.trainer == "megatron":
        return _over_ranks(source, config, loss, folder, guests)
    network = open_directory(source.directory, torch.float32)
    return TorchTrainer(
        network,
        loss,
        config.trainer,
        tokenizer=source.tokenizer,
        total_steps=config.rollout.num_rollout * config.rollout.num_steps_per_rollout,
        beside=_completed(opened, source, network, config),
    )


def _over_ranks(
    source: ModelSource, config: RunConfig, loss: Loss, folder: Path, guests: Guests | None
) -> Trainer:
    algorithm, rollout = config.algorithm, config.rollout
    # Ranks of other machines find it under the same path.
    policy = str(source.directory.resolve())
    models: dict[ScoreRole, str] = {"old": policy}
    if algorithm.has_reference:
        models["ref"] = policy if algorithm.ref_load is None else str(Path(algorithm.ref_load).resolve())
    if algorithm.opd_teacher_load is not None:
        models["teacher"] = str(Path(algorithm.opd_teacher_load).resolve())
    steps = rollout.num_rollout * rollout.num_steps_per_rollout
    plan = Plan(
        layout=config.megatron,
        policy=Learning(loss, config.trainer, steps),
        models=models,
        critic=Learning(ValueLoss(algorithm.value_clip or None), _critic_settings(config), steps)
        if algorithm.advantage_estimator == "ppo"
        else None,
        alone=algorithm.num_critic_only_steps,
    )
    return MegatronTrainer(plan, folder, guests)


def _completed(opened: Beside, source: ModelSource, network: PreTrainedModel, config: RunConfig) -> Beside:
    algorithm, rollout = config.algorithm, config.rollout
    critic, ref = None, opened.ref
    if algorithm.advantage_estimator == "ppo":
        critic = Critic(
            critic_over(network),
            ValueLoss(algorithm.value_clip or None),
            _critic_settings(config),
            total_steps=rollout.num_rollout * rollout.num_steps_per_rollout,
            alone=algorithm.num_critic_only_steps,
        )
    if algorithm.has_reference and ref is None:
        ref = open_directory(source.directory, torch.float32)
    return Beside(critic, ref, opened.teacher)


def _critic_settings(config: RunConfig) -> TrainerConfig:
    return config.trainer.model_copy(update={"lr": config.algorithm.critic_lr or config.trainer.lr})


def _judge(directory: str, source: ModelSource, config: RunConfig) -> PreTrainedModel | None:
    """A model that only says what it thinks of the policy's tokens; None where ranks alone read it."""
    network = None
    if config.trainer.trainer == "megatron":
        _check_readable(directory, config.megatron)
    else:
        network = open_directory(directory, torch.float32)
    if open_tokenizer(directory).get_vocab() != source.tokenizer.get_vocab():
        raise ConfigError(
            f"{directory} has another vocabulary than the policy, so it cannot judge its tokens; choose a "
            "model with the same tokenizer."
        )
    return network


def _check_readable(directory: str, layout: MegatronConfig) -> None:
    with Checkpoint(directory) as checkpoint:
        check_layout(checkpoint.shape, layout)
        # All tensors are there.
        deque(checkpoint.specs(), maxlen=0)


def build_warm_start_trainer(source: ModelSource, config: RunConfig) -> Trainer:
    """The supervised trainer: Muon on the hidden weights, a cosine down to 0, the rest as in RL."""
    section = config.warm_start
    settings = TrainerConfig(
        optimizer="muon",
        lr=section.warm_start_lr,
        lr_decay_style="cosine",
        lr_warmup_iters=min(10, section.warm_start_steps // 10),
        clip_grad=config.trainer.clip_grad,
        max_tokens_per_gpu=config.trainer.max_tokens_per_gpu,
        bf16=config.trainer.bf16,
    )
    return TorchTrainer(
        open_directory(source.directory, torch.float32),
        sft_loss,
        settings,
        tokenizer=source.tokenizer,
        total_steps=section.warm_start_steps,
    )
