"""A player, in its own process: it plays the groups that its driver sends.

consumes: messages of the driver, which a thread reads. waits for: the next one; its groups, the answers to
their requests. unblocked by: these; on the end of the pipe every group is cancelled, and the process ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeAlias, cast

from agentrl.errors import AgentRLError, WorldBrokenError
from agentrl.processes.child import SendFailure, follow_driver
from agentrl.records.mirror import Reporter
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players import messages
from agentrl.rollout.players.direct import DirectRequests, HeldPolicy
from agentrl.runtime.activity import Activities
from agentrl.runtime.authorship import place_of_frame
from agentrl.runtime.clocks import Waits
from agentrl.runtime.collector import rare_collections
from agentrl.types import Completion
from agentrl.types.seams import Policy, Sampling

REPORT_S = 0.25
"""Seconds between two reports of what a player does."""
_HELD_S = 1.0

Received: TypeAlias = Sequence[messages.ToPlayer] | None
"""A list of messages; None = the pipe has ended."""


class HostedPlayer(NamedTuple):
    """What plays the groups. policy: of its own, over the servers; None = it uses the driver's engine.

    keeps: the driver keeps what they play, turn by turn.
    """

    player: GroupPlayer
    policy: HeldPolicy | None = None
    keeps: bool = False


OpenPlayer: TypeAlias = Callable[[bytes, Policy, Waits], AbstractAsyncContextManager[HostedPlayer]]
"""Builds the player of a plan. The policy is the driver's engine; the waits are those for it."""


class RemotePolicy:
    """The driver's engine. version: the newest that a completion had."""

    def __init__(self, send: Callable[[messages.FromPlayer], None]) -> None:
        self._send = send
        self._waiting: dict[int, tuple[asyncio.Future[Completion | None], Waits]] = {}
        self._number = 0
        self.version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation; cancelling it cancels the driver's request.

        Raises:
            EngineError: as the driver's engine raises it.
        """
        number = self._next()
        try:
            completion = await self._call(
                number, messages.EngineRequest(number, prompt_ids, sampling, session)
            )
        except asyncio.CancelledError:
            self._send(messages.CancelRequest(number))
            raise
        assert completion is not None, "the driver answers a request with a completion"
        if len(completion.versions):
            self.version = max(self.version, int(completion.versions[-1]))
        return completion

    async def close_session(self, session: str) -> None:
        """Free the cache of a session."""
        number = self._next()
        await self._call(number, messages.EndSession(number, session))

    def settle(self, answer: messages.EngineAnswer) -> None:
        """Return an answer to its caller."""
        future, _ = self._waiting.get(answer.number, (None, None))
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.completion)

    def stop_clocks(self, message: messages.ClocksStopped) -> None:
        """Stop the clocks around a request, or let them go on."""
        _, waits = self._waiting.get(message.number, (None, None))
        if waits is not None:
            (waits.leave if message.is_stopped else waits.come_back)()

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _call(self, number: int, message: messages.FromPlayer) -> Completion | None:
        answer: asyncio.Future[Completion | None] = asyncio.get_running_loop().create_future()
        waits = Waits()
        self._waiting[number] = answer, waits
        self._send(message)
        try:
            with waits.entered():
                return await answer
        finally:
            del self._waiting[number]


class GroupHost:
    """Plays groups as tasks. player: what plays them. direct: its requests to servers, if it sends any.

    fail: called with a fault of the package's own.
    """

    def __init__(
        self,
        player: GroupPlayer,
        policy: RemotePolicy,
        direct: DirectRequests | None,
        absence: Waits,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._player, self._policy, self._direct, self._absence = player, policy, direct, absence
        self._fail = fail
        self._groups: dict[int, asyncio.Task[None]] = {}

    def handle(self, message: messages.ToPlayer, send: Callable[[messages.FromPlayer], None]) -> None:
        """Handle a message of the driver."""
        match message:
            case messages.Play():
                task = asyncio.create_task(self._play(message, send))
                self._groups[message.prompt.index] = task
                task.add_done_callback(self._on_end)
            case messages.CancelGroup():
                if (group := self._groups.get(message.ordinal)) is not None:
                    group.cancel()
            case messages.Stop():
                if (stop := self._player.stop) is not None:
                    asyncio.ensure_future(stop()).add_done_callback(self._on_end)
            case messages.EngineAway():
                (self._absence.leave if message.is_away else self._absence.come_back)()
            case messages.ClocksStopped():
                self._policy.stop_clocks(message)
            case messages.EngineAnswer():
                self._policy.settle(message)
            case messages.Hold() if self._direct is not None:
                self._direct.hold(message)
            case messages.Release() if self._direct is not None:
                self._direct.release(message)

    async def close(self) -> None:
        """Cancel all groups, and wait until each has cleaned up."""
        groups = list(self._groups.values())
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        if self._direct is not None:
            await self._direct.close()

    async def _play(self, message: messages.Play, send: Callable[[messages.FromPlayer], None]) -> None:
        prompt, version, begun = message
        try:
            outcome = await self._player.play(prompt, version, begun)
        except asyncio.CancelledError:
            outcome = self._player.cancelled(prompt)
        except AgentRLError as error:
            send(messages.Played(prompt.index, error=error))
            return
        finally:
            del self._groups[prompt.index]
        send(messages.Played(prompt.index, outcome))

    def _on_end(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


class Pipe:
    """The player's end of the pipe. Messages of one turn of the event loop are sent together.

    failure: what ends the process: a message that cannot be sent or read, or a fault of the package's own.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox = messages.Outbox[messages.FromPlayer](self._write, self.fail)
        self._sending = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[Received] = self._loop.create_future()

    def send(self, message: messages.FromPlayer) -> None:
        """Send a message at the end of this turn of the event loop."""
        self._outbox.add(message)

    def send_now(self, outbox: Sequence[messages.FromPlayer]) -> None:
        """Send messages at once; from any thread."""
        self._write(messages.pickled(outbox))

    def receive(self, put: Callable[[Received], None]) -> None:
        """Pass on every list of messages, and None at the end; blocks a thread."""
        try:
            while True:
                put(cast(Received, messages.unpickled(self._connection.recv_bytes())))
        except WorldBrokenError as error:
            self._loop.call_soon_threadsafe(self.fail, error)
        except (EOFError, OSError):
            put(None)

    def fail(self, error: BaseException) -> None:
        """End the process; the first error is its last message."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def _write(self, data: bytes) -> None:
        # Where the driver has exited, the reading thread detects it.
        with suppress(OSError), self._sending:
            self._connection.send_bytes(data)


class Reports:
    """Sends reports from a thread, which goes on where code holds the event loop, and names that code.

    direct: the requests to servers, as soon as there are any.
    """

    def __init__(self, activities: Activities, pipe: Pipe) -> None:
        self._reporter, self._pipe = Reporter(activities), pipe
        self.direct: DirectRequests | None = None
        self._loop, self._ident = asyncio.get_running_loop(), threading.get_ident()
        self._num_late = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="agentrl-reports", daemon=True).start()

    def end(self) -> None:
        """Send no more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(REPORT_S):
            self._num_late += 1
            # A dictionary may change while it is read: the next report has it.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._beat)
                counts = {} if self.direct is None else self.direct.counts
                self._pipe.send_now([messages.PlayerReport(self._reporter.report(self._held_at()), counts)])

    def _beat(self) -> None:
        self._num_late = 0

    def _held_at(self) -> str:
        frame = sys._current_frames().get(self._ident)
        if self._num_late * REPORT_S <= _HELD_S or frame is None:
            return ""
        return place_of_frame(frame) or frame.f_code.co_qualname


async def serve(connection: Connection, open_player: OpenPlayer) -> None:
    """Play until the driver has exited. The first message is the plan."""
    pipe, loop = Pipe(connection), asyncio.get_running_loop()
    inbox = asyncio.Queue[Received]()
    plan = await asyncio.to_thread(connection.recv_bytes)

    def put(received: Received) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, received)

    threading.Thread(target=pipe.receive, args=(put,), daemon=True).start()
    policy, absence, activities = RemotePolicy(pipe.send), Waits(), Activities()
    reports = Reports(activities, pipe)
    try:
        with activities.observed(), rare_collections():
            async with open_player(plan, policy, absence) as opened:
                player, own = opened.player, opened.policy
                if opened.keeps:
                    player = replace(player, note=lambda step: pipe.send(messages.Stepped(step)))
                direct = reports.direct = None if own is None else DirectRequests(own, pipe.send)
                pipe.send_now([messages.Opened()])
                host = GroupHost(player, policy, direct, absence, pipe.fail)
                try:
                    await _serve(host, inbox, pipe)
                finally:
                    await host.close()
    except AgentRLError as error:
        pipe.send_now([messages.Failed(error)])
    finally:
        reports.end()


async def _serve(host: GroupHost, inbox: asyncio.Queue[Received], pipe: Pipe) -> None:
    while True:
        getting = asyncio.ensure_future(inbox.get())
        await asyncio.wait([getting, pipe.failure], return_when=asyncio.FIRST_COMPLETED)
        if pipe.failure.done():
            getting.cancel()
            pipe.failure.result()
        if (received := getting.result()) is None:
            return
        for message in received:
            host.handle(message, pipe.send)


def main(descriptor: int, open_player: OpenPlayer) -> None:
    """Run a player's process. descriptor: its end of the pipe."""
    connection = Connection(descriptor)
    follow_driver(connection)
    with SendFailure(connection):
        asyncio.run(serve(connection, open_player))
    sys.stdout.flush()
    # The thread that still reads the pipe ends with the process.
    os._exit(0)
