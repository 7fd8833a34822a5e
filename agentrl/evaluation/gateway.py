"""A model behind the gateway, for clients from outside: each conversation is an episode in a journal.

    http://127.0.0.1:30001/NAME/v1     the episode NAME
    http://127.0.0.1:30001/v1          the episode of the key that the client sends

An episode begins with its first request, and ends when it has rested for a while, or with the gateway. A
later request of its name begins another one. None has a score: `agentrl rescore` gives it one. Those that a
killed process had open are in the journal when the next one starts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from starlette.exceptions import HTTPException
from starlette.requests import Request

from agentrl.config import parse, read_written
from agentrl.envs import play
from agentrl.envs.gateway.harness import AgentOutcome, HarnessEnv
from agentrl.envs.gateway.recording import Answered, EpisodeRecording, Growing, ModelRequest
from agentrl.envs.gateway.server import Door, Responder, application_of, key_of, served
from agentrl.envs.play import Game
from agentrl.errors import ConfigError, StageError, UserError
from agentrl.evaluation.config import GatewayConfig, GatewaySettings
from agentrl.evaluation.folder import EvalFolder, model_table, write_settings
from agentrl.evaluation.players import PlayersOf, endpoint_players, model_players
from agentrl.http.serving import RequestChecks, address_of, bound, host_names
from agentrl.records import Entry, Journal, Outcome
from agentrl.records.journal import entry_of, read_outcomes, to_line
from agentrl.records.lines import from_line
from agentrl.runtime.extras import TRAINING, require
from agentrl.runtime.files import write_bytes
from agentrl.runtime.interrupts import run_until_signal
from agentrl.runtime.ownership import read_file
from agentrl.types import JSON, Ending, Episode, Failure, Limits, Task
from agentrl.types.seams import Agent
from agentrl.view.console import RunConsole

SPLIT = "gateway"
"""The name of its episodes in the journal, and of its settings in config.toml."""
_MOST_TOKENS = 8192
_MOST_OPEN = 10_000
_LOOK_EVERY_S = 0.5
_NAME = re.compile(r"[A-Za-z0-9._-]{1,60}")
_MOST_PENDING_BYTES = 1 << 20


def serve_gateway(directory: str | None, config: GatewayConfig, *, ready: Callable[[str, Path], None]) -> int:
    """Serve a model until Ctrl-C, SIGTERM or SIGHUP; the number of episodes that the journal got.

    directory: of the model; None = it is behind the chat endpoint of the settings. ready: called when it
    accepts requests, with the address and the folder.

    Raises:
        ConfigError: both are named, or none; the folder holds something else; the endpoint refuses.
        UserError: the model cannot be loaded; the address cannot be used.
    """
    if (directory is None) == (config.openai.openai_url is None):
        raise ConfigError(
            "Name one model to serve: a directory (--model), or an endpoint (--openai-url, --openai-model)."
        )
    return run_until_signal(_served(directory, config, ready))


async def _served(directory: str | None, config: GatewayConfig, ready: Callable[[str, Path], None]) -> int:
    own = config.gateway
    limits = _limits(directory, own)
    with EvalFolder.opened(own.output_dir, resume=True) as folder, bound(own.host, own.port) as listener:
        ids = _begun(folder, directory, config)
        checks = RequestChecks(host_names(own.host, own.allowed_hosts))
        async with (
            _players(directory, config, limits) as players_of,
            Journal(folder.path, max_pending_bytes=_MOST_PENDING_BYTES) as journal,
        ):
            make_agent = players_of(config.of_players, Visit(limits)).make_agent
            files = OpenEpisodes(folder.path, journal, SPLIT)
            await files.recover(ids)
            visits = Visits(make_agent, files, limits, own.idle_s, ids)
            app = application_of(visits.find, bases=("/{episode}", ""), checks=checks)
            async with served(app, listener):
                ready(address_of(listener), folder.path)
                # A signal is how it ends.
                with suppress(asyncio.CancelledError):
                    await visits.watch()
        return visits.num_kept


def _begun(folder: EvalFolder, directory: str | None, config: GatewayConfig) -> set[str]:
    """Write the settings; the ids of the episodes that the folder has.

    Raises:
        ConfigError: it has other ones, or those of another model.
    """
    path, journal = folder.path / "config.toml", folder.record(SPLIT).path
    if path.exists():
        before = read_written(path)
        is_other = before.get("model") != model_table(directory).get("model")
        if directory is None and not is_other:
            # Where an endpoint is may change, as the address of a server does; what it serves may not.
            is_other = _endpoint_model(before, path) != config.openai.openai_model
        if SPLIT not in before or is_other:
            raise ConfigError(
                f"{folder.path} holds a run of another command, or episodes of another model; choose another "
                "output_dir."
            )
    write_settings(config, folder.path, directory)
    return {outcome.id for outcome in read_outcomes(journal)} if journal.exists() else set()


def _endpoint_model(before: Mapping[str, JSON], path: Path) -> str | None:
    own = {name: section for name, section in before.items() if name == "openai"}
    return parse(GatewayConfig, own, source=str(path)).openai.openai_model


def _limits(directory: str | None, own: GatewaySettings) -> Limits:
    """Those of an episode: no deadline, since nobody knows when its client will go on."""
    if directory is None:
        most = None
    else:
        require("opening a model", *TRAINING)
        from agentrl.engine.embedded.architecture import context_of
        from agentrl.weights.hf.source import open_source

        holds = context_of(open_source(directory).config)
        most = min(own.rollout_max_context_len or _MOST_TOKENS, holds)
    return replace(HarnessEnv.limits, max_turns=own.max_turns, max_tokens=most, episode_timeout_s=None)


def _players(
    directory: str | None, config: GatewayConfig, limits: Limits
) -> AbstractAsyncContextManager[PlayersOf]:
    """Agents over the model. An endpoint is asked once, as a check."""
    if directory is None:
        return endpoint_players(config.of_players, ())
    on_event = RunConsole(console=Console(stderr=True, highlight=False)).line
    return model_players(directory, config.of_players, limits, on_event=on_event)


class Visit(HarnessEnv):
    """An episode of a client that comes from outside: it lasts until `end`, and has no score.

    on_reply: called after each reply, with what makes an episode of all so far.
    """

    id = "Gateway"
    timeout_s = None
    _game: Game | None = None

    def __init__(self, limits: Limits, on_reply: Callable[[SoFar], None] | None = None) -> None:
        super().__init__()
        self.limits = limits
        self._on_reply = on_reply
        self._entrance: asyncio.Future[Door] = asyncio.get_running_loop().create_future()
        self._is_over = asyncio.Event()

    async def entered(self) -> Door:
        """Its door, once it is open.

        Raises:
            HTTPException: 503, it has ended before.
        """
        await asyncio.wait([self._entrance])
        if self._entrance.cancelled():
            raise HTTPException(503, "The episode has ended; send the request again.")
        return self._entrance.result()

    @property
    def rests_s(self) -> float:
        """How long no request of it has waited (seconds)."""
        return self._entrance.result().rests_s if self._entrance.done() else 0.0

    def end(self) -> None:
        """End it; requests in flight have an error."""
        self._is_over.set()
        self._entrance.cancel()

    def tasks(self, split: str) -> Sequence[Task]:
        """None: its clients bring them."""
        del split
        return ()

    async def agent(self, base_url: str, key: str, task: Task) -> str | None:
        """Its client."""
        del base_url, key, task
        await self._is_over.wait()
        return None

    def grade(self, task: Task, answer: str, files: Mapping[str, str]) -> float:
        """Nothing is graded.

        Raises:
            UserError: always.
        """
        del task, answer, files
        raise UserError("An episode of the gateway has no score; `agentrl rescore` gives it one.")

    def episode_failed(self, failure: Failure) -> None:
        """Let its client know why."""
        if self._entrance.done() and not self._entrance.cancelled():
            door = self._entrance.result()
            door.failure = door.failure or StageError(failure.stage, failure.kind, failure.detail)

    async def play_game(self, game: Game) -> Ending | None:
        """Play the episode, as any other."""
        self._game = game
        return await super().play_game(game)

    async def _graded(self, task: Task, outcome: AgentOutcome) -> float | None:
        del task, outcome
        return None

    def _replied(self, responder: Responder) -> None:
        assert self._game is not None, "it is played"
        if self._on_reply is None:
            return
        if isinstance(responder, EpisodeRecording):
            self._on_reply(responder.so_far())
        else:
            episode = self._game.episode(Ending.TRUNCATED, None, 0.0)
            self._on_reply(lambda: episode)

    @asynccontextmanager
    async def _opened(self, name: str, responder: Responder) -> AsyncIterator[Door]:
        door = Door(name, _Noting(responder, self._replied), "", tells_why=True)
        if not self._entrance.done():
            self._entrance.set_result(door)
        try:
            yield door
        finally:
            await door.close()


class _Noting:
    """A responder that tells of each request when it is answered."""

    def __init__(self, responder: Responder, replied: Callable[[Responder], None]) -> None:
        self._responder, self._replied = responder, replied
        self.num_tokens = responder.num_tokens

    async def answers(self, asked: ModelRequest, growing: Growing | None = None) -> list[Answered]:
        """As of the responder."""
        answers = await self._responder.answers(asked, growing)
        self._replied(self._responder)
        return answers


class Visits:
    """The episodes that are open, by name. Each is in the journal when it has ended.

    make_agent: of an episode. files: of what has not ended. idle_s: how long one may rest (seconds). ids: of
    the episodes before.
    num_kept: those that have ended, and have a turn, or have failed at one (count).
    """

    def __init__(
        self,
        make_agent: Callable[[], Agent],
        files: OpenEpisodes,
        limits: Limits,
        idle_s: float,
        ids: set[str],
    ) -> None:
        self._make_agent, self._files = make_agent, files
        self._limits, self._idle_s, self._ids = limits, idle_s, ids
        self._open: dict[str, Visit] = {}
        self._playing: set[asyncio.Task[None]] = set()
        self.num_kept = 0

    async def watch(self) -> None:
        """End episodes that have rested for too long, until it is cancelled; then all of them.

        Waits for: nothing. On cancellation: all episodes have ended, and are handed to the journal.

        Raises:
            DiskError: the disk does not take an episode.
        """
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                for name in [name for name, visit in self._open.items() if visit.rests_s > self._idle_s]:
                    self._end(name)
                for task in [task for task in self._playing if task.done()]:
                    self._playing.discard(task)
                    task.result()
        finally:
            for name in [*self._open]:
                self._end(name)
            await asyncio.gather(*self._playing)

    async def find(self, request: Request) -> Door:
        """The door of a request: of the episode in its path, else of that of its key.

        Raises:
            HTTPException: 404, the name is none; 429, too many are open; 503, it has ended.
        """
        name = request.path_params.get("episode") or _name_of(key_of(request))
        if not _NAME.fullmatch(name):
            raise HTTPException(404, "The name of an episode is 1 to 60 of A-Z, a-z, 0-9, `.`, `_`, `-`.")
        visit = self._open.get(name) or self._begin(name)
        return await visit.entered()

    def _begin(self, name: str) -> Visit:
        if len(self._open) >= _MOST_OPEN:
            raise HTTPException(429, f"{_MOST_OPEN:,} episodes are open; send it again.")
        ids = chain([name], (f"{name}-{number}" for number in count(2)))
        id = next(id for id in ids if id not in self._ids)
        self._ids.add(id)
        visit = self._open[name] = Visit(self._limits, partial(self._files.keep, id))
        # Its clocks are its own, whichever request it begins with.
        playing = self._play(visit, name, id)
        self._playing.add(asyncio.get_running_loop().create_task(playing, context=Context()))
        return visit

    def _end(self, name: str) -> None:
        self._open.pop(name).end()

    async def _play(self, visit: Visit, name: str, id: str) -> None:
        task = Task(name, (), split=SPLIT)
        try:
            episode = await play(
                visit, self._make_agent(), task, episode_id=id, sampling_seed=zlib.crc32(id.encode())
            )
        finally:
            visit.end()
            if self._open.get(name) is visit:
                del self._open[name]
        has_failed = episode.failure is not None and visit.counts["requests"] > 0
        if episode.failure is not None and has_failed:
            logging.getLogger(__name__).warning("%s has failed: %s", id, episode.failure.detail)
        if episode.turns or has_failed:
            self.num_kept += 1
            await self._files.add(episode)
        self._files.remove(id)


def _name_of(key: str) -> str:
    """The name of the episode of a key, which may be a secret."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}" if key else "unnamed"


SoFar: TypeAlias = Callable[[], Episode]
"""Makes an episode of what there is of it; called in another thread."""


class OpenEpisodes:
    """Episodes that have not ended, in the folder of a journal, whose thread writes them: no reply waits.

    open/NAME.jsonl is an entry of a journal, written anew after each reply, and gone when the episode has
    ended. A killed process loses what it had not answered, and at most the last reply of each episode. split:
    of their entries in the journal.
    """

    def __init__(self, folder: Path, journal: Journal, split: str) -> None:
        self._folder, self._journal, self._split = folder / "open", journal, split
        self._latest: dict[str, SoFar] = {}

    async def recover(self, ids: set[str]) -> None:
        """Hand the journal what a killed process has left. ids: in the journal; receives theirs.

        Raises:
            DiskError: the disk does not take an episode.
            RecordError, OSError: a file is none of these.
        """
        for path in sorted(self._folder.glob("*.jsonl")):
            row = from_line(read_file(path))
            entry = entry_of(row if isinstance(row, dict) else {}, path)
            if entry.episode.id not in ids:
                ids.add(entry.episode.id)
                await self.add(entry.episode)
            self.remove(entry.episode.id)

    async def add(self, episode: Episode) -> None:
        """Hand the journal an episode that has ended.

        Raises:
            DiskError: the disk does not take it.
        """
        await self._journal.write_eval(self._split, 0, [_entry(episode)])

    def keep(self, id: str, so_far: SoFar) -> None:
        """Write an episode in place of what was written of it before."""
        self._latest[id] = so_far
        self._journal.run(partial(self._write, id))

    def remove(self, id: str) -> None:
        """Remove its file, after what was handed to the journal is written."""
        self._journal.run(partial(self._path(id).unlink, missing_ok=True))

    def _write(self, id: str) -> None:
        # Where the disk is slow, only the last of several is left.
        if (so_far := self._latest.pop(id, None)) is not None:
            self._folder.mkdir(exist_ok=True)
            write_bytes(self._path(id), to_line(_entry(so_far())))

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.jsonl"


def _entry(episode: Episode) -> Entry:
    return Entry(episode, (), Outcome.EVALUATED)
