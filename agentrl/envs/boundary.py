"""The boundary between the methods of an environment and the episode loop.

`reset` and `step` may be `async def` or plain functions, and may return what Gymnasium's return. Here they
are called, and their results become the package's types. For a result without a clear meaning there is a
StageError that says what to return.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from inspect import CO_COROUTINE
from types import CodeType
from typing import TypeGuard, cast

import numpy as np

from agentrl.envs.base import BaseEnv
from agentrl.envs.scoring import reward_of
from agentrl.errors import StageError
from agentrl.runtime.stage import stage
from agentrl.tools import is_inline, run
from agentrl.tools.json_text import encodable, storable
from agentrl.types import (
    JSON,
    History,
    JointStep,
    Message,
    Observation,
    Step,
    StepReward,
    Task,
    Text,
    ToolCall,
    ToolStats,
    observation_of,
    quoted,
)
from agentrl.types.seams import MultiAgentEnvironment, SingleAgentEnvironment, ToolSchema

AnyEnvironment = SingleAgentEnvironment | MultiAgentEnvironment

CLOSE_S = 10.0
"""The longest time that `close` takes (seconds)."""
STATE_CHARS = 1_000_000
"""Most characters of a saved state, as JSON (count)."""


async def call_reset(
    env: SingleAgentEnvironment, task: Task, *, seed: int
) -> tuple[Observation, Mapping[str, JSON]]:
    """Begin `task`; the first prompt and the info.

    Raises:
        StageError: `reset` returned something else than a pair of these.
    """
    observation, info = await _pair(env, task, seed)
    return _observation(env, "reset", observation), info


async def call_step(env: SingleAgentEnvironment, action: Message) -> Step:
    """The environment's answer to an action.

    Raises:
        StageError: `step` returned something else than five values.
    """
    observation, reward, terminated, truncated, info = _values(env, await _result(env.step, action))
    return Step(
        _observation(env, "step", () if observation is None else observation),
        _reward(reward),
        _flag(env, "terminated", terminated),
        _flag(env, "truncated", truncated),
        _info(env, "step", info),
    )


async def call_joint_reset(
    env: MultiAgentEnvironment, task: Task, *, seed: int
) -> tuple[Mapping[str, Observation], Mapping[str, JSON]]:
    """Begin `task`; the first prompts by agent, and the info.

    Raises:
        StageError: `reset` returned something else than a pair of these.
    """
    if isinstance(env, SingleAgent):
        return await env.reset(task, seed=seed)
    observations, info = await _pair(env, task, seed)
    return _observations(env, "reset", observations), info


async def call_joint_step(env: MultiAgentEnvironment, actions: Mapping[str, Message]) -> JointStep:
    """The environment's answer to the actions of the agents whose turn it was.

    Raises:
        StageError: `step` returned something else than five values.
    """
    if isinstance(env, SingleAgent):
        return await env.step(actions)
    observations, reward, terminated, truncated, info = _values(env, await _result(env.step, actions))
    own: StepReward = (
        {str(agent): _reward(value) for agent, value in reward.items()}
        if isinstance(reward, Mapping)
        else _reward(reward)
    )
    return JointStep(
        _observations(env, "step", {} if observations is None else observations),
        own,
        _flag(env, "terminated", terminated),
        _flag(env, "truncated", truncated),
        _info(env, "step", info),
    )


async def call_close(env: AnyEnvironment) -> None:
    """Release what the environment holds.

    Raises:
        StageError: `close` raised, or took longer than `CLOSE_S`.
    """
    async with stage("close", CLOSE_S):
        await _result(env.close)


@asynccontextmanager
async def closing(env: AnyEnvironment) -> AsyncIterator[None]:
    """Close the environment at the end of the block. Where both fail, the failure of the block is raised."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        with nullcontext() if is_done else suppress(StageError):
            await call_close(env)


async def call_save_state(env: AnyEnvironment) -> JSON:
    """The state of an environment between two steps, as JSON; None = it cannot be saved.

    Raises:
        StageError: `save_state` raised, or returned something else than JSON of at most `STATE_CHARS`.
    """
    inner = env.inner if isinstance(env, SingleAgent) else env
    records = inner.save_records() if isinstance(inner, BaseEnv) else None
    own = None if records is None else await _result(cast(BaseEnv, inner).save_state)
    if own is None:
        return None
    if not isinstance(own, Mapping):
        raise _wrong(inner, "save_state", f"returned {quoted(own)}; return a dict of JSON, or None")
    try:
        # As text: nothing of it is shared with the environment, which may go on.
        text = json.dumps({"own": dict(own), **(records or {})}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(
            inner, "save_state", f"returned what is no JSON ({error}); return plain values"
        ) from None
    if len(text) > STATE_CHARS:
        size = f"{len(text):,} characters of JSON, more than {STATE_CHARS:,}"
        raise _wrong(
            inner, "save_state", f"returned {size}; save what steps change, and build the rest in reset"
        )
    state: JSON = json.loads(text)
    return state


async def call_load_state(env: AnyEnvironment, state: JSON) -> None:
    """Be in a saved state; the environment has been reset to the same task and seed.

    Raises:
        StageError: `load_state` raised, or the environment saves no state.
    """
    inner = env.inner if isinstance(env, SingleAgent) else env
    if not isinstance(inner, BaseEnv) or not isinstance(state, dict):
        raise _wrong(inner, "load_state", "cannot be called: this environment saves no state")
    # What is saved stays as it is, whatever the environment does with its own.
    await _result(inner.load_state, deepcopy(state["own"]))
    inner.load_records(state)


def acting_in(env: MultiAgentEnvironment) -> Sequence[str]:
    """The agents whose turn it is, in the order of `possible_agents`; `acting` may be a single name."""
    acting = (env.acting,) if isinstance(env.acting, str) else env.acting
    return [name for name in env.possible_agents if name in acting]


def has_several_agents(env: AnyEnvironment) -> TypeGuard[MultiAgentEnvironment]:
    """Whether an environment has several agents: it then has an attribute `acting`."""
    return hasattr(env, "acting")


def as_multi_agent(env: AnyEnvironment) -> MultiAgentEnvironment:
    """The environment as one of several agents; one of a single agent is wrapped.

    Raises:
        UserError: what it declares has a form that cannot be read.
    """
    if isinstance(env, BaseEnv):
        env.convert_attributes()
    return env if has_several_agents(env) else SingleAgent(cast(SingleAgentEnvironment, env))


class SingleAgent:
    """An environment of one agent with the interface of several."""

    def __init__(self, env: SingleAgentEnvironment) -> None:
        self._env = self.inner = env
        self.id, self.limits = env.id, env.limits
        self.possible_agents = self.acting = tuple(env.possible_agents)
        (self._name,) = self.possible_agents

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """That of the environment."""
        return self._env.tool_schemas

    @property
    def counts(self) -> Mapping[str, int]:
        """That of the environment."""
        return self._env.counts

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """That of the environment."""
        return self._env.tool_stats

    def tools_of(self, agent: str) -> Sequence[ToolSchema]:
        """The environment's tools."""
        del agent
        return self._env.tool_schemas

    async def reset(self, task: Task, *, seed: int) -> tuple[Mapping[str, Observation], Mapping[str, JSON]]:
        """Begin `task`."""
        observation, info = await call_reset(self._env, task, seed=seed)
        return {self._name: observation}, info

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Answer the agent."""
        step = await call_step(self._env, actions[self._name])
        observations = {self._name: step.observation}
        return JointStep(observations, step.reward, step.terminated, step.truncated, step.info)

    async def close(self) -> None:
        """Close the environment."""
        await call_close(self._env)


async def _result(method: Callable[..., object], *arguments: object, **named: object) -> object:
    """Call a method; a plain function in a thread of its own, so that a deadline can end the wait for it."""
    code = getattr(method, "__code__", None)
    if isinstance(code, CodeType) and code.co_flags & CO_COROUTINE:
        return await cast(Awaitable[object], method(*arguments, **named))
    thread = None if is_inline(method) else str(getattr(method, "__qualname__", method))
    return await run(partial(method, *arguments, **named), thread=thread)


async def _pair(env: AnyEnvironment, task: Task, seed: int) -> tuple[object, Mapping[str, JSON]]:
    """What `reset` returned: an observation, and the info."""
    if isinstance(env, BaseEnv):
        env.seed_rng(seed)
    result = await _result(env.reset, task, seed=seed)
    if isinstance(result, tuple | list) and len(result) == 2:
        return result[0], _info(env, "reset", result[1])
    raise _wrong(env, "reset", f"returned {quoted(result)}; return a pair, such as `task.prompt, {{}}`")


def _values(env: AnyEnvironment, result: object) -> Sequence[object]:
    """What `step` returned: five values."""
    if type(result) is Step or (isinstance(result, tuple | list) and len(result) == 5):
        return cast(Sequence[object], result)
    number = f"{len(result)} values" if isinstance(result, tuple | list) else quoted(result)
    form = "observation, reward, terminated, truncated, info"
    raise _wrong(env, "step", f"returned {number}; return a Step, or Gymnasium's five values: {form}")


def _observations(env: AnyEnvironment, method: str, value: object) -> Mapping[str, Observation]:
    if not isinstance(value, Mapping):
        raise _wrong(
            env, method, f"returned the observations {quoted(value)}; write one for each agent by name"
        )
    return {str(agent): _observation(env, method, observation) for agent, observation in value.items()}


def _observation(env: AnyEnvironment, method: str, value: object) -> Observation:
    try:
        observation = observation_of(value)
        if all(_is_encodable(message) for message in observation):
            return observation
        messages = tuple(map(_encodable, observation))
    except ValueError as error:
        raise _wrong(env, method, f"returned an observation that cannot be read: {error}") from None
    return History(messages, observation.reason) if isinstance(observation, History) else messages


def _is_encodable(message: Message) -> bool:
    """Whether no text of a message holds half a surrogate pair, which no tokenizer takes."""
    texts = (message.text, message.reasoning, message.tool_call_id, message.name)
    calls = all(call == _encodable_call(call) for call in message.tool_calls)
    return calls and all(text is None or text == encodable(text) for text in texts)


def _encodable(message: Message) -> Message:
    """The message with `?` for every half of a surrogate pair, as in results of tools."""
    content = message.content
    if not isinstance(content, str):
        content = tuple(Text(encodable(part.text)) if isinstance(part, Text) else part for part in content)
    reasoning, call_id, name = (
        None if text is None else encodable(text)
        for text in (message.reasoning, message.tool_call_id, message.name)
    )
    return Message(
        message.role,
        encodable(content) if isinstance(content, str) else content,
        reasoning,
        tuple(map(_encodable_call, message.tool_calls)),
        call_id,
        name,
    )


def _encodable_call(call: ToolCall) -> ToolCall:
    name, raw, id = map(encodable, (call.name, call.raw, call.id))
    error = None if call.error is None else encodable(call.error)
    arguments = None if call.arguments is None else cast(dict[str, JSON], storable(dict(call.arguments)))
    return ToolCall(name, arguments, raw, id, error)


def _reward(value: object) -> float | None:
    return None if value is None else reward_of(value)


def _flag(env: AnyEnvironment, name: str, value: object) -> bool:
    if value is True or value is False or isinstance(value, np.bool_):
        return bool(value)
    raise _wrong(env, "step", f"returned {quoted(value)} as `{name}`; return True or False")


def _info(env: AnyEnvironment, method: str, value: object) -> Mapping[str, JSON]:
    if type(value) is dict or isinstance(value, Mapping | None):
        return value or {}
    raise _wrong(env, method, f"returned {quoted(value)} as its info; return a dict")


def _wrong(env: AnyEnvironment, method: str, problem: str) -> StageError:
    return StageError(method, "invalid", f"{type(env).__name__}.{method} {problem}")
