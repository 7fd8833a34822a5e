"""Servers under test: the embedded engine over HTTP, one with scripted replies, and a real SGLang."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served.app import EngineApp
from agentrl.engine.served.requests import TextCodec
from agentrl.engine.sglang.launch.process import CPU_DEFAULTS
from agentrl.http.serving import RequestChecks
from agentrl.processes import guard
from tests.engine.subjects import VOCAB, text_of, tiny
from tests.listening import listening

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300
CODEC = TextCodec(lambda text: [ord(c) - ord("0") for c in text], lambda ids, skip_special: text_of(ids), 1)
KEY = "key-of-these-tests"
CONTROL = {"Authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def embedded_server(
    *, max_context_len: int = 256, **changes
) -> AsyncIterator[tuple[str, EmbeddedEngine]]:
    engine = EmbeddedEngine.from_model(
        tiny("qwen3"), max_slots=4, max_context_len=max_context_len, decode=text_of
    )
    app = EngineApp(engine, CODEC, name="tiny", **{"checks": RequestChecks(control_key=KEY), **changes})
    async with listening(app.app) as url:
        yield url, engine


def session_of(key: str, salt: str = "") -> str:
    """The embedded engine's session of a routing key and a salt."""
    return f"key {json.dumps([key, salt])}"


class ScriptedServer:
    """A server with scripted replies of /generate, one per request; the last one repeats.

    An entry is a body, a status with a body, a list of the chunks of a body, or "hang", "drop" (the
    connection, in mid-reply), "refuse" (with 503). requests: received, as JSON; headers: of each; aborted:
    rids of the aborts.
    """

    def __init__(self, *replies, info: dict | None = None):
        self.replies = list(replies)
        self.info = {"context_length": 64} if info is None else info
        self.requests: list[dict] = []
        self.headers: list[str] = []
        self.aborted: list[str] = []
        self.connections = 0
        self.request_received = asyncio.Event()
        self.abort_received = asyncio.Event()

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _connection(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((int(x.split(":")[1]) for x in head.split("\r\n") if "content-length" in x), 0)
                await self._answer(head, await reader.readexactly(length), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head, body, writer):
        path = head.split(" ")[1]
        if path == "/generate":
            self.requests.append(json.loads(body))
            self.headers.append(head)
            self.request_received.set()
            return await self._send(
                self.replies[0] if len(self.replies) == 1 else self.replies.pop(0), writer
            )
        if path == "/abort_request":
            self.aborted.append(json.loads(body)["rid"])
            self.abort_received.set()
        reply = {"/server_info": self.info, "/model_info": {"weight_version": "default"}}.get(path, {})
        return await self._send(reply, writer)

    async def _send(self, reply, writer):
        if reply == "hang":
            await asyncio.Event().wait()
        if reply == "drop":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            await writer.drain()
            raise ConnectionResetError
        if isinstance(reply, list):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for chunk in (*reply, b""):
                writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                await writer.drain()
                await asyncio.sleep(0.005)
            return
        status, body = reply if isinstance(reply, tuple) else (503 if reply == "refuse" else 200, reply)
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()


def generated(ids: Sequence[int], finish: dict | None = None, **meta) -> dict:
    """A reply of SGLang, as observed."""
    defaults = {
        "id": "x",
        "finish_reason": finish or {"type": "length", "length": len(ids)},
        "weight_version": "default",
        "cached_tokens": 0,
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
        "dp_rank": None,
    }
    return {"text": text_of(ids), "output_ids": list(ids), "meta_info": defaults | meta}


def save_tiny(
    folder: Path, seed: int = 0, *, context_len: int = 256, model: PreTrainedModel | None = None
) -> Path:
    """A model directory with a tokenizer whose text is `text_of`."""
    (model or tiny("qwen3", seed, max_position_embeddings=context_len)).save_pretrained(folder)
    word_level = Tokenizer(models.WordLevel({text_of([i]): i for i in range(VOCAB)}, unk_token=text_of([0])))
    word_level.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    word_level.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level, model_max_length=context_len, clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(folder)
    return folder


def sglang_python() -> Path:
    """The interpreter of SGLang's own environment."""
    python = Path(os.environ.get("AGENTRL_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    assert python.is_file(), "this test needs a real SGLang: run `make sglang-cpu`"
    return python


def free_port() -> int:
    """A port that is free now. SGLang also uses the one 10,000 above it."""
    while True:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            port = int(holder.getsockname()[1])
        if port <= 55_535:
            return port


@contextmanager
def running(command: Sequence[str | Path], url: str, path: str, log: Path) -> Iterator[str]:
    """A guarded server process, ready once it responds to `path`, until the block ends."""
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    guarded = guard.command([str(argument) for argument in command])
    with log.open("w") as out:
        process = subprocess.Popen(guarded, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(url + path):
            assert process.poll() is None, f"the server ended:\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline_s, f"the server did not start:\n{log.read_text()[-3000:]}"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def sglang_command(model: Path, port: int, *, context_length: int) -> list[str | Path]:
    arguments = {
        "model_path": model,
        "device": "cpu",
        "host": "127.0.0.1",
        "port": port,
        **CPU_DEFAULTS,
        "max_total_tokens": max(5000, 5 * context_length),
        "max_running_requests": 4,
        "context_length": context_length,
    }
    command_line: list[str] = []
    for name, value in arguments.items():
        command_line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [sglang_python(), "-m", "sglang.launch_server", *command_line]
