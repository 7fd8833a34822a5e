"""An environment here as one of the Open Reward Standard: an exported `server.py` derives it.

openreward's `Server` serves its splits, its tasks, and a session for each episode. A model there does nothing
but call tools, so that its messages are calls, too:

    say(message)    where a message may be answered, as in games: a tool among the others
                    where it ends the episode: the terminal tool, which models are not shown

What happens in an episode, its limits and its score are those of `play`; the score comes with the call that
ends it. A world that fails is an error of the call, and never a reward of 0.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import MethodType
from typing import ClassVar

from fastapi import HTTPException
from openreward.environments import (
    Environment,
    ImageBlock,
    ListToolsOutput,
    Message,
    Server,
    TextBlock,
    ToolCallBlock,
    ToolOutput,
    ToolResultBlock,
    ToolSpec,
    terminal,
    tool,
)
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.envs.base import BaseEnv
from agentrl.envs.export.driven import DrivenEpisode
from agentrl.envs.export.world import ExportedWorld
from agentrl.errors import StageError, UserError
from agentrl.types import JSON, Image, Observation, Task, ToolCall
from agentrl.types import Message as Said
from agentrl.types.seams import ToolSchema

__all__ = ["EpisodeEnvironment", "Server"]
_ENDED = "The episode has ended."
_SAY = "say"


class TaskSpec(BaseModel):
    """A task, as it is listed. task: its id. split: where it is. seed: of its world."""

    model_config = ConfigDict(extra="forbid")
    task: str
    split: str
    seed: int = Field(ge=0, lt=1 << 63)


class EpisodeEnvironment(Environment):
    """A session of it is an episode. A subclass sets the environment.

    env_id: of an environment here. env_kwargs: its arguments.

    Raises:
        HTTPException: 422, the environment has no such task.
        UserError: where the subclass is defined: there is no such environment, or it does not take these
            arguments.
    """

    env_id: ClassVar[str] = ""
    env_kwargs: ClassVar[Mapping[str, JSON]] = {}
    _world: ClassVar[ExportedWorld]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._world = ExportedWorld(cls.env_id, cls.env_kwargs)
        cls.toolsets = (_tools_of(cls._world.example),)

    def __init__(self, task_spec: Mapping[str, JSON], secrets: Mapping[str, str]) -> None:
        super().__init__(dict(task_spec), dict(secrets))
        try:
            spec = TaskSpec.model_validate(task_spec)
            task = _tasks(self._world, spec.split)[spec.task]
        except (KeyError, UserError, ValidationError):
            raise HTTPException(
                422, f"{self.env_id} has no such task; take one of those that /tasks lists"
            ) from None
        self._episode = DrivenEpisode(self._world.make(), task, seed=spec.seed)
        self._prompt: Observation = ()
        self._has_begun = asyncio.Event()

    @classmethod
    def list_splits(cls) -> Sequence[str]:
        """The names of its splits."""
        return list(cls._world.example.splits)

    @classmethod
    def list_tasks(cls, split: str) -> Sequence[Mapping[str, JSON]]:
        """The tasks of a split. A task has one world, whose seed is its number."""
        tasks = _tasks(cls._world, split)
        return [TaskSpec(task=id, split=split, seed=seed).model_dump() for seed, id in enumerate(tasks)]

    async def setup(self) -> None:
        """Begin the episode."""
        try:
            self._prompt = await self._episode.begin() or ()
        finally:
            self._has_begun.set()

    async def teardown(self) -> None:
        """End it, wherever it is."""
        with suppress(StageError):
            await self._episode.end()

    async def list_task_tools(self) -> ListToolsOutput:
        """The tools that the episode has besides those of its class."""
        await self._has_begun.wait()
        known = {each.name for each in self.list_tools().tools}
        specs = [
            ToolSpec(name=each.name, description=each.description, input_schema=dict(each.parameters))
            for each in self.offered
            if each.name not in known
        ]
        return ListToolsOutput(tools=specs)

    @property
    def offered(self) -> Sequence[ToolSchema]:
        """The tools of the turn that waits."""
        return self._episode.tools

    async def get_messages(self) -> Sequence[Message]:
        """What the world shows first."""
        return [_message(each) for each in self._prompt]

    async def act(self, action: Said, *, is_last: bool = False) -> ToolOutput:
        """What the world answers; with the score, where the episode has ended. is_last: it ends in any case.

        Raises:
            StageError: the world or a reward failed.
        """
        observation = await self._episode.act(action)
        if observation is not None and not is_last:
            return ToolOutput(blocks=[block for each in observation for block in _blocks(each)])
        verdict = await self._episode.end()
        parts: dict[str, JSON] = {"parts": dict(verdict.parts)}
        blocks = [TextBlock(text=_ENDED)]
        return ToolOutput(blocks=blocks, reward=verdict.total, metadata=parts, finished=True)


class _Tools:
    """Tools of a session, as methods: one for each tool of the environment, and `say`."""

    def __init__(self, session: EpisodeEnvironment) -> None:
        self.session_ = session

    def __getattr__(self, name: str) -> Callable[[BaseModel], Awaitable[ToolOutput]]:
        """The call of a tool that only this episode has."""
        for schema in self.session_.offered:
            if schema.name == name:
                return MethodType(_calling(schema), self)
        raise AttributeError(name)


class _Arguments(BaseModel):
    """Arguments of a call, which the world checks. schema_: what the model is told of them."""

    model_config = ConfigDict(extra="allow")
    schema_: ClassVar[Mapping[str, JSON]] = {}

    @classmethod
    def model_json_schema(cls, *args: object, **kwargs: object) -> dict[str, JSON]:
        """The schema of the tool, as the environment declares it."""
        del args, kwargs
        return dict(cls.schema_)


class _Words(BaseModel):
    message: str


_Call = Callable[[_Tools, BaseModel], Awaitable[ToolOutput]]


def _tools_of(env: BaseEnv) -> type:
    methods = {schema.name: _calling(schema) for schema in env.tool_schemas}
    name = next(name for name in (_SAY + "_" * k for k in range(len(methods) + 1)) if name not in methods)
    is_last = bool(methods) or env.limits.max_turns == 1
    methods[name] = _saying(is_last)
    return type("Tools", (_Tools,), methods)


def _calling(schema: ToolSchema) -> _Call:
    # openreward takes a first parameter of another name than `self` for an argument.
    async def call(self: _Tools, arguments: BaseModel) -> ToolOutput:
        given = ToolCall(schema.name, dict(arguments.model_extra or {}))
        return await self.session_.act(Said("assistant", tool_calls=(given,)))

    form = type("Arguments", (_Arguments,), {"schema_": schema.parameters, "__annotations__": {}})
    return _declared(call, form, schema.description)


def _saying(is_last: bool) -> _Call:
    async def say(self: _Tools, arguments: BaseModel) -> ToolOutput:
        assert isinstance(arguments, _Words)
        return await self.session_.act(Said("assistant", arguments.message), is_last=is_last)

    _declared(say, _Words, "Give the final answer." if is_last else "Say something; the world answers.")
    if is_last:
        terminal(say)
    return say


def _declared(call: _Call, form: type[BaseModel], description: str) -> _Call:
    """A method that openreward takes for a tool. Calls of a session run one after another."""
    call.__doc__ = description
    call.__annotations__ = {"arguments": form, "return": ToolOutput}
    tool(exclusive=True)(call)
    return call


def _message(message: Said) -> Message:
    blocks = _blocks(message)
    if message.role == "tool":
        return Message(
            role="user", blocks=[ToolResultBlock(tool_call_id=message.tool_call_id or "", blocks=blocks)]
        )
    calls = [
        ToolCallBlock(id=call.id, name=call.name, input=dict(call.arguments or {}))
        for call in message.tool_calls
    ]
    return Message(role=message.role, blocks=[*blocks, *calls])


def _blocks(message: Said) -> list[TextBlock | ImageBlock]:
    if isinstance(message.content, str):
        return [TextBlock(text=message.content)]
    return [
        ImageBlock(data=base64.b64encode(part.data).decode(), mimeType=part.media_type)
        if isinstance(part, Image)
        else TextBlock(text=part.text)
        for part in message.content
    ]


@lru_cache(maxsize=16)
def _tasks(world: ExportedWorld, split: str) -> Mapping[str, Task]:
    return {task.id: task for task in world.tasks(split)}
