"""The torch trainer over a model that this process has loaded already: for scripts, tests and debuggers."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.losses import Loss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch.plan import TorchPlan
from agentrl.trainer.torch.worker import AuxiliaryModels, TorchWorker
from agentrl.types import ScoreRole
from agentrl.weights.hf.export import save_model

_NONE = AuxiliaryModels()


class TorchTrainer(RankTrainer):
    """Trains `model` in place. Its calls block the event loop; runs train in a process of its own.

    Args:
        model: a causal language model in fp32.
        loss: the per-token loss, e.g. `PolicyLoss()` or `sft_loss`. One whose `entropy_coef` is not 0 gets
            an entropy with a gradient.
        config: optimizer, schedule and size of micro-batches.
        tokenizer: saved with the weights.
        total_steps: optimizer steps that a decay takes where lr_decay_iters is left out.
        auxiliary: the networks of the other roles.

    Raises:
        ModelLoadError: see `TorchNetwork`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Loss,
        config: TrainerConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        total_steps: int,
        auxiliary: AuxiliaryModels = _NONE,
    ) -> None:
        policy = Learning(loss, config, total_steps)
        worker = TorchWorker(model, policy, auxiliary)
        critic = auxiliary.critic
        networks: dict[ScoreRole, PreTrainedModel | None] = {
            "old": model,
            # With adapters the reference is the policy without them.
            "ref": model if auxiliary.ref is None and config.lora_rank else auxiliary.ref,
            "teacher": auxiliary.teacher,
        }
        plan = TorchPlan(
            policy=policy,
            # The models are loaded already: no directory is opened.
            models={
                role: network.name_or_path or "" for role, network in networks.items() if network is not None
            },
            critic=None if critic is None else critic.learning,
            moves_reference=auxiliary.moves_reference,
        )
        super().__init__(InlineRank(worker), plan)
        self._worker, self._tokenizer = worker, tokenizer

    async def save(self, directory: str) -> None:
        """Write model and tokenizer as a Hugging Face directory, atomically; of adapters, these alone.

        Raises:
            ModelLoadError: they have no base model: the one that learns was not loaded from a folder.
        """
        if self.publisher.adapters:
            await super().save(directory)
            return
        with self._worker.onloaded():
            save_model(self._worker.model, self._tokenizer, directory)
