"""`agentrl eval` of a model that a server serves: the same episodes as in the process, to the last token."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import contextmanager

import pytest

from agentrl import UserError, evaluate, make
from agentrl.assembly.model import fresh_source
from agentrl.assembly.sections import ModelSection
from agentrl.assembly.serve import codec_of
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served.app import EngineApp
from agentrl.http.serving import address_of, bound, server_of
from agentrl.weights.hf.fresh import draw_weights
from agentrl.weights.hf.source import open_source
from tests.engine.serving import free_port

SMALL = ModelSection(num_layers=1, hidden_size=32, ffn_hidden_size=32, kv_channels=16, vocab_size=320)
PLAYED = {"n": 8, "temperature": 0.0, "num_threads": 1, "rollout_max_context_len": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    env = make("HopSearch-v0")
    folder = tmp_path_factory.mktemp("made") / "model"
    draw_weights(fresh_source(SMALL, env, env.dialect, seed=0, folder=folder).directory, 0)
    return str(folder)


@contextmanager
def served(folder):
    """The folder behind a server that runs in a thread."""
    source = open_source(folder)
    engine = EmbeddedEngine.from_pretrained(folder, max_slots=8, max_context_len=96, decode=source.decode)
    with bound("127.0.0.1", 0) as holder:
        holder.listen()
        server = server_of(EngineApp(engine, codec_of(source.tokenizer), name=folder).app)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[holder])))
        thread.start()
        try:
            yield address_of(holder)
        finally:
            server.should_exit = True
            thread.join()


def test_a_served_model_plays_as_it_does_in_the_process(folder):
    local = evaluate("HopSearch-v0", folder, quiet=True, **PLAYED)
    with served(folder) as url:
        remote = evaluate("HopSearch-v0", folder, quiet=True, engine="sglang", sglang_url=url, **PLAYED)
    assert (remote.n, remote.mean, remote.turns, remote.policy_tokens) == (
        local.n,
        local.mean,
        local.turns,
        local.policy_tokens,
    )
    assert local.policy_tokens > 1


def test_a_model_by_address_needs_no_weights_here(folder, tmp_path):
    weightless = tmp_path / "bare"
    shutil.copytree(folder, weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    with served(folder) as url:
        with_weights, without = (
            evaluate("HopSearch-v0", str(model), quiet=True, engine="sglang", sglang_url=url, **PLAYED)
            for model in (folder, weightless)
        )
    assert without.as_json() | {"seconds": 0} == with_weights.as_json() | {"seconds": 0}


def test_a_server_that_is_not_there_is_one_sentence(folder):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match="is the server up"):
        evaluate("HopSearch-v0", folder, quiet=True, engine="sglang", sglang_url=url, **(PLAYED | {"n": 1}))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": "sglang", "sglang_python": "/nowhere"}, "/nowhere cannot be run"),
        ({"sglang_url": "http://127.0.0.1:1"}, "needs engine = sglang"),
        ({"engine": "sglang", "sglang_url": "127.0.0.1"}, "is not an address"),
    ],
)
def test_an_address_and_an_engine_that_do_not_fit_are_one_sentence(folder, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        evaluate("HopSearch-v0", folder, quiet=True, **settings)
