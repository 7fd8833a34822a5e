"""From the configuration to a factory of environments with the run's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from inspect import signature
from types import MappingProxyType

from agentrl.assembly.addresses import Addresses, with_addresses
from agentrl.assembly.rewards import reward_function
from agentrl.envs import AnyEnv, ToolEnv, find
from agentrl.envs.answers import AnswerReward
from agentrl.errors import UserError
from agentrl.tools.config import ToolChoice
from agentrl.tools.registry import make_tool
from agentrl.types import JSON, Limits

EnvFactory = Callable[[], AnyEnv]


def env_factory(
    env_id: str,
    kwargs: Mapping[str, JSON],
    *,
    limits: Mapping[str, float | None] = MappingProxyType({}),
    tools: ToolChoice | None = None,
    addresses: Addresses | None = None,
    reward: str | None = None,
) -> EnvFactory:
    """A function that makes a fresh instance for every episode.

    limits: fields of `Limits` in place of the environment's own, None = no limit; see `LimitChoice.chosen`.
    tools: offered beside the environment's own; each is made once, here, and serves all episodes.
    reward: what an answer is worth, by name, for an environment that takes such a function.
    addresses: of models that are served, by name; they take the place of "sglang_models.NAME" in arguments.

    Raises:
        UnknownEnvError: nothing has that name.
        UnknownToolError: no tool has one of those names.
        UserError: the environment or a tool does not take these arguments, or it is no ToolEnv; no model has
            that name.
    """
    told = partial(with_addresses, addresses=addresses or {})
    fresh = find(env_id).factory(**told(kwargs), **_rewarded(env_id, reward))
    if tools is not None and tools.tools:
        arguments = {name: told(tools.tool_kwargs.get(name, {})) for name in tools.tools}
        fresh = _with_tools(env_id, fresh, arguments)
    own = Limits(**{**asdict(fresh().limits), **limits})

    def make() -> AnyEnv:
        env = fresh()
        env.limits = own
        return env

    return make


def _rewarded(env_id: str, reward: str | None) -> Mapping[str, AnswerReward]:
    """The argument `reward`, where there is one."""
    if reward is None:
        return {}
    if "reward" not in signature(find(env_id).env_class).parameters:
        raise UserError(f"{env_id} has rewards of its own and takes none; leave out reward = {reward}.")
    return {"reward": reward_function(reward)}


def _with_tools(env_id: str, fresh: EnvFactory, arguments: Mapping[str, Mapping[str, JSON]]) -> EnvFactory:
    tools = [make_tool(name, **below) for name, below in arguments.items()]

    def make() -> AnyEnv:
        env = fresh()
        if not isinstance(env, ToolEnv):
            raise UserError(
                f"{env_id} is no ToolEnv, so it takes no more tools; leave out tools = {list(arguments)}."
            )
        env.offer(*tools)
        return env

    return make
