"""The Gymnasium face: a registered environment as a synchronous `gymnasium.Env` over text.

    env = gymnasium.make("agentrl:agentrl/HopSearch-v0", split="test")
    observation, info = env.reset(seed=0)                                   # the task's prompt
    observation, reward, terminated, truncated, info = env.step("<search> Kalor Mendos born</search>")
    env.step("<answer> Tirak</answer>")

An action is text of a model in the environment's inline dialect; an observation is the text of the world's
answers. The deadlines of reset and step apply. The deadline of the episode does not, since the time between
two actions is the caller's, and neither does max_tokens, since text has no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import SupportsFloat, TypeVar

import gymnasium

from agentrl.envs import inline_text
from agentrl.envs.base import Env, tasks_of
from agentrl.envs.boundary import call_close, call_reset, call_step
from agentrl.envs.dialect import closing, opening, tags_of
from agentrl.envs.gym.spaces import TextSpace
from agentrl.envs.multi_agent import one_agent_of
from agentrl.envs.registry import find
from agentrl.errors import UserError, did_you_mean
from agentrl.runtime.stage import stage
from agentrl.types import JSON, Message, Observation, Step, Task

_T = TypeVar("_T")
_OPTIONS = ("task", "split")
_METADATA: dict[str, object] = {"render_modes": ["ansi"], "render_fps": 1}


class GymnasiumFace(gymnasium.Env[str, str]):
    """One registered environment, episode after episode.

    split: the split from which reset() draws a task, with this environment's own generator; left out,
    `train`, or the first where there is none of that name.
    reset(options={"task": ...}) selects one instead: its number in the split, its id, or a Task;
    {"split": ...} draws from another split for this episode.
    render_mode: None or "ansi": render() then returns the episode so far.
    agent: in an environment of several agents, the agent that acts; left out, the first. Their `opponent`
    scripts play the others.
    kwargs: arguments of the environment.

    Raises:
        UserError: no such environment, argument, split or task, or step() before reset().
    """

    metadata = _METADATA

    def __init__(
        self,
        env_id: str,
        *,
        split: str | None = None,
        render_mode: str | None = None,
        agent: str | None = None,
        **kwargs: object,
    ) -> None:
        self._make_env = one_agent_of(find(env_id).factory(**kwargs), agent)
        self._example = self._make_env()
        self._open: Env | None = None
        self._loop = _Loop()
        self._num_turns = 0
        self._transcript: list[str] = []
        self.split = split or _first_split(self._example)
        self.render_mode = render_mode
        self.observation_space = TextSpace()
        self.action_space = TextSpace(_forms(self._example))

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Begin an episode; the same seed and options give the same episode.

        The info holds the task's id, the tools on offer, and the info of the environment.
        """
        super().reset(seed=seed)
        task = self._task(options or {})
        self._end()
        env = self._open = self._make_env()
        observation, info = self._loop.run(_reset(env, task, int(self.np_random.integers(2**31))))
        self._num_turns = 0
        self._transcript = []
        tools = [{**tool._asdict(), "parameters": dict(tool.parameters)} for tool in env.tool_schemas]
        return self._record(observation), deepcopy({**info, "task": task.id, "tools": tools})

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, object]]:
        """Send an action to the world. The reward of a turn that the world does not score is 0.0.

        At max_turns of the environment the episode is truncated.
        """
        env = self._open
        if env is None:
            raise UserError("there is no episode to step in; call reset() first.")
        message = inline_text.read(str(action), env.tool_schemas, tags_of(env.dialect))
        self._transcript.append(str(action))
        step = self._loop.run(_step(env, message))
        self._num_turns += 1
        truncated = step.truncated or (not step.terminated and self._num_turns >= env.limits.max_turns)
        if step.terminated or truncated:
            self._end()
        reward = 0.0 if step.reward is None else float(step.reward)
        return self._record(step.observation), reward, step.terminated, truncated, deepcopy(dict(step.info))

    def render(self) -> str | None:
        """The episode so far, in render mode "ansi"."""
        return "\n".join(self._transcript) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the episode and the event loop. Closing twice is fine."""
        self._end()
        self._loop.close()

    def _task(self, options: Mapping[str, object]) -> Task:
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            near = did_you_mean(unknown[0], _OPTIONS)
            raise UserError(f"reset() has no option `{unknown[0]}`.{near} It has {', '.join(_OPTIONS)}.")
        choice = options.get("task")
        if isinstance(choice, Task):
            return choice
        split = str(options.get("split", self.split))
        tasks = tasks_of(self._example, split)
        if choice is None and tasks:
            return tasks[int(self.np_random.integers(len(tasks)))]
        if isinstance(choice, int) and 0 <= choice < len(tasks):
            return tasks[choice]
        by_id = {task.id: task for task in tasks}
        if isinstance(choice, str) and choice in by_id:
            return by_id[choice]
        raise UserError(
            f"split `{split}` of {self._example.id} has no task {choice!r}."
            f"{did_you_mean(str(choice), by_id)} "
            f"Name one by its id, or by its number from 0 to {len(tasks) - 1}."
        )

    def _record(self, observation: Observation) -> str:
        text = "\n".join(message.text for message in observation)
        self._transcript.append(text)
        return text

    def _end(self) -> None:
        env, self._open = self._open, None
        if env is not None:
            self._loop.run(call_close(env))


def _first_split(env: Env) -> str:
    return env.splits[0] if env.splits and "train" not in env.splits else "train"


class _Loop:
    """An event loop that runs only during run().

    Waits for: the coroutine. Inside another running loop (a notebook's) it runs in a thread, which
    ends with the coroutine. On shutdown: close() cancels the remaining tasks of the loop; a closed
    loop opens again at its next use.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, work: Coroutine[object, object, _T]) -> _T:
        if self._runner is None:
            # The factory keeps the runner from becoming the thread's own current loop.
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        runner = self._runner
        return _run_outside_of_loops(lambda: runner.run(work))

    def close(self) -> None:
        if self._runner is not None:
            _run_outside_of_loops(self._runner.close)
        self._runner = None


def _run_outside_of_loops(work: Callable[[], _T]) -> _T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


async def _reset(env: Env, task: Task, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
    async with stage("reset", env.limits.reset_timeout_s):
        return await call_reset(env, task, seed=seed)


async def _step(env: Env, action: Message) -> Step:
    async with stage("step", env.limits.step_timeout_s):
        return await call_step(env, action)


def _forms(env: Env) -> list[str]:
    names = [*(tool.name for tool in env.tool_schemas), tags_of(env.dialect).answer]
    return [f"{opening(name)} {{}}{closing(name)}" for name in names]
