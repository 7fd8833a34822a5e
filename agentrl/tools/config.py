"""Which tools a run offers beside those of its environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from agentrl.config import Section
from agentrl.errors import did_you_mean
from agentrl.types import JSON


def _split(value: object) -> object:
    """A flag's text as a list: names hold no commas."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Several names; as a flag, with commas between them."""


class ToolChoice(Section):
    """Tools by name, for environments that are made of tools."""

    tools: Names = ()
    """Tools to offer beside the environment's own (`agentrl tools list`; as a flag: python,calculator)."""
    tool_kwargs: dict[str, dict[str, JSON]] = Field(default_factory=dict)
    """Arguments that those tools are made with, by name (a table of tables; as a flag: JSON)."""

    @model_validator(mode="after")
    def _are_for_tools_of_the_run(self) -> ToolChoice:
        if stranger := _first_stranger(self.tool_kwargs, self.tools):
            raise ValueError(
                f"tool_kwargs has arguments for `{stranger}`, which is not in tools = {list(self.tools)}."
                f"{did_you_mean(stranger, self.tools)} Add it there, or leave them out."
            )
        if repeated := [name for name in self.tools if self.tools.count(name) > 1]:
            raise ValueError(f"tools names `{repeated[0]}` twice; once is enough.")
        return self


def _first_stranger(names: Iterable[str], known: tuple[str, ...]) -> str | None:
    return next((name for name in names if name not in known), None)
