"""A minimal chat endpoint, written from the API's documented JSON, without code of the package."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def assistant(content=None, calls=(), **more):
    """An assistant message. calls: (name, arguments as text)."""
    message = {"role": "assistant", "content": content, "refusal": None, **more}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{n}_{name}", "type": "function", "function": {"name": name, "arguments": text}}
            for n, (name, text) in enumerate(calls)
        ]
    return message


def reply(message, finish_reason=None, usage=USAGE):
    """The body of a reply."""
    finish = finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return {**body, "usage": usage} if usage else body


def refusal(message, code=None):
    """The body of an error."""
    return {"error": {"message": message, "type": "some_error", "param": None, "code": code}}


class ChatServer:
    """Returns the message of `play(request)`.

    behaviours: of the next requests instead. A dict: that body. An integer or (integer, dict): that status.
    bytes: that body. "hang": no reply. "drop": the connection breaks in mid-reply. "reset": it breaks
    before. headers: of every reply with an error status.
    key: the required key, None = none. models: the list of GET /v1/models, None = 404.
    """

    def __init__(self, play=lambda request: assistant("ok"), *behaviours, key=None, models=None, headers=""):
        self.play = play
        self.behaviours = list(behaviours)
        self.key = key
        self.models = models
        self.headers = headers
        self.requests = []
        self.heads = []
        self.counts = Counter()
        self.max_running = 0
        self.arrived = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = asyncio.Event()
        self.open = set()
        self.tasks = []
        self.port = 0

    path = "/v1/chat/completions"

    def body(self, request):
        return reply(self.play(request))

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    @asynccontextmanager
    async def serving(self):
        self.listener = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self.listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.listener.close()
            for writer in list(self.open):
                writer.transport.abort()
            await self.listener.wait_closed()
            await asyncio.gather(*self.tasks)

    async def _connection(self, reader, writer):
        self.counts["connections"] += 1
        self.open.add(writer)
        self.tasks.append(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                self.heads.append(head)
                await self._answer(head, json.loads(body) if body else None, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            self.closed.set()
            writer.close()

    async def _answer(self, head, request, reader, writer):
        if self.key is not None and f"Authorization: Bearer {self.key}\r\n".lower() not in head.lower():
            sent_key = head.partition("uthorization: ")[2].partition("\r\n")[0]
            await self._write(
                writer, 401, refusal(f"Incorrect API key provided: {sent_key}.", "invalid_api_key")
            )
        elif head.startswith("GET /v1/models HTTP/1.1\r\n"):
            listing = {"object": "list", "data": [{"id": id, "object": "model"} for id in self.models or ()]}
            await self._write(writer, 404 if self.models is None else 200, listing)
        elif head.startswith(f"POST {self.path} HTTP/1.1\r\n"):
            await self._complete(request, reader, writer)
        else:
            await self._write(writer, 404, refusal("Not Found"))

    async def _complete(self, request, reader, writer):
        self.requests.append(request)
        self.counts["requests"] += 1
        self.counts["running"] += 1
        self.max_running = max(self.max_running, self.counts["running"])
        self.arrived.set()
        await self.gate.wait()
        self.counts["running"] -= 1
        behaviour = self.behaviours.pop(0) if self.behaviours else None
        if behaviour == "hang":
            await reader.read()  # until the client disconnects
            raise ConnectionResetError
        if behaviour == "reset":
            raise ConnectionResetError
        if behaviour == "drop":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            await writer.drain()
            raise ConnectionResetError
        if self.models is not None and request["model"] not in self.models:
            missing = f"The model `{request['model']}` does not exist"
            return await self._write(writer, 404, refusal(missing, "model_not_found"))
        if behaviour is None:
            behaviour = self.body(request)
        status, body = behaviour if isinstance(behaviour, tuple) else (200, behaviour)
        if isinstance(behaviour, int):
            status, body = behaviour, refusal("try again")
        return await self._write(writer, status, body)

    async def _write(self, writer, status, body):
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        more = "" if status == 200 else self.headers
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Length: {len(encoded)}\r\n{more}\r\n".encode() + encoded
        )
        await writer.drain()


def expert_of(env, split):
    """A `play` that replays the environment's expert in every conversation."""
    tasks = {task.prompt[-1].content: task for task in env.tasks(split)}

    def play(request):
        messages = request["messages"]
        question = next(message["content"] for message in messages if message["role"] == "user")
        if question not in tasks:
            return assistant("ready")
        script = env.expert(tasks[question])
        action = next(script)
        for message in messages:
            if message["role"] == "tool":
                action = script.send(message["content"])
        calls = [(call.name, json.dumps(dict(call.arguments))) for call in action.tool_calls]
        return assistant(action.content or None, calls)

    return play
