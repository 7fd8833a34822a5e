"""Episodes, groups and samples as short as a test needs them."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agentrl.types import (
    AGENT,
    Completion,
    Ending,
    Episode,
    Finish,
    Group,
    Limits,
    Message,
    RolloutId,
    Sample,
    Scores,
    Task,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)

TASK = Task.ask("t", "What?")


def turn(world: Sequence[int], sampled: Sequence[int], version: int = 3, *, temperature: float = 1.0) -> Turn:
    """The sampled token k has logprob -k / 10."""
    ids = np.array(sampled, dtype=np.int32)
    completion = Completion(
        ids,
        (-ids / 10).astype(np.float32),
        np.full(len(ids), version, np.int32),
        Finish.STOP,
        temperature=temperature,
    )
    return Turn(
        (Message("user", "?"),),
        Message("assistant", "!"),
        TurnTokens(np.array(world, dtype=np.int32), completion),
    )


def numbered(trajectories: Sequence[Sequence[Turn]], agent: str = AGENT) -> tuple[Trajectory, ...]:
    """Trajectories whose turns are the steps of an episode, one after another."""
    count = itertools.count()
    return tuple(
        Trajectory(tuple(replace(played_turn, step=next(count)) for played_turn in turns), agent=agent)
        for turns in trajectories
    )


def episode(id: str, *trajectories: Sequence[Turn]) -> Episode:
    return Episode(
        id=id,
        env_id="e",
        task=TASK,
        seed=0,
        limits=Limits(),
        trajectories=numbered(trajectories),
        step_rewards=(),
        ending=Ending.COMPLETED,
    )


def group(id: str, rewards: Sequence[float], *turns: Turn) -> Group:
    episodes = tuple(episode(f"{id}.{i}", turns or (turn([1, 2], [3]),)) for i in range(len(rewards)))
    verdicts = tuple(Verdict(e.id, "s", reward) for e, reward in zip(episodes, rewards, strict=True))
    return Group(id, TASK, 0, episodes, verdicts)


def of_engine(samples: Sequence[Sample]) -> Scores:
    """The engine's own logprobs as the old ones."""
    return Scores(tuple(sample.logprobs for sample in samples))


def sample(rollout_id: str, mask: Sequence[int]) -> Sample:
    loss_mask = np.array(mask, dtype=bool)
    return Sample(
        token_ids=np.arange(len(mask), dtype=np.int32),
        author=loss_mask.astype(np.int8),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -1, 0).astype(np.float32),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        turns=np.zeros(len(mask), dtype=np.int32),
        temperatures=np.ones(len(mask), dtype=np.float32),
        rollout_id=RolloutId(rollout_id),
    )
