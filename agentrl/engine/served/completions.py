"""The completions of requests: each runs in the engine until its end, its abort, or its client leaves."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

from starlette.requests import Request

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.slots import Asker, no_tokens
from agentrl.engine.served.pending import Client, Pending
from agentrl.engine.served.replies import Answer
from agentrl.engine.served.requests import CompletionRequest
from agentrl.errors import EngineError
from agentrl.http.serving import cancel
from agentrl.types import Finish

_STREAM_EVERY_S = 0.02
# A stream may use a fifth of the event loop's time.
_STREAM_PAUSE = 4

Write: TypeAlias = Callable[[int, Answer | EngineError, bool], Awaitable[str]]
"""The events of a completion by its number: what the engine has for it so far, and whether it has ended."""


class Completions:
    """Runs completions in the sessions of their clients. pending: those that run or wait."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self.pending = Pending()

    async def all(self, items: Sequence[CompletionRequest], client: Client) -> tuple[list[Answer], float]:
        """What the engine has for all completions, in their order, and how long that took (seconds).

        Raises:
            EngineError: it refused one, or failed.
        """
        started = time.perf_counter()
        tasks = [asyncio.create_task(self._complete(item, client)) for item in items]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            await cancel(tasks)
        return answers, time.perf_counter() - started

    async def events(
        self, request: Request, items: Sequence[CompletionRequest], client: Client, write: Write
    ) -> AsyncIterator[str]:
        """What `write` makes of the completions: at intervals while they run, and of each when it has ended.

        Waits for: the completions. Unblocked by: the client's disconnecting, too, which ends them.
        """
        tasks = {asyncio.create_task(self._complete(item, client)): n for n, item in enumerate(items)}
        running, sent = set(tasks), [0] * len(items)
        pause_s = _STREAM_EVERY_S
        try:
            while running and not await request.is_disconnected():
                done, running = await asyncio.wait(running, timeout=pause_s, return_when="FIRST_COMPLETED")
                used_s = 0.0
                numbers = sorted(tasks[task] for task in running)
                async for event, event_s in self._partial_events(items, numbers, sent, write):
                    used_s += event_s
                    yield event
                pause_s = max(_STREAM_EVERY_S, _STREAM_PAUSE * used_s)
                for task in done:
                    yield await write(tasks[task], await _outcome(task), True)
        finally:
            await cancel(list(tasks))

    async def _partial_events(
        self, items: Sequence[CompletionRequest], numbers: list[int], sent: list[int], write: Write
    ) -> AsyncIterator[tuple[str, float]]:
        """The events of completions that have more tokens than were sent, and the time of each (seconds).

        Updates `sent`; between two events the event loop runs.
        """
        for number in numbers:
            began = time.perf_counter()
            session = self.pending.sessions.get(items[number].rid, "")
            completion = self._engine.scheduler.partial_completion(session)
            if completion is not None and len(completion.token_ids) > sent[number]:
                sent[number] = len(completion.token_ids)
                event = await write(number, Answer(completion), False)
                yield event, time.perf_counter() - began
                await asyncio.sleep(0)

    async def _complete(self, item: CompletionRequest, client: Client) -> Answer:
        """Run one request in the session of its key and salt, or, where that is busy, in a new session."""
        # JSON keeps the two apart, whatever characters they have.
        own = f"key {json.dumps([client.key, item.salt])}"
        keyed = client.key is not None and own not in self.pending.sessions.values()
        session = own if keyed else uuid.uuid4().hex
        try:
            with self.pending.entered(client, item.rid, session):
                return await self._answered(item, session, Asker(client.names, item.salt))
        finally:
            if not keyed:
                await self._engine.close_session(session)

    async def _answered(self, item: CompletionRequest, session: str, asker: Asker) -> Answer:
        """The logprobs of the prompt, where they are asked for, then the completion, from the same cache."""
        scores, prompt = None, item.prompt_ids
        if item.score_from is not None:
            scores = await self._engine.score(prompt, item.score_from, session=session, asker=asker)
            if scores is None:
                return Answer(no_tokens())
        if not item.sampling.max_new_tokens:
            return Answer(no_tokens(Finish.LENGTH), scores)
        completion = await self._engine.generate(prompt, item.sampling, session=session, asker=asker)
        return Answer(completion, scores)


async def _outcome(task: asyncio.Task[Answer]) -> Answer | EngineError:
    try:
        return await task
    except EngineError as error:
        return error
