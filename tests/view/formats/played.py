"""Episodes of every shape, and a journal of them."""

from __future__ import annotations

from dataclasses import replace

from agentrl.records import Outcome
from agentrl.types import Ending, Message, Restart, Trajectory, Turn, Verdict
from tests.view.episodes.journals import entry, failed, searched, tokens


def restarted(id):
    """An episode whose second trajectory goes on from a compacted prompt."""
    first = searched(id).trajectories[0]
    prompt = (
        Message("user", "Where was Torba born?"),
        Message("assistant", "I asked."),
        Message("user", "Go on."),
    )
    again = Trajectory(
        (Turn(prompt, Message("assistant", "Kelmar"), tokens([1, 2, 8, 4], [7, 9]), 2),), 0, Restart.COMPACTED
    )
    return searched(id, trajectories=(first, again), step_rewards=(None, None, 1.0))


def duel(id):
    """An episode of two agents, of which one is frozen."""
    white = Turn((Message("user", "You are white."),), Message("assistant", "e4"), tokens([1, 2], [5]))
    black = Turn((Message("user", "You are black."),), Message("assistant", "e5"), tokens([3], [6]), 1)
    return searched(
        id,
        agents=("white", "black"),
        frozen_agents=("black",),
        trajectories=(
            Trajectory((white,), agent="white"),
            Trajectory((black,), agent="black", trainable=False),
        ),
        step_rewards=(None, {"white": 1.0, "black": -1.0}),
    )


def entries():
    game = duel("g2-0")
    verdicts = (Verdict("g2-0", "env", 1.0, agent="white"), Verdict("g2-0", "env", -1.0, agent="black"))
    cut = searched("g3-0", ending=Ending.TRUNCATED)
    return [
        entry(searched("g0-0")),
        entry(searched("g0-1", answer=8, reward=0.0), 0.0),
        failed("g0-2-retry1"),
        entry(restarted("g1-0")),
        replace(entry(game, None, Outcome.DROPPED, reason="x"), verdicts=verdicts),
        entry(cut, 0.25),
    ]
