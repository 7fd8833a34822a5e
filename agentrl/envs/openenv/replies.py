"""What an OpenEnv server sends: observations, errors, the description of its actions, and its tools.

A server is untrusted: what is no reply is a ValueError whose message is one sentence, and its words are cut
and made printable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from agentrl.errors import ToolDefinitionError
from agentrl.http.requests import json_of
from agentrl.tools.intake import check_parameters
from agentrl.tools.json_text import storable, text_of
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

ACT = "act"
CALL_TOOL = "call_tool"
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OWN_FIELDS = ("metadata",)
_MAX_EXCERPT = 200
_MAX_REWARD = math.nextafter(math.inf, 0)
_NO_OBJECT = "the reply is no object with a `type` and an object `data`"


class RejectedError(Exception):
    """An action that does not fit the server's schema; the reason is for the model."""


class FailedError(Exception):
    """An error that the server reports."""


class FullError(FailedError):
    """The server has as many sessions as it takes."""


class StepReply(NamedTuple):
    """What a reset or a step led to. shown: the observation as text. reward: None = the server has none.

    is_refused: a call named no tool, or its arguments do not fit.
    """

    shown: str
    reward: float | None
    done: bool
    is_refused: bool = False


class ActionForm(NamedTuple):
    """The actions of a server. act: as one tool. has_tools: they are calls of tools, which it lists."""

    act: ToolSchema
    has_tools: bool


def content_of(frame: bytes, kind: str) -> Mapping[str, JSON]:
    """The content of a reply of a kind: `observation`, `mcp`.

    Raises:
        RejectedError: the action does not fit the server's schema.
        FullError: it has as many sessions as it takes.
        FailedError: it reports another error.
        ValueError: it is no such reply.
    """
    reply = storable(json_of(frame))
    content = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(reply, dict) or not isinstance(content, dict):
        raise ValueError(_NO_OBJECT)
    if reply.get("type") == kind:
        return content
    if reply.get("type") != "error":
        raise ValueError(f"the reply has the type {excerpt(text_of(reply.get('type')))}")
    if content.get("code") == "VALIDATION_ERROR":
        raise RejectedError(_reasons(content))
    sentence = f"{_text(content.get('code'))}: {_text(content.get('message'))}"
    raise FullError(sentence) if content.get("code") == "CAPACITY_REACHED" else FailedError(sentence)


def step_of(content: Mapping[str, JSON], text: str) -> StepReply:
    """What the content of an `observation` says. text: the field that is shown; "" = all of it.

    Raises:
        ValueError: it is no observation.
    """
    if "observation" not in content:
        raise ValueError("the reply holds no `observation`")
    observation, reward, done = content["observation"], content.get("reward"), content.get("done", False)
    if not isinstance(done, bool):
        raise ValueError(f"`done` of the reply is {_text(done)}, not true or false")
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= _MAX_REWARD):
        raise ValueError(f"`reward` of the reply is {_text(reward)}, not a finite number")
    error = observation.get("error") if isinstance(observation, dict) else None
    problem = error.get("error_type") if isinstance(error, dict) else None
    return StepReply(
        _shown(observation, text),
        None if reward is None else float(reward),
        done,
        is_refused=problem in ("tool_not_found", "invalid_args"),
    )


def _shown(observation: JSON, text: str) -> str:
    if not isinstance(observation, dict):
        return text_of(observation)
    if text and (text in observation or "tool_name" not in observation):
        return text_of(observation.get(text, ""))
    if "tool_name" not in observation:
        return text_of(observation)
    error = observation.get("error")
    if isinstance(error, dict):
        return f"Error: {text_of(error.get('message'))}"
    result = observation.get("result")
    # FastMCP writes a result as its parts, as JSON, and as `data`, the value itself.
    return text_of(result["data"] if isinstance(result, dict) and "data" in result else result)


def form_of(body: bytes) -> ActionForm:
    """The actions that the reply of `/schema` describes.

    Raises:
        ValueError: it describes no action.
        ToolDefinitionError: it describes it by no JSON Schema of an object, or by one that is too large.
    """
    reply = storable(json_of(body))
    schema = reply.get("action") if isinstance(reply, dict) else None
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(properties, dict):
        raise ValueError("the reply holds no `action` with `properties`")
    own = {name: each for name, each in properties.items() if name not in _OWN_FIELDS}
    tool = ToolSchema(ACT, _described(schema) or "Do something.", {**schema, "properties": own})
    check_parameters(tool)
    return ActionForm(tool, has_tools={"type", "tool_name", "arguments"} <= own.keys())


def tools_of(content: Mapping[str, JSON]) -> tuple[ToolSchema, ...]:
    """The tools in a reply to `tools/list`; none where the server says that its environment has none.

    Raises:
        ValueError: it lists no tools, too many, or two of one name.
        ToolDefinitionError: one of them has no JSON Schema of an object, or one that is too large.
    """
    if "error" in content:
        return ()
    result = content.get("result")
    listed = result.get("tools") if isinstance(result, dict) else None
    if not isinstance(listed, list):
        raise ValueError("the reply lists no `tools`")
    if len(listed) > MAX_TOOLS:
        raise ValueError(f"the reply lists more than {MAX_TOOLS} tools")
    tools = tuple(map(_tool_of, listed))
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("the reply lists two tools of one name")
    return tools


def _tool_of(item: JSON) -> ToolSchema:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("the reply lists a tool whose `name` is not 1 to 64 of A-Z, a-z, 0-9, `_`, `-`")
    parameters = item.get("inputSchema", item.get("input_schema", {}))
    if not isinstance(parameters, dict):
        raise ToolDefinitionError(f"tool `{name}`: its parameters must be an object")
    tool = ToolSchema(name, _described(item) or name, {"type": "object", "properties": {}, **parameters})
    check_parameters(tool)
    return tool


def _described(item: Mapping[str, JSON]) -> str:
    description = item.get("description")
    return description.strip() if isinstance(description, str) else ""


def _reasons(data: Mapping[str, JSON]) -> str:
    errors = data.get("errors")
    entries = [entry for entry in errors[:3] if isinstance(entry, dict)] if isinstance(errors, list) else []
    reasons = [f"{_path(entry.get('loc'))}: {_text(entry.get('msg'))}" for entry in entries]
    return "; ".join(reasons) or _text(data.get("message"))


def _path(location: JSON) -> str:
    if not isinstance(location, list) or not location:
        return "the action"
    return excerpt(".".join(map(text_of, location[:8])))


def _text(value: JSON) -> str:
    return excerpt(text_of(value))


def excerpt(text: str) -> str:
    """The beginning of a server's words, in one printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _MAX_EXCERPT]).split())
    return line if len(line) <= _MAX_EXCERPT else f"{line[:_MAX_EXCERPT]}..."
