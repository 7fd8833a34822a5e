"""The contracts of rewards and generate functions, checked before a run, or in the tests of their authors.

Each check plays by default in a small quiz with a tool. The agent is scripted: it calls the first tool
without arguments, then answers with its task's label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentrl.envs.generate import Generate, generating
from agentrl.envs.multi_agent import AnyEnv
from agentrl.envs.own_tokens import NeedsTokensError
from agentrl.envs.play import PlayEpisode, play
from agentrl.envs.sample_hook import SampleHook, hooked
from agentrl.envs.scoring import AnswerReward, GroupReward, Scorer, graded
from agentrl.envs.tool_env import ToolEnv
from agentrl.errors import StageError
from agentrl.tools import inline
from agentrl.types import (
    Completion,
    Ending,
    Episode,
    Finish,
    Limits,
    Observation,
    Task,
    TurnTokens,
    call,
    say,
)
from agentrl.types.seams import Act, Session, ToolSchema

_TASK = Task.ask("quiz", "What is 1 + 1?", answer="2")


async def check_reward(reward: AnswerReward, task: Task = _TASK) -> None:
    """Check a reward of an answer: it is called with a task and its label, then with an empty answer.

    Raises:
        ValueError: it raised, or returned anything but a finite number or named parts; one sentence.
    """
    for answer in (task.answer or "", ""):
        try:
            await graded(reward, task, answer, Limits().reward_timeout_s)
        except StageError as error:
            raise ValueError(f"the reward of the answer {answer!r} failed ({error.detail})") from error


async def check_group_reward(
    reward: GroupReward, make_env: Callable[[], AnyEnv] | None = None, task: Task = _TASK
) -> None:
    """Check a group reward on two siblings of `task`, played by the scripted agent.

    An environment that fails is no fault of the reward, which is then not checked.

    Raises:
        ValueError: it raised, or returned anything but one finite number, or mapping by agent, for each
        sibling.
    """
    episodes = [await _played(play, make_env or _Quiz, task) for _ in range(2)]
    scorer = Scorer((reward,))
    siblings = [await scorer.mark(episode) for episode in episodes if episode.ending is not Ending.FAILED]
    if len(siblings) < len(episodes):
        return
    try:
        await scorer.judge(siblings)
    except StageError as error:
        raise ValueError(error.detail) from error


async def check_generate(
    generate: Generate, make_env: Callable[[], AnyEnv] | None = None, task: Task = _TASK
) -> None:
    """Check a generate function: it plays `task` twice with the scripted agent, and alike.

    One that writes its own tokens is tried up to where it asks for the first ones, which a script has not.

    Raises:
        ValueError: it raised, ended before the agent had a turn, or played otherwise in the second episode.
        UserError: the environment has several agents.
    """
    try:
        episodes = [await _played(generating(generate), make_env or _Quiz, task) for _ in range(2)]
    except NeedsTokensError:
        return
    for episode in episodes:
        if episode.failure is not None and episode.failure.stage == "generate":
            raise ValueError(f"it failed on the task `{task.id}` ({episode.failure.detail})")
    if any(episode.failure is not None for episode in episodes):
        return
    first, second = ([turn.action for turn in episode.turns] for episode in episodes)
    if first != second:
        raise ValueError(
            "a second episode of the same seed went otherwise; draw with random.Random(episode.seed), and "
            "keep no state between episodes"
        )


async def check_sample_hook(
    hook: SampleHook, make_env: Callable[[], AnyEnv] | None = None, task: Task = _TASK
) -> None:
    """Check a sample hook: it gets an episode of `task` that the scripted agent has played.

    An environment that fails is no fault of the hook, which is then not checked.

    Raises:
        ValueError: it raised, or changed more of the episode than it may.
    """
    failure = (await _played(hooked(play, hook), make_env or _Quiz, task)).failure
    if failure is not None and failure.stage == "sample_hook":
        raise ValueError(f"it failed on an episode of the task `{task.id}` ({failure.detail})")


async def _played(play_episode: PlayEpisode, make_env: Callable[[], AnyEnv], task: Task) -> Episode:
    env = make_env()
    agents = {name: _Scripted(task) for name in env.possible_agents}
    return await play_episode(env, agents, task, seed=1, sampling_seed=1)


class _Scripted:
    """An agent with tokens: three in each turn, after two of the world's."""

    def __init__(self, task: Task) -> None:
        self._answer = say(task.answer or "")
        self._has_called = False

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """A call, where there is a tool; then the answer."""
        del observation, session
        message = call(tools[0].name) if tools and not self._has_called else self._answer
        self._has_called = True
        ids = np.arange(3, dtype=np.int32)
        logprobs = np.full(3, -0.5, dtype=np.float32)
        completion = Completion(ids, logprobs, np.zeros(3, np.int32), Finish.STOP)
        return Act(message, TurnTokens(np.zeros(2, np.int32), completion))

    async def close(self, session_id: str) -> None:
        """Nothing to close."""


def _add(a: int = 1, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


class _Quiz(ToolEnv):
    """A question with a tool; the right answer is worth 1."""

    id = "Quiz-v0"
    limits = Limits(max_turns=8, max_tokens=256)
    tools = (_add,)

    def tasks(self, split: str) -> Sequence[Task]:
        """One."""
        del split
        return [_TASK]

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1 for the label."""
        return float(answer == task.answer)
