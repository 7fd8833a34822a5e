"""What worlds that are solved or not report of an episode besides its score."""

from __future__ import annotations

from agentrl import Episode, Reward
from agentrl.tools import inline


@inline
def solved(episode: Episode) -> float:
    """1.0 where the episode earned the full score of 1, else 0.0."""
    return float((episode.total_of() or 0.0) >= 1.0)


@inline
def invalid_moves(episode: Episode) -> float:
    """The number of turns that were no legal action: `invalid_moves` of its counts."""
    return float(episode.counts.get("invalid_moves", 0))


MEASURES = (Reward(solved, weight=0.0), Reward(invalid_moves, weight=0.0))
"""Both as parts of the verdict that add nothing to it."""
