"""From the configuration to a factory of environments with the run's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from agentrl.envs import Env, find
from agentrl.types import Limits

EnvFactory = Callable[[], Env]


def env_factory(
    env_id: str,
    kwargs: Mapping[str, object],
    *,
    max_turns: int | None = None,
    max_tokens: int | None = None,
) -> EnvFactory:
    """A function that makes a fresh instance for every episode; None keeps the environment's limit.

    Raises:
        UnknownEnvError: nothing has that name.
        UserError: the environment does not take these arguments.
    """
    fresh = find(env_id).factory(**kwargs)
    limits: Limits = fresh().limits
    if max_turns is not None:
        limits = replace(limits, max_turns=max_turns)
    if max_tokens is not None:
        limits = replace(limits, max_tokens=max_tokens)

    def make() -> Env:
        env = fresh()
        env.limits = limits
        return env

    return make
