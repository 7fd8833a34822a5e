"""Functions by path for tiny runs, and sources of prompts that adapt; named by path."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from agentrl import Task
from agentrl.data import AdaptiveSource
from agentrl.types import Ending


def paid_otherwise(episode):
    """What MirroredBandit pays at the end of an episode, seen and changed when it has ended."""
    if episode.ending is not Ending.COMPLETED:
        return None
    *others, last = episode.step_rewards
    return replace(episode, step_rewards=(*others, 3.0 - 2.0 * last), counts={**episode.counts, "seen": 1})


def seen(episode):
    """Counts that it has seen an episode."""
    return replace(episode, counts={**episode.counts, "seen": 1})


async def played_plainly(rollout):
    """A batch as a run plays it without a function."""
    return await asyncio.gather(*(rollout.play() for _ in range(rollout.size)))


async def more_than_it_takes(rollout):
    """Of one prompt more than the batch has, the groups of the later ones; one more is drawn in vain."""
    rollout.prompt()
    groups = await asyncio.gather(*(rollout.play() for _ in range(rollout.size + 1)))
    return groups[1:]


def every_second_token(groups, samples):
    """Tokens in odd places are taken out of the loss."""
    return [replace(s, loss_mask=s.loss_mask & (np.arange(len(s)) % 2 == 0)) for s in samples]


def likely(samples, scores):
    """Tokens that the trainer takes for one of several likely ones are taken out of the loss."""
    return [
        replace(s, loss_mask=s.loss_mask & (p > -1.0)) for s, p in zip(samples, scores.proximal, strict=True)
    ]


def number_of_turns(step, groups):
    """A metric of its own, over all groups that were played."""
    turns = [len(episode.turns) for group in groups for episode in group.episodes]
    return {"own/turns": sum(turns) / len(turns), "own/groups": float(len(groups)), "own/step": float(step)}


async def half_of_them(evaluation):
    """Half of the held-out prompts, sampled alone, and a metric of its own."""
    played = await evaluation.play(num_prompts=2)
    return {"longest": float(max(len(episode.turns) for episode in played.episodes))}


class Harder(AdaptiveSource):
    """Counts the groups that it has heard of, in its prompts."""

    fingerprint = "harder 1"

    def __init__(self, *, seed=0):
        super().__init__(seed=seed)
        self.heard = 0

    def draw(self, ordinal):
        return Task.ask(f"{ordinal}-{self.heard}", f"press {ordinal + self.heard}")

    def add_groups(self, groups):
        self.heard += len(groups)

    def save(self):
        return self.heard

    def load(self, saved):
        self.heard = saved


class Failing(Harder):
    """Cannot hear of groups."""

    def add_groups(self, groups):
        raise ZeroDivisionError(f"{len(groups)} groups")
