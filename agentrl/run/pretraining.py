"""Pre-training of the critic: on the episodes of an earlier run, before the policy learns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.algorithms.laws import TokenLaws
from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.run.loop import Loop
from agentrl.run.parts import Records
from agentrl.run.replay import Replay
from agentrl.types.seams import Trainer
from agentrl.weights.hf.source import ModelSource

CRITIC = "pre-training of the critic"


@dataclass(frozen=True, slots=True)
class CriticData:
    """The journal that a critic is trained on before RL.

    epochs: passes over it (count). num_steps_per_rollout: optimizer steps of a batch (count).
    """

    replay: Replay
    epochs: int
    num_steps_per_rollout: int

    @classmethod
    def of(cls, config: RunConfig, source: ModelSource) -> CriticData | None:
        """The data of a run's critic; None = it is not trained before RL.

        Raises:
            ConfigError: critic_data is no folder of a run, or its tokens are of another tokenizer.
        """
        critic = config.algorithm.critic
        if critic is None or critic.critic_data is None:
            return None
        try:
            replay = Replay.opened(Path(critic.critic_data), vocab_size=source.vocab_size)
        except ConfigError as error:
            raise ConfigError(str(error).replace("replay =", "critic_data =", 1)) from None
        return cls(replay, critic.critic_data_epochs, config.rollout.num_steps_per_rollout)

    async def train(self, trainer: Trainer, algorithm: Algorithm) -> AsyncIterator[Mapping[str, float]]:
        """Train the critic on all batches; the metrics of each."""
        loop = Loop(
            producer=self.replay,
            trainer=trainer,
            algorithm=algorithm,
            sink=None,
            num_steps=self.num_steps_per_rollout,
            laws=TokenLaws(self.replay.vocab_size),
            critic_only=True,
        )
        for _ in range(self.epochs):
            self.replay.resume(0, version=0, next_ordinal=0)
            for step in range(self.replay.num_steps):
                yield (await loop.iterate(step)).metrics


async def pretrain_critic(data: CriticData, trainer: Trainer, algorithm: Algorithm, records: Records) -> None:
    """The stage of a run in which only its critic is trained."""
    total = data.replay.num_steps * data.epochs
    with records.watch.stage(CRITIC, total), records.console.stage(CRITIC, total) as bar:
        async for metrics in data.train(trainer, algorithm):
            shown = {"loss": "value_loss", "explained": "value_explained_variance"}
            bar.advance(1, **{short: metrics.get(f"train/{name}", 0.0) for short, name in shown.items()})
