"""Demonstrations for a warm start: the environment's own script, played and rendered as tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from agentrl.algorithms.samples import demonstration
from agentrl.envs import AnyEnv, MultiAgentEnv, Script, ScriptedAgent, play
from agentrl.errors import WorldBrokenError
from agentrl.protocols import Act, Renderer, Session, ToolSchema
from agentrl.rollout.conversation import Conversation
from agentrl.types import AGENT, Author, Ending, Episode, Observation, RolloutId, Sample, Task


async def demonstrate(
    make_env: Callable[[], AnyEnv],
    renderer: Renderer,
    tasks: Sequence[Task],
    n: int,
    *,
    seed: int,
    progress: Callable[[int], None],
) -> list[Sample]:
    """Play n demonstrations over `tasks`, in a shuffled order, and render them as Samples.

    Every action's tokens are those that a policy would sample for it, author = demo.

    Raises:
        UserError: the environment has no expert.
        WorldBrokenError: a demonstration failed, or none was completed.
    """
    samples: list[Sample] = []
    order: list[Task] = []
    shuffler = random.Random(f"demonstrations/{seed}")
    for index in range(n):
        if not order:
            order = list(tasks)
            shuffler.shuffle(order)
        env, task = make_env(), order.pop()
        agents = _demonstrators(env, task, f"demonstration/{seed}/{index}")
        episode = await play(env, agents, task, seed=index, episode_id=f"d{index}")
        if episode.failure is not None:
            failure = episode.failure
            raise WorldBrokenError(
                f"{env.id}: demonstrating task {task.id} failed in {failure.stage}: {failure.detail}; "
                "mend the environment or its demonstrator."
            )
        if episode.ending is Ending.COMPLETED:
            for name, agent in agents.items():
                samples += _samples_of(episode, name, renderer, agent.tools_by_turn)
        progress(1)
    if not samples:
        raise WorldBrokenError(
            f"none of {n} demonstrations reached an end within the limits; raise max_turns, or let the "
            "demonstrator give a final answer."
        )
    return samples


class _Demonstrator(ScriptedAgent):
    """Records the tools that were offered at each of its turns."""

    def __init__(self, script: Script | Callable[[str], Script]) -> None:
        super().__init__(script)
        self.tools_by_turn: list[tuple[ToolSchema, ...]] = []

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The script's next action."""
        self.tools_by_turn.append(tuple(tools))
        return await super().act(observation, tools=tools, session=session)


def _demonstrators(env: AnyEnv, task: Task, seed: str) -> dict[str, _Demonstrator]:
    """A demonstrator for each agent, with a random generator of its own."""
    if isinstance(env, MultiAgentEnv):
        return {
            name: _Demonstrator(partial(env.demonstrator, task, name, rng=random.Random(f"{seed}/{name}")))
            for name in env.possible_agents
        }
    return {AGENT: _Demonstrator(env.demonstrator(task, random.Random(seed)))}


def _samples_of(
    episode: Episode, agent: str, renderer: Renderer, tools_by_turn: Sequence[Sequence[ToolSchema]]
) -> list[Sample]:
    """One Sample for each unbroken prefix of an agent."""
    conversation = Conversation(renderer)
    prefixes: list[list[tuple[Author, Sequence[int]]]] = [[]]
    for turn, tools in zip(episode.turns_of(agent), tools_by_turn, strict=True):
        world_ids, restart = conversation.add_observation(turn.observation, tools)
        if restart is not None:
            prefixes.append([])
        action_ids = renderer.write(turn.action, tools)
        conversation.add_turn(action_ids, turn.action)
        prefixes[-1] += [(Author.WORLD, world_ids), (Author.DEMO, action_ids)]
    return [demonstration(parts, RolloutId(episode.id, agent)) for parts in prefixes if parts]
