"""Sessions of a served environment: each plays one episode at a time, with an instance of its own.

The deadlines of reset, tools, step and reward apply, and so does `max_turns`. Those of the episode and of its
tokens do not: the time between two actions is the client's, and so are the tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from starlette.websockets import WebSocketDisconnect

from agentrl.engine.chat.agent import openai_content
from agentrl.envs.base import Env, tasks_of
from agentrl.envs.boundary import call_close, call_reset, call_step
from agentrl.envs.openenv.replies import CALL_TOOL, FullError
from agentrl.errors import StageError, UserError
from agentrl.runtime.stage import stage
from agentrl.types import JSON, History, Message, Observation, Step, Task, ToolCall
from agentrl.types.seams import ToolSchema

Body = dict[str, JSON]
GONE = "websocket.disconnect"
"""The type of what arrives when the client of a WebSocket is gone."""
MESSAGE, LIST_TOOLS = "message", "list_tools"
OBSERVATION: Mapping[str, JSON] = {
    "title": "Observation",
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "The new messages as one text."},
        "messages": {"type": "array", "description": "The new messages, as OpenAI's chat has them."},
        "tool_name": {"type": "string", "description": "The tool that was called."},
        "result": {"type": "string", "description": "What it answered."},
        "metadata": {"type": "object"},
    },
    "required": ["text", "messages"],
}
STATE: Mapping[str, JSON] = {
    "title": "State",
    "type": "object",
    "properties": {
        "episode_id": {"type": ["string", "null"]},
        "step_count": {"type": "integer"},
        "task": {"type": ["string", "null"], "description": "The id of the task."},
        "total_reward": {"type": "number", "description": "The rewards of the steps so far."},
        "done": {"type": "boolean"},
    },
}
_TYPES: Mapping[str, type] = {
    "type": str,
    "message": str,
    "tool_name": str,
    "arguments": dict,
    "metadata": dict,
}
_MAX_EPISODE_ID = 255
_MAX_SEED = 2**63
_LOOK_EVERY_S = 0.5
_NO_EPISODE = "There is no episode; send a reset first."


class InvalidError(Exception):
    """A message does not fit its schema. errors: as pydantic lists them."""

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{place}: {reason}" for place, reason in errors))
        self.errors: list[JSON] = [
            {"type": "value_error", "loc": [place], "msg": reason} for place, reason in errors
        ]


class NamedAction(NamedTuple):
    """An action of a client. kind: its `type`."""

    kind: str
    message: str
    tool_name: str
    arguments: Mapping[str, JSON]

    @property
    def said(self) -> Message:
        """The message of the agent that it is."""
        if self.kind == MESSAGE:
            return Message("assistant", self.message)
        return Message("assistant", tool_calls=(ToolCall(self.tool_name, self.arguments, id="call"),))


def action_schema(tools: Sequence[ToolSchema]) -> Body:
    """The JSON Schema of actions. It describes the tools, too: trainers show it to their models."""
    takes = "; ".join(f"{tool.name}: {json.dumps(dict(tool.parameters))}" for tool in tools)
    names: list[JSON] = ["", *(tool.name for tool in tools)]
    purposes = "; ".join(f"{tool.name}: {tool.description}" for tool in tools)
    kinds: list[JSON] = [MESSAGE, CALL_TOOL, LIST_TOOLS]
    said = "What is said, which is the answer where it is final; of type `message`."
    return {
        "title": "AgentAction",
        "description": "What the agent does: it says something, or calls one tool.",
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": kinds, "default": MESSAGE},
            "message": {"type": "string", "default": "", "description": said},
            "tool_name": {"type": "string", "enum": names, "default": "", "description": purposes},
            "arguments": {"type": "object", "default": {}, "description": f"Of the tool. {takes}"},
            "metadata": {"type": "object", "default": {}},
        },
        "additionalProperties": False,
    }


def read_action(data: Mapping[str, JSON]) -> NamedAction:
    """An action from the data of a `step`.

    Raises:
        InvalidError: it is none.
    """
    errors = [(name, "Extra inputs are not permitted") for name in data if name not in _TYPES][:8]
    errors += [
        (name, f"Input should be a valid {'string' if kind is str else 'dictionary'}")
        for name, kind in _TYPES.items()
        if not isinstance(data.get(name, kind()), kind)
    ]
    kind, name = data.get("type", MESSAGE), data.get("tool_name", "")
    if not errors and kind not in (MESSAGE, CALL_TOOL, LIST_TOOLS):
        errors.append(("type", f"Input should be '{MESSAGE}', '{CALL_TOOL}' or '{LIST_TOOLS}'"))
    if not errors and (kind == CALL_TOOL) != bool(name):
        errors.append(("tool_name", f"It belongs to an action of type '{CALL_TOOL}', and to no other"))
    if errors:
        raise InvalidError(errors)
    arguments = data.get("arguments", {})
    assert isinstance(arguments, dict), "it was checked"
    return NamedAction(str(kind), str(data.get("message", "")), str(name), arguments)


class ServedWorld:
    """What is served. make: an instance, for one episode. split: of resets that name none; "" = the first.

    Raises:
        UserError: it has no such split, or no task in it.
    """

    def __init__(self, make: Callable[[], Env], split: str = "") -> None:
        self.make = make
        self.example = make()
        self.splits: Sequence[str] = self.example.splits or ("train",)
        self.split = split or ("train" if "train" in self.splits else self.splits[0])
        if not self.tasks(self.split):
            raise UserError(f"{self.example.id} has no task in its split `{self.split}`; serve another one.")

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split.

        Raises:
            UserError: it has no such split.
        """
        return tasks_of(self.example, split)

    def task(self, data: Mapping[str, JSON], seed: int) -> Task:
        """The task of a reset: by its `task`, an id or a number; left out, the one of the seed.

        Raises:
            InvalidError: there is no such task, or no such split.
        """
        try:
            tasks = self.tasks(str(data.get("split") or self.split))
        except UserError as error:
            raise InvalidError([("split", str(error))]) from None
        choice = data.get("task")
        if choice is None:
            return tasks[seed % len(tasks)]
        if isinstance(choice, int) and not isinstance(choice, bool) and 0 <= choice < len(tasks):
            return tasks[choice]
        found = next((task for task in tasks if task.id == choice), None)
        if found is None:
            reason = f"Input should be the id of a task, or a number from 0 to {len(tasks) - 1}"
            raise InvalidError([("task", reason)])
        return found


class ServedSession:
    """One session: an episode at a time. All of its requests take turns.

    is_attached: a WebSocket holds it. arriving: what waits there for the next message, or None. is_leaving:
    the session ends with that WebSocket. used_s: when its last request ended (`time.monotonic`).
    """

    def __init__(self, world: ServedWorld) -> None:
        self.id = str(uuid.uuid4())
        self.is_attached = False
        self.is_leaving = False
        self.arriving: asyncio.Future[MutableMapping[str, object]] | None = None
        self.used_s = time.monotonic()
        self.prompt = ""
        self._world = world
        self._turn = asyncio.Lock()
        self._env: Env | None = None
        self._task: Task | None = None
        self._episode_id = self.id
        self._num_episodes, self._num_steps, self._total, self._is_done = 0, 0, 0.0, False

    @property
    def is_busy(self) -> bool:
        """Whether a request of it is being answered."""
        return self._turn.locked()

    @property
    def state(self) -> Body:
        """See `STATE`."""
        return {
            "episode_id": self._episode_id,
            "step_count": self._num_steps,
            "task": None if self._task is None else self._task.id,
            "total_reward": self._total,
            "done": self._is_done,
        }

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The tools of its episode; before one begins, as far as they are known."""
        return (self._env or self._world.example).tool_schemas

    async def reset(self, data: Mapping[str, JSON]) -> Body:
        """Begin an episode; the one before ends. data: seed, episode_id, task, split; others have no effect.

        Raises:
            InvalidError: one of them is wrong.
            AgentRLError: the environment failed.
        """
        seed, episode_id = data.get("seed"), data.get("episode_id")
        if seed is None:
            seed = random.randrange(2**31)
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _MAX_SEED:
            raise InvalidError([("seed", "Input should be an integer from 0 to 2**63 - 1")])
        if not (episode_id is None or (isinstance(episode_id, str) and len(episode_id) <= _MAX_EPISODE_ID)):
            raise InvalidError([("episode_id", f"Input should be at most {_MAX_EPISODE_ID} characters")])
        task = self._world.task(data, seed)
        async with self._one_at_a_time():
            await self._end()
            env = self._env = self._world.make()
            self._num_episodes += 1
            self._episode_id, self._task = episode_id or f"{self.id}-{self._num_episodes}", task
            self._num_steps, self._total, self._is_done = 0, 0.0, False
            env.seed_rng(seed)
            async with self._ends_where_it_fails(), stage("reset", env.limits.reset_timeout_s):
                observation, _ = await call_reset(env, task, seed=seed)
            self.prompt = _text(observation)
            return _reply(observation, None, done=False, metadata={"task": task.id, "split": task.split})

    async def step(self, action: NamedAction) -> Body:
        """Take an action.

        Raises:
            UserError: no episode runs.
            AgentRLError: the environment failed.
        """
        async with self._one_at_a_time():
            if action.kind == LIST_TOOLS:
                return {"observation": {"tools": described(self.tools)}, "reward": None, "done": False}
            env = self._env
            if env is None:
                raise UserError("The episode has ended; send a reset." if self._is_done else _NO_EPISODE)
            async with self._ends_where_it_fails(), stage("step", env.limits.step_timeout_s):
                step = await call_step(env, action.said)
            return await self._counted(env, action, step)

    async def close(self) -> None:
        """End it, and its episode."""
        async with self._turn:
            await self._end()

    async def _counted(self, env: Env, action: NamedAction, step: Step) -> Body:
        self._num_steps += 1
        self._total += step.reward or 0.0
        is_cut = step.truncated or (not step.terminated and self._num_steps >= env.limits.max_turns)
        self._is_done = step.terminated or is_cut
        if self._is_done:
            await self._end()
        metadata: Body = {"terminated": step.terminated, "truncated": is_cut}
        reply = _reply(step.observation, step.reward, done=self._is_done, metadata=metadata)
        if action.kind == CALL_TOOL and isinstance(shown := reply["observation"], dict):
            shown |= {"tool_name": action.tool_name, "result": shown["text"], "error": None}
        return reply

    async def _end(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await call_close(env)

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        async with self._turn:
            try:
                yield
            finally:
                self.used_s = time.monotonic()

    @asynccontextmanager
    async def _ends_where_it_fails(self) -> AsyncIterator[None]:
        """What an environment is after a failure, or a cancelled call, nobody knows: its episode ends."""
        is_good = False
        try:
            yield
            is_good = True
        finally:
            if not is_good:
                self._is_done = True
                # The failure is reported, and not what it has led to.
                with suppress(StageError):
                    await self._end()


class ServedSessions:
    """The sessions that are open, by id."""

    def __init__(self, world: ServedWorld, most: int, idle_s: float) -> None:
        self.world, self.most, self.idle_s = world, most, idle_s
        self._open: dict[str, ServedSession] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> ServedSession:
        """Another session.

        Raises:
            FullError: there are as many as may be.
        """
        if len(self) >= self.most:
            raise FullError(
                f"Server at capacity: {len(self)}/{self.most} sessions active. Cannot accept new connections."
            )
        session = ServedSession(self.world)
        self._open[session.id] = session
        return session

    def find(self, id: object) -> ServedSession | None:
        """That of an id."""
        return self._open.get(id) if isinstance(id, str) else None

    async def close(self, session: ServedSession) -> None:
        """End a session. What its environment fails at while it closes is nobody's any more."""
        if self._open.pop(session.id, None) is not None:
            with suppress(StageError):
                await session.close()

    async def watch(self) -> None:
        """End sessions that have rested for too long, until it is cancelled; then all."""
        try:
            while True:
                await asyncio.sleep(min(_LOOK_EVERY_S, self.idle_s))
                await self._look(time.monotonic() - self.idle_s)
        finally:
            await asyncio.gather(*(self.close(session) for session in [*self._open.values()]))

    async def _look(self, end_s: float) -> None:
        """End those that have rested since `end_s`."""
        for session in [*self._open.values()]:
            if session.used_s > end_s or session.is_busy:
                continue
            if not session.is_attached:
                await self.close(session)
            elif session.arriving is not None:
                # Its WebSocket ends, and with it the session.
                session.arriving.cancel()


def described(tools: Sequence[ToolSchema], key: str = "input_schema") -> list[JSON]:
    """Tools as OpenEnv lists them. key: the name of their parameters there."""
    return [
        {"name": tool.name, "description": tool.description, key: dict(tool.parameters)} for tool in tools
    ]


def _reply(observation: Observation, reward: float | None, *, done: bool, metadata: Body) -> Body:
    if isinstance(observation, History):
        metadata["replaces_all_messages"] = True
    messages: list[JSON] = [
        {"role": message.role, "content": openai_content(message)} for message in observation
    ]
    shown: JSON = {"text": _text(observation), "messages": messages, "metadata": metadata}
    value = None if reward is None else float(reward)
    return {"observation": shown, "reward": value, "done": done, "metadata": metadata}


def _text(observation: Observation) -> str:
    return "\n".join(message.text for message in observation)


async def unless_gone(
    arriving: asyncio.Task[MutableMapping[str, object]], answering: Awaitable[Body | None]
) -> Body | None:
    """An answer. arriving: what comes next from the client; that it is gone ends the work for the answer.

    Raises:
        WebSocketDisconnect: the client went before the answer was there.
    """
    own, is_done = asyncio.current_task(), False
    assert own is not None, "a WebSocket is served in a task"

    def look(arrived: asyncio.Task[MutableMapping[str, object]]) -> None:
        # asyncio may have this call in its queue when the answer is there: the task then does other work.
        if not is_done and _is_gone(arrived):
            own.cancel()

    arriving.add_done_callback(look)
    try:
        return await answering
    except asyncio.CancelledError:
        if _is_gone(arriving) and own.cancelling() == 1:
            own.uncancel()
            raise WebSocketDisconnect from None
        raise
    finally:
        is_done = True
        arriving.remove_done_callback(look)


def _is_gone(arrived: asyncio.Task[MutableMapping[str, object]]) -> bool:
    """Whether what has arrived is that the client is gone."""
    return arrived.done() and not arrived.cancelled() and arrived.result()["type"] == GONE
