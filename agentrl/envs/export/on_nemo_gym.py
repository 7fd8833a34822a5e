"""An environment here as a resources server of NeMo Gym 0.4: an exported `app.py` derives it.

    POST /seed_session   a row of the data: an episode begins
    POST /TOOL           a call of a tool, as NeMo Gym's `simple_agent` makes it: the world's answer as text
    POST /verify         the model's last message, and the score of the episode
    POST /reset, /step   the same turn by turn, for its `gymnasium_agent`: worlds that answer messages

What happens in an episode, its limits and its score are those of `play`. A failed one is an error 500, which
fails the rollout: never a reward of 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, ConfigDict, PrivateAttr

from agentrl.engine.chat.wire import ChatReply, read_reply
from agentrl.envs.export.driven import DrivenEpisode
from agentrl.envs.export.world import ExportedWorld
from agentrl.types import JSON, Observation

_ENDED = "The episode has ended."


class Row(BaseModel):
    """What a row of the data says of its episode; the rest of it is kept.

    task: its id. split: where it is. seed: of the world; the prompt of the row was made with it.
    """

    model_config = ConfigDict(extra="allow")
    task: str
    split: str
    seed: int


class StepRequest(Row):
    """A row, and the model's turn."""

    response: NeMoGymResponse


class VerifyRequest(BaseVerifyRequest):
    """A row, and all that the model and the tools have said."""

    model_config = ConfigDict(extra="allow")


class VerifyResponse(BaseVerifyResponse):
    """The same with the score. parts: of it, by name."""

    model_config = ConfigDict(extra="allow")
    parts: dict[str, float]


class EpisodeServer(SimpleResourcesServer):
    """A subclass sets the environment.

    env_id: of an environment here. env_kwargs: its arguments.
    """

    config: BaseResourcesServerConfig
    env_id: ClassVar[str] = ""
    env_kwargs: ClassVar[Mapping[str, JSON]] = {}
    _world: ExportedWorld = PrivateAttr()
    _open: dict[str, DrivenEpisode] = PrivateAttr(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        """The application.

        Raises:
            UserError: there is no such environment.
        """
        self._world = ExportedWorld(self.env_id, self.env_kwargs)
        app = super().setup_webserver()
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        # The last one: any other name is that of a tool, known or not.
        app.post("/{tool}")(self.call_tool)
        return app

    async def seed_session(self, request: Request, body: Row) -> BaseSeedSessionResponse:
        """Begin the episode of a row; one that the session has had before ends."""
        await self._begin(request, body)
        return BaseSeedSessionResponse()

    async def call_tool(self, tool: str, request: Request) -> PlainTextResponse:
        """Call a tool with the arguments in the body."""
        arguments = (await request.body()).decode()
        call: dict[str, JSON] = {"id": "call", "function": {"name": tool, "arguments": arguments}}
        observation = await self._episode(request).act(_reply("", [call]).message)
        return PlainTextResponse(_ENDED if observation is None else _text(observation))

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Say the model's last message, unless the last turn was cut, and score the episode."""
        episode = self._episode(request)
        last = body.response.output[-1:]
        if last and last[0].type == "message" and body.response.incomplete_details is None:
            await episode.act(_turn(body.response).message)
        del self._open[request.session[SESSION_ID_KEY]]
        verdict = await episode.end()
        return VerifyResponse(**body.model_dump(), reward=verdict.total, parts=dict(verdict.parts))

    async def reset(self, request: Request, body: Row) -> dict[str, JSON]:
        """Begin the episode of a row, which has its prompt already."""
        await self._begin(request, body)
        return {"observation": None, "info": {}}

    async def step(self, request: Request, body: StepRequest) -> dict[str, JSON]:
        """A turn. The reward comes with the last one."""
        episode = self._episode(request)
        reply = _turn(body.response)
        observation = await episode.act(reply.message, reply.finish)
        if observation is None:
            del self._open[request.session[SESSION_ID_KEY]]
            verdict = await episode.end()
            parts: JSON = dict(verdict.parts)
            return {"reward": verdict.total, "terminated": True, "info": {"parts": parts}}
        results: list[JSON] = [
            {"call_id": message.tool_call_id, "output": message.text}
            for message in observation
            if message.role == "tool"
        ]
        said = _text(tuple(message for message in observation if message.role != "tool"))
        return {"observation": said or None, "info": {"tool_outputs": results}}

    async def _begin(self, request: Request, row: Row) -> None:
        session = request.session[SESSION_ID_KEY]
        if session in self._open:
            await self._open.pop(session).end()
        task = next((task for task in self._world.tasks(row.split) if task.id == row.task), None)
        if task is None:
            raise HTTPException(422, f"{self.env_id} has no task `{row.task}` in its split `{row.split}`")
        episode = DrivenEpisode(self._world.make(), task, seed=row.seed)
        await episode.begin()
        self._open[session] = episode

    def _episode(self, request: Request) -> DrivenEpisode:
        episode = self._open.get(request.session[SESSION_ID_KEY])
        if episode is None:
            raise HTTPException(409, "no episode runs in this session; POST a row to /seed_session first")
        return episode


def _turn(response: NeMoGymResponse) -> ChatReply:
    """The model's turn: the calls, and the messages after all results of tools."""
    items = [item.model_dump() for item in response.output]
    results = [number for number, item in enumerate(items) if item["type"] == "function_call_output"]
    new = items[results[-1] + 1 :] if results else items
    calls = [
        {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in new
        if item["type"] == "function_call"
    ]
    said = [item["content"] for item in new if item["type"] == "message"]
    texts = [part.get("text", "") for content in said for part in content if not isinstance(content, str)]
    text = "".join(texts + [content for content in said if isinstance(content, str)])
    return _reply(text, calls, "stop" if response.incomplete_details is None else "length")


def _reply(text: str, calls: list[dict[str, JSON]], reason: str = "stop") -> ChatReply:
    """A turn, read as the reply of an endpoint is."""
    message = {"content": text, "tool_calls": calls}
    return read_reply(json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode())


def _text(observation: Observation) -> str:
    return "\n".join(message.text for message in observation)
