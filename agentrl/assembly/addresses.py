"""Addresses of the models that a run serves besides its policy, in place of their names in arguments."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.errors import ConfigError, did_you_mean
from agentrl.types import JSON

Addresses = Mapping[str, str]
MODELS = "sglang_models."


def with_addresses(arguments: Mapping[str, JSON], addresses: Addresses) -> dict[str, JSON]:
    """Arguments of an environment or a tool, with the address in place of each "sglang_models.NAME".

    Raises:
        ConfigError: no model has that name.
    """
    return {name: _with_address(value, addresses) for name, value in arguments.items()}


def _with_address(value: JSON, addresses: Addresses) -> JSON:
    if isinstance(value, dict):
        return with_addresses(value, addresses)
    if isinstance(value, list):
        return [_with_address(item, addresses) for item in value]
    if not isinstance(value, str) or not value.startswith(MODELS):
        return value
    name = value.removeprefix(MODELS)
    if name not in addresses:
        served = ", ".join(addresses) or "none"
        raise ConfigError(
            f"`{value}` is no model of this run, which serves {served}.{did_you_mean(name, addresses)} "
            "Name it in [engine.sglang_models]."
        )
    return addresses[name]
