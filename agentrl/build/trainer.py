"""From the configuration to what learns: trainers and the advantage estimator."""

from __future__ import annotations

from agentrl.algorithms.advantages import Grpo
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.build.config import RunConfig
from agentrl.build.model import Model
from agentrl.losses import PolicyLoss, sft_loss
from agentrl.protocols import AdvantageEstimator, Trainer
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch import TorchTrainer


def build_trainer(model: Model, config: RunConfig) -> Trainer:
    """The RL trainer: the clipped policy loss on the model's own weights."""
    algorithm, rollout = config.algorithm, config.rollout
    loss = PolicyLoss(eps_clip=algorithm.eps_clip, eps_clip_high=algorithm.eps_clip_high)
    return TorchTrainer(
        model.network,
        loss,
        config.trainer,
        tokenizer=model.tokenizer,
        total_steps=rollout.num_rollout * rollout.num_steps_per_rollout,
    )


def build_warm_start_trainer(model: Model, config: RunConfig) -> Trainer:
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
        model.network, sft_loss, settings, tokenizer=model.tokenizer, total_steps=section.warm_start_steps
    )


def build_estimator(config: AlgorithmConfig) -> AdvantageEstimator:
    """The advantage estimator that the configuration names."""
    estimators = {"grpo": Grpo(config.grpo_std_normalization)}
    return estimators[config.advantage_estimator]
