"""The reference trainer: one process, any Hugging Face causal language model with plain attention."""

from agentrl.trainer.torch.critic import Critic, critic_over
from agentrl.trainer.torch.trainer import Beside, TorchTrainer

__all__ = ["Beside", "Critic", "TorchTrainer", "critic_over"]
