"""Demonstrations for a warm start: the environment's own script, played and written as tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agentrl.algorithms.samples import demonstration
from agentrl.envs import Env, Script, ScriptedAgent, play
from agentrl.errors import WorldBrokenError
from agentrl.protocols import Act, Renderer, Session, ToolSchema
from agentrl.rollout.conversation import Conversation
from agentrl.types import Author, Ending, Episode, Observation, Sample, Task


async def demonstrate(
    make_env: Callable[[], Env],
    renderer: Renderer,
    tasks: Sequence[Task],
    n: int,
    *,
    seed: int,
    progress: Callable[[int], None],
) -> list[Sample]:
    """Play n demonstrations over `tasks`, in a shuffled order, and write them as Samples.

    Every action's tokens are written as a policy would have sampled them, author = demo.

    Raises:
        UserError: the environment has no expert.
        WorldBrokenError: a demonstration failed, or none reached an end.
    """
    samples: list[Sample] = []
    order: list[Task] = []
    shuffler = random.Random(f"demonstrations/{seed}")
    for index in range(n):
        if not order:
            order = list(tasks)
            shuffler.shuffle(order)
        env, task = make_env(), order.pop()
        script = env.demonstrator(task, random.Random(f"demonstration/{seed}/{index}"))
        agent = _Demonstrator(script)
        episode = await play(env, agent, task, seed=index, episode_id=f"d{index}")
        if episode.failure is not None:
            failure = episode.failure
            raise WorldBrokenError(
                f"{env.id}: demonstrating task {task.id} failed in {failure.stage}: {failure.detail}; "
                "mend the environment or its demonstrator."
            )
        if episode.ending is Ending.COMPLETED:
            samples += _written(episode, renderer, agent.offered)
        progress(1)
    if not samples:
        raise WorldBrokenError(
            f"none of {n} demonstrations reached an end within the limits; raise max_turns, or let the "
            "demonstrator give a final answer."
        )
    return samples


class _Demonstrator(ScriptedAgent):
    """Remembers which tools were on offer at each of its turns."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.offered: list[tuple[ToolSchema, ...]] = []

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The script's next action."""
        self.offered.append(tuple(tools))
        return await super().act(observation, tools=tools, session=session)


def _written(episode: Episode, renderer: Renderer, offered: Sequence[Sequence[ToolSchema]]) -> list[Sample]:
    """One Sample for each unbroken prefix."""
    conversation = Conversation(renderer)
    prefixes: list[list[tuple[Author, Sequence[int]]]] = [[]]
    for turn, tools in zip(episode.turns, offered, strict=True):
        world, restart = conversation.show(turn.observation, tools)
        if restart is not None:
            prefixes.append([])
        said = renderer.write(turn.action, tools)
        conversation.said(said, turn.action)
        prefixes[-1] += [(Author.WORLD, world), (Author.DEMO, said)]
    return [demonstration(parts, episode.id) for parts in prefixes]
