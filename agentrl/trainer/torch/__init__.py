"""The torch trainer: one rank, any causal language model of transformers."""

from agentrl.trainer.torch.critic import Critic, critic_over
from agentrl.trainer.torch.trainer import TorchTrainer
from agentrl.trainer.torch.worker import AuxiliaryModels

__all__ = ["AuxiliaryModels", "Critic", "TorchTrainer", "critic_over"]
