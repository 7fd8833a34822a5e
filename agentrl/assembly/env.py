"""From the configuration to a factory of environments with the run's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from inspect import signature
from types import MappingProxyType

from agentrl.assembly.addresses import Addresses, with_addresses
from agentrl.assembly.config import RunConfig
from agentrl.assembly.rewards import reward_function
from agentrl.envs import AnyEnv, ToolEnv, find
from agentrl.envs.config import RewardChoice
from agentrl.envs.scoring import AnswerReward
from agentrl.errors import UserError
from agentrl.tools.config import ToolChoice
from agentrl.tools.registry import make_tool
from agentrl.tools.secrets import with_secrets
from agentrl.types import JSON, Limits

EnvFactory = Callable[[], AnyEnv]


def env_factory(
    env_id: str,
    kwargs: Mapping[str, JSON],
    *,
    limits: Mapping[str, float | None] = MappingProxyType({}),
    tools: ToolChoice | None = None,
    addresses: Addresses | None = None,
    reward: RewardChoice | None = None,
) -> EnvFactory:
    """A function that makes a fresh instance for every episode.

    limits: fields of `Limits` in place of the environment's own, None = no limit; see `LimitChoice.chosen`.
    tools: offered in addition to the environment's own; each is made once, here, and shared by all episodes.
    reward: the run's choice of a grader of answers, for an environment that takes one.
    addresses: of models that are served, by name; they take the place of "sglang_models.NAME" in arguments.

    Raises:
        UnknownEnvError: no environment has that name.
        UnknownToolError: no tool has one of those names.
        UserError: the environment or a tool does not take these arguments, or it is no ToolEnv; no model has
            that name; an environment variable that a secret names is not set.
    """
    resolve = partial(with_addresses, addresses=addresses or {})
    new_env = find(env_id).factory(
        **with_secrets(resolve(kwargs)), **_reward_argument(env_id, reward, addresses or {})
    )
    if tools is not None and tools.tools:
        arguments = {name: resolve(tools.tool_kwargs.get(name, {})) for name in tools.tools}
        new_env = _with_tools(env_id, new_env, arguments)
    run_limits = Limits(**{**asdict(new_env().limits), **limits})

    def make() -> AnyEnv:
        env = new_env()
        env.limits = run_limits
        return env

    return make


def run_env_factory(config: RunConfig, addresses: Addresses) -> EnvFactory:
    """`env_factory` with the settings of a run. addresses: as there."""
    rollout = config.rollout
    return env_factory(
        config.env.env,
        config.env.env_kwargs,
        limits=config.env.chosen(max_turns=rollout.max_turns, max_tokens=rollout.rollout_max_context_len),
        tools=config.env,
        addresses=addresses,
        reward=config.env,
    )


def takes_reward(env_class: type[AnyEnv]) -> bool:
    """Whether the reward of an environment is an argument of its own, which it is made with."""
    return "reward" in signature(env_class).parameters


def _reward_argument(
    env_id: str, choice: RewardChoice | None, addresses: Addresses
) -> Mapping[str, AnswerReward]:
    """The argument `reward` of the environment, where one is configured."""
    if choice is None or choice.reward is None:
        return {}
    if not takes_reward(find(env_id).env_class):
        if choice.env_reward_weight is None:
            raise UserError(
                f"{env_id} has rewards of its own; set env_reward_weight (0 = reward = {choice.reward} takes "
                "their place, 1 = it is added), or leave reward out."
            )
        return {}
    if choice.env_reward_weight is not None:
        raise UserError(f"{env_id} has no reward but reward = {choice.reward}; leave out env_reward_weight.")
    return {"reward": reward_function(choice.reward, choice.reward_kwargs, addresses)}


def _with_tools(env_id: str, new_env: EnvFactory, arguments: Mapping[str, Mapping[str, JSON]]) -> EnvFactory:
    tools = [make_tool(name, **kwargs) for name, kwargs in arguments.items()]

    def make() -> AnyEnv:
        env = new_env()
        if not isinstance(env, ToolEnv):
            raise UserError(
                f"{env_id} is no ToolEnv, so it takes no more tools; leave out tools = {list(arguments)}."
            )
        env.offer(*tools)
        return env

    return make
