"""Which tools a run offers in addition to those of its environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, model_validator

from agentrl.config import IN_COMMAS, Section
from agentrl.errors import did_you_mean
from agentrl.tools.secrets import by_reference
from agentrl.types import JSON


class ToolChoice(Section):
    """Tools by name, for environments that are made of tools."""

    tools: Annotated[tuple[str, ...], IN_COMMAS] = ()
    """Tools to offer in addition to the environment's (`agentrl tools list`; a flag: python,calculator)."""
    tool_kwargs: Annotated[dict[str, dict[str, JSON]], by_reference("tool_kwargs")] = Field(
        default_factory=dict
    )
    """Arguments of those tools, by name (a table of tables; as a flag: JSON). A secret is the name of an
    environment variable: "$NAME"."""

    @model_validator(mode="after")
    def _check_names(self) -> ToolChoice:
        if unknown := _first_unknown(self.tool_kwargs, self.tools):
            raise ValueError(
                f"tool_kwargs has arguments for `{unknown}`, which is not in tools = {list(self.tools)}."
                f"{did_you_mean(unknown, self.tools)} Add it there, or leave them out."
            )
        if repeated := [name for name in self.tools if self.tools.count(name) > 1]:
            raise ValueError(f"tools names `{repeated[0]}` twice; once is enough.")
        return self


def _first_unknown(names: Iterable[str], tools: tuple[str, ...]) -> str | None:
    return next((name for name in names if name not in tools), None)
