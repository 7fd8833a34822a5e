"""A reward that makes a team of agents that are each paid for their own: the critic for what it leads to."""

from collections.abc import Mapping, Sequence

from agentrl import Episode

SHARE = 0.5


def shared(siblings: Sequence[Episode]) -> list[Mapping[str, float]]:
    """A group reward: half of the solver's result is the critic's, too, where it had it answer again."""
    return [
        {"critic": SHARE * (episode.total_of("solver") or 0.0)} if was_revised(episode) else {}
        for episode in siblings
    ]


def was_revised(episode: Episode) -> bool:
    """Whether the critic had the solver answer again."""
    return len(episode.turns_of("solver")) > 1
