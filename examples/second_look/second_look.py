"""A second look: where the model answers, it is asked once to check that, and to answer again."""

from collections.abc import Sequence

from agentrl import Episode, Message
from agentrl.envs.generate import EpisodeInPlay

ASK = Message("user", "Check that. Search again if you have to, then give your final answer.")


async def second_look(episode: EpisodeInPlay) -> None:
    """Play turn by turn; the first answer is not passed to the world, the second one is."""
    await episode.reset()
    has_looked = False
    while not episode.is_over:
        action = await episode.act()
        if not action.tool_calls and not has_looked:
            has_looked = True
            action = await episode.act(ASK)
        await episode.step(action)


def ahead(siblings: Sequence[Episode]) -> list[float]:
    """A group reward: the share of siblings that needed more turns, among those that are right."""
    turns = [len(episode.turns) for episode in siblings if episode.total_of()]
    return [
        sum(other > len(episode.turns) for other in turns) / len(siblings) if episode.total_of() else 0.0
        for episode in siblings
    ]
