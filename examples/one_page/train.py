"""Reinforcement learning of an agent on one page: episodes, advantages, a gradient, new weights.

    agentrl train examples/hop_search/run.toml --num-rollout 0 --name warm
    python examples/one_page/train.py runs/warm/checkpoint --iterations 20

The steps of an iteration of `agentrl train`, in their order, with the same parts. Left out:
the warm start, held-out evaluation, the journal and the report, playing failed episodes again, playing ahead
while the trainer works, several optimizer steps per batch, critics, reference models, corrections,
chat formats, SGLang, GPUs, several machines, checkpoints to resume from.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentrl
from agentrl.algorithms.baselines import rloo
from agentrl.algorithms.group_relative import GroupRelative
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.tokens import Tokens
from agentrl.algorithms.weights import token_mean
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.envs import Scorer
from agentrl.losses import PolicyLoss
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch import TorchTrainer
from agentrl.types import Credit, Group, Sample, Scores, Task, TrainBatch

SAMPLING = SamplingSettings(temperature=1.0)


class Player:
    """Plays groups: siblings that share a task and a world, and differ in what is sampled."""

    def __init__(self, env_id: str, engine: EmbeddedEngine, renderer: InlineRenderer, size: int) -> None:
        self._env_id, self._engine, self._renderer, self._size = env_id, engine, renderer, size
        self._scorer = Scorer(agentrl.make(env_id).rewards)

    async def group(self, task: Task, seed: int) -> Group:
        """Play all siblings at once; the engine decodes their turns together."""
        episodes = await asyncio.gather(*(self._episode(task, seed, k) for k in range(self._size)))
        scored = [await self._scorer.mark(episode) for episode in episodes]
        # A failure of the world is no reward of zero: it is not trained on.
        marked = [candidate for candidate in scored if candidate.is_usable]
        verdicts = await self._scorer.judge(marked)
        return Group(f"{task.id}-{seed}", task, seed, tuple(m.episode for m in marked), tuple(verdicts))

    async def _episode(self, task: Task, seed: int, k: int) -> agentrl.Episode:
        agent = TokenAgent(self._engine, self._renderer, SAMPLING)
        name = f"{task.id}-{seed}-{k}"
        # Each sibling samples with a seed of its own; otherwise all would be equal.
        sampling_seed = random.Random(name).getrandbits(31)
        env = agentrl.make(self._env_id)
        return await agentrl.play(env, agent, task, seed=seed, episode_id=name, sampling_seed=sampling_seed)


def samples_from(groups: Sequence[Group]) -> tuple[Sample, ...]:
    """The samples of all episodes, with their tokens as sampled: nothing is encoded a second time."""
    return tuple(sample for group in groups for episode in group.episodes for sample in samples_of(episode))


def shuffled(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """All tasks, repeatedly, each time in another order."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(tasks, len(tasks))


async def run(options: argparse.Namespace) -> list[float]:
    """Train, and return the mean reward of each iteration."""
    torch.set_num_threads(1)
    env = agentrl.make(options.env)
    if not isinstance(env.dialect, agentrl.Tags):
        raise SystemExit(f"{options.env} uses the chat dialect, which this page leaves out; choose another.")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    renderer = InlineRenderer(tokenizer, env.dialect)
    # The engine has a copy of the weights: it serves the last version while the trainer computes the next.
    engine = EmbeddedEngine.from_model(
        model,
        max_slots=64,
        max_context_len=env.limits.max_tokens or 2048,
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
    )
    config = TrainerConfig(lr=options.lr, lr_warmup_iters=2)
    trainer = TorchTrainer(model, PolicyLoss(), config, tokenizer=tokenizer, total_steps=options.iterations)
    estimator = GroupRelative(rloo)
    player = Player(options.env, engine, renderer, options.siblings)
    tasks = shuffled(list(env.tasks("train")), options.seed)
    rewards = []
    for step in range(options.iterations):
        # 1. Episodes, many at a time.
        seeds = range(step * options.prompts, (step + 1) * options.prompts)
        groups = await asyncio.gather(*(player.group(next(tasks), seed) for seed in seeds))
        totals = [verdict.total for group in groups for verdict in group.verdicts]
        rewards.append(sum(totals) / max(len(totals), 1))
        # 2. Samples: the tokens of all episodes. The proximal logprobs are those of their sampling.
        samples = samples_from(groups)
        tokens = Tokens.of(samples)
        scores = Scores(proximal=tuple(sample.logprobs for sample in samples))
        # 3. Advantages: zero where all siblings earned the same.
        advantages = estimator(groups, tokens, tokens.scores(scores))
        if advantages.advantages_N.any():
            # 4. A gradient. The weights of the tokens are computed once for the step.
            credit = Credit(tokens.scatter(advantages.advantages_N), token_mean(samples))
            report = await trainer.update(TrainBatch(samples, scores, credit))
            # 5. New weights for the engine; each token records the version that sampled it.
            await trainer.publish(engine.sink, version=step + 1)
            gap = report.metrics["train/train_rollout_logprob_abs_diff"]
            print(f"{step + 1:3}  reward {rewards[-1]:.3f}  engine and trainer apart {gap:.1e}", flush=True)
    await engine.close()
    await trainer.save(str(options.out))
    return rewards


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="Hugging Face directory of a model that knows the format of turns")
    parser.add_argument("--env", default="HopSearch-v0")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="tasks in an iteration")
    parser.add_argument("--siblings", type=int, default=16, help="episodes of each")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/one_page/checkpoint"))
    return asyncio.run(run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
