"""A policy small enough to follow by hand: the next token depends on the one before, through a table."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from agentrl.data import Prompt
from agentrl.losses import LossInputs, TokenOutputs
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.producer import Producer, ProducerSettings
from agentrl.trainer.plan import is_without_gradient
from agentrl.types import Group, Scores, Verdict
from agentrl.types.seams import PublishReport, StepReport
from tests.algorithms.episodes import TASK, episode, turn

VOCABULARY = 6
STEP_SIZE = 0.5


def table_of(seed):
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY))


POLICY, REFERENCE, VALUES = table_of(1), table_of(2), table_of(3)[:, 0]


def episodes_of(id, rewards, seed) -> Group:
    """A group whose episodes have one to three turns of random tokens."""
    rng = np.random.default_rng(seed)
    episodes = tuple(
        episode(
            f"{id}.{i}",
            [
                turn([1, 2], rng.integers(0, VOCABULARY, rng.integers(1, 4)).tolist(), version=0)
                for _ in range(rng.integers(1, 4))
            ],
        )
        for i in range(len(rewards))
    )
    verdicts = tuple(Verdict(e.id, "s", reward) for e, reward in zip(episodes, rewards, strict=True))
    return Group(id, TASK, 0, episodes, verdicts)


def producer_of(batches) -> Producer:
    """Plays these batches of groups, and says nothing of the versions: see `Group.version`."""
    groups = [group for batch in batches for group in batch]
    prompts = iter(range(10_000))

    async def play(prompt, *, version, begun=None):
        group = groups[prompt.index % len(groups)]
        played.append((group.id, version))
        return GroupOutcome(group, (), group.episodes)

    played: list[tuple[str, int]] = []
    producer = Producer(lambda: Prompt(next(prompts), TASK, 0), play, ProducerSettings(len(batches[0])))
    producer.played = played
    return producer


@dataclass
class TableTrainer:
    """A `Trainer` over the table in float64, plain gradient descent; it notes what it is asked to do."""

    loss: object
    table: np.ndarray = field(default_factory=POLICY.copy)
    gradients: list[np.ndarray] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    updated: list[list[str]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)

    async def score(self, samples, roles=("old",), *, statistics=False):
        self.scored += [sample.rollout_id for sample in samples]
        tables = {"old": self.table, "ref": REFERENCE}

        def logprobs(role):
            if role not in roles:
                return None
            with torch.no_grad():
                return tuple(_logp(torch.tensor(tables[role]), s)[0].numpy() for s in samples)

        values = tuple(
            np.concatenate([[0.0], VALUES[s.token_ids[:-1]]]) for s in samples if "values" in roles
        )
        old = logprobs("old") or tuple(s.logprobs for s in samples)
        return Scores(old, logprobs("ref"), None, values or None)

    async def update(self, batch):
        table = torch.tensor(self.table, requires_grad=True)
        credit, scores = batch.credit, batch.scores
        masks = [torch.tensor(s.loss_mask.copy()) for s in batch.samples]

        def flat(arrays):
            return torch.cat([torch.tensor(np.array(a))[m] for a, m in zip(arrays, masks, strict=True)])

        both = [_logp(table, sample) for sample in batch.samples]
        proximal, advantages = scores.proximal, credit.advantages
        if batch.in_step is not None:
            proximal = tuple(logp.detach().numpy() for logp, _ in both)
            if batch.in_step.factors is not None:
                factors = batch.in_step.factors(batch.samples, proximal)
                advantages = [a * f for a, f in zip(advantages, factors, strict=True)]
        logp_N, entropy_N = (
            torch.cat([gradients[k][m] for gradients, m in zip(both, masks, strict=True)]) for k in (0, 1)
        )
        inputs = LossInputs(
            flat(proximal).double(),
            flat([s.logprobs for s in batch.samples]).double(),
            flat(advantages).double(),
            flat(credit.weights).double(),
            torch.repeat_interleave(torch.arange(len(masks)), torch.tensor([int(m.sum()) for m in masks])),
            None if scores.ref is None else flat(scores.ref).double(),
        )
        out = self.loss(TokenOutputs(logp_N, entropy_N), inputs)
        (gradient,) = torch.autograd.grad(out.sum, table)
        is_left_out = is_without_gradient(batch, float(gradient.norm()))
        told = (proximal if batch.in_step else None, is_left_out)
        if is_left_out:
            return StepReport({}, len(logp_N), *told)
        self.gradients.append(gradient.numpy())
        self.served.append(batch.served)
        self.updated.append(list(dict.fromkeys(sample.rollout_id for sample in batch.samples)))
        self.table = self.table - STEP_SIZE * gradient.numpy()
        return StepReport({"train/loss": out.sum.item()}, len(logp_N), *told)

    async def publish(self, target, *, version):
        self.versions.append(version)
        return PublishReport(version, 1, 0.0)


def _logp(table, sample):
    """Logprob and entropy of each token of a sample, given the one before; 0 for the first."""
    ids = torch.tensor(sample.token_ids.astype(np.int64))
    logp_TV = torch.log_softmax(table, -1)[ids[:-1]]
    zero = torch.zeros(1, dtype=table.dtype)
    chosen = logp_TV.gather(1, ids[1:, None])[:, 0]
    return torch.cat([zero, chosen]), torch.cat([zero, -(logp_TV.exp() * logp_TV).sum(-1)])
