"""Reinforcement learning of an agent on one page: episodes, advantages, a gradient, new weights.

    agentrl train examples/hop_search/run.toml --num-rollout 0 --name warm
    python examples/one_page/train.py runs/warm/checkpoint --iterations 20

What `agentrl train` does between two iterations, in the order in which it happens, made of the same parts.
Left out, for there is no room: the warm start, held-out evaluation, the journal and the report, playing
failed episodes again, playing ahead while the trainer works, several optimizer steps per batch, critics,
reference models, corrections, chat formats, SGLang, GPUs, several machines, checkpoints to go on from.
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
from agentrl.algorithms.estimators import GroupRelative
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
        # A failure of the world is no zero: it is not learned from.
        marked = [one for one in scored if one.is_usable]
        verdicts = await self._scorer.judge(marked)
        return Group(f"{task.id}-{seed}", task, seed, tuple(m.episode for m in marked), tuple(verdicts))

    async def _episode(self, task: Task, seed: int, k: int) -> agentrl.Episode:
        agent = TokenAgent(self._engine, self._renderer, SAMPLING)
        name = f"{task.id}-{seed}-{k}"
        # Siblings sample with seeds of their own, or they would all say the same.
        sampling_seed = random.Random(name).getrandbits(31)
        env = agentrl.make(self._env_id)
        return await agentrl.play(env, agent, task, seed=seed, episode_id=name, sampling_seed=sampling_seed)


def learned_from(groups: Sequence[Group]) -> tuple[Sample, ...]:
    """The tokens of all episodes, as they were sampled: nothing is encoded a second time."""
    return tuple(
        sample
        for group in groups
        for episode in group.episodes
        for sample in samples_of(episode, temperature=SAMPLING.temperature)
    )


def shuffled(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """All tasks, again and again, each time in another order."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(tasks, len(tasks))


async def run(options: argparse.Namespace) -> list[float]:
    """Train, and return the mean reward of each iteration."""
    torch.set_num_threads(1)
    env = agentrl.make(options.env)
    if not isinstance(env.dialect, agentrl.Tags):
        raise SystemExit(f"{options.env} speaks in chat turns, which this page leaves out; choose another.")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    renderer = InlineRenderer(tokenizer, env.dialect)
    # The engine has a copy of the weights: it serves the last version while the trainer makes the next.
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
        # 2. Numbers: the tokens of all episodes. The old logprobs are those that they were sampled with.
        samples = learned_from(groups)
        tokens = Tokens.of(samples)
        scores = Scores(old=tuple(sample.logprobs for sample in samples))
        # 3. How much better each token was than expected: nothing, where siblings all did alike.
        advantages = estimator(groups, tokens, tokens.scores(scores))
        if advantages.advantages_N.any():
            # 4. A gradient. What each token weighs in it is made once for the whole step.
            credit = Credit(tokens.scatter(advantages.advantages_N), token_mean(samples))
            report = await trainer.update(TrainBatch(samples, scores, credit))
            # 5. New weights for the engine; tokens know which version wrote them.
            await trainer.publish(engine.sink, version=step + 1)
            gap = report.metrics["train/train_rollout_logprob_abs_diff"]
            print(f"{step + 1:3}  reward {rewards[-1]:.3f}  engine and trainer apart {gap:.1e}", flush=True)
    await engine.close()
    await trainer.save(str(options.out))
    return rewards


def main(words: Sequence[str] | None = None) -> list[float]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="Hugging Face directory of a model that knows the form of turns")
    parser.add_argument("--env", default="HopSearch-v0")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="tasks in an iteration")
    parser.add_argument("--siblings", type=int, default=16, help="episodes of each")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/one_page/checkpoint"))
    return asyncio.run(run(parser.parse_args(words)))


if __name__ == "__main__":
    main()
