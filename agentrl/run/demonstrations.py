"""Demonstrations as tokens: of any conversation, and of an environment's own script, which is played."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from agentrl.algorithms.samples import demonstration
from agentrl.envs import AnyEnv, AnyScript, MultiAgentEnv, ScriptedAgent, play
from agentrl.errors import WorldBrokenError
from agentrl.rollout.conversation import Conversation, Immediate
from agentrl.runtime.stage import all_of
from agentrl.types import (
    AGENT,
    JSON,
    Author,
    Ending,
    Episode,
    Message,
    Observation,
    RolloutId,
    Sample,
    Task,
)
from agentrl.types.seams import Act, Renderer, Session, ToolSchema

# Demonstrations that are played at once: they wait for tools together.
_AT_ONCE = 32


class Demonstrated(NamedTuple):
    """One turn to imitate: what came before it, the action, the tools on offer.

    is_trained: whether the loss covers it.
    """

    observation: Observation
    action: Message
    tools: Sequence[ToolSchema]
    is_trained: bool = True


class ReadsDifferentlyError(ValueError):
    """The tokens of an action read back as another action."""


async def samples_of_turns(
    turns: Iterable[Demonstrated], renderer: Renderer, rollout_id: RolloutId, *, is_checked: bool = False
) -> list[Sample]:
    """One Sample for each unbroken prefix of a conversation that has trained turns.

    An action has the tokens that a policy would sample for it, author = demo; all others are the world's. So
    the tokens are those of an episode of the same messages.

    is_checked: whether the tokens of each trained action are parsed, as those of a policy would be.

    Raises:
        ReadsDifferentlyError: a checked action is read back as another one: the format has no form for it.
        ValueError: a call that could not be parsed has no canonical form.
        UserError: the format cannot write an action, or has no form for a message.
        RenderingError: the tokenizer's chat template refuses the conversation.
    """
    conversation = Conversation(Immediate(renderer))
    prefixes: list[list[tuple[Author, Sequence[int]]]] = [[]]
    untrained: list[set[int]] = [set()]
    for turn in turns:
        world_ids, restart = await conversation.add_observation(turn.observation, turn.tools)
        if restart is not None:
            prefixes.append([])
            untrained.append(set())
        action_ids = renderer.write(turn.action, turn.tools)
        if is_checked and turn.is_trained:
            action = renderer.parse(action_ids, turn.tools, prompt_ids=conversation.prefix)
            if _content_of(action) != _content_of(turn.action):
                raise ReadsDifferentlyError(f"{turn.action} is read back as {action}")
        conversation.add_turn(action_ids, turn.action)
        prefixes[-1] += [(Author.WORLD, world_ids), (Author.DEMO, action_ids)]
        if not turn.is_trained:
            untrained[-1].add(len(prefixes[-1]) - 1)
    samples = (
        demonstration(parts, rollout_id, untrained=left_out)
        for parts, left_out in zip(prefixes, untrained, strict=True)
        if parts
    )
    return [sample for sample in samples if sample.loss_mask.any()]


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
    order = _shuffled(tasks, seed)

    async def demonstrated(index: int, task: Task) -> list[Sample]:
        env = make_env()
        agents = _demonstrators(env, task, f"demonstration/{seed}/{index}")
        episode = await play(env, agents, task, seed=index, episode_id=f"d{index}")
        progress(1)
        of_world = env.scripted_agents if isinstance(env, MultiAgentEnv) else ()
        learning = {name: agent for name, agent in agents.items() if name not in of_world}
        return await _samples_of(episode, learning, renderer)

    samples: list[Sample] = []
    for begin in range(0, n, _AT_ONCE):
        numbers = range(begin, min(begin + _AT_ONCE, n))
        for of_episode in await all_of([demonstrated(number, next(order)) for number in numbers]):
            samples += of_episode
    if not samples:
        raise WorldBrokenError(
            f"none of {n} demonstrations reached an end within the limits; raise max_turns, or let the "
            "demonstrator give a final answer."
        )
    return samples


def _shuffled(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """All tasks in a random order, then all in another one, without end."""
    shuffler = random.Random(f"demonstrations/{seed}")
    while True:
        order = list(tasks)
        shuffler.shuffle(order)
        yield from reversed(order)


class _Demonstrator(ScriptedAgent):
    """Records the tools that were offered at each of its turns."""

    def __init__(self, script: AnyScript | Callable[[str], AnyScript]) -> None:
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
    single = env
    return {AGENT: _Demonstrator(lambda _: single.demonstrator(task, random.Random(seed)))}


async def _samples_of(
    episode: Episode, agents: Mapping[str, _Demonstrator], renderer: Renderer
) -> list[Sample]:
    """One Sample for each unbroken prefix of each agent; none where a limit ended the episode.

    Raises:
        WorldBrokenError: the episode failed.
    """
    if (failure := episode.failure) is not None:
        raise WorldBrokenError(
            f"{episode.env_id}: demonstrating task {episode.task.id} failed in {failure.stage}: "
            f"{failure.detail}; mend the environment or its demonstrator."
        )
    samples: list[Sample] = []
    for name, agent in agents.items() if episode.ending is Ending.COMPLETED else ():
        turns = zip(episode.turns_of(name), agent.tools_by_turn, strict=True)
        demonstrated = [Demonstrated(turn.observation, turn.action, tools) for turn, tools in turns]
        samples += await samples_of_turns(demonstrated, renderer, RolloutId(episode.id, name))
    return samples


def _content_of(message: Message) -> tuple[str, str, Sequence[tuple[str, Mapping[str, JSON] | None]]]:
    """What an action says and calls, without the form in which it was written."""
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.text.strip(), (message.reasoning or "").strip(), calls
