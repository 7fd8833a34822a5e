"""The reference trainer: one process, any Hugging Face causal language model with plain attention."""

from agentrl.trainer.torch.trainer import TorchTrainer

__all__ = ["TorchTrainer"]
