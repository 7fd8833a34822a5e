"""`agentrl gateway`: clients from outside get episodes of their own, which are read, scored and imitated."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest

from agentrl.cli import main
from agentrl.config import by_section, parse
from agentrl.errors import ConfigError
from agentrl.evaluation import gateway
from agentrl.evaluation.config import GatewayConfig
from agentrl.records import members, read_journal
from agentrl.types import Ending, Restart
from tests.engine.chat.chat_server import USAGE, ChatServer, assistant, refusal
from tests.engine.chat.chat_server import reply as answer_of
from tests.engine.subjects import tiny
from tests.envs.gateway.test_forms import FORMS, asking
from tests.envs.gateway.worlds import TOOL, WORDS, post

ASKED = {"role": "user", "content": "How many?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model directory with a chat template."""
    return save_speaker(tmp_path_factory.mktemp("model"))


def save_speaker(folder):
    """Write an untrained model with a chat template; its folder."""
    tiny("qwen3", vocab_size=len(WORDS.tokenizer), max_position_embeddings=512).save_pretrained(folder)
    WORDS.tokenizer.save_pretrained(folder)
    return folder


@asynccontextmanager
async def serving(model, folder, **settings):
    """The gateway in this process until the end of the block; yields its address."""
    given = by_section(GatewayConfig, {"output_dir": str(folder), "port": 0, **settings})
    config = parse(GatewayConfig, given, source="the test")
    ready, said = asyncio.Event(), []

    def is_ready(url, path):
        said.append(url)
        ready.set()

    directory = None if model is None else str(model)
    serving = asyncio.create_task(gateway._served(directory, config, is_ready))
    opening = asyncio.create_task(ready.wait())
    await asyncio.wait([serving, opening], return_when="FIRST_COMPLETED")
    if serving.done():
        opening.cancel()
    else:
        yield said[0]
        serving.cancel()
    await serving


async def ask(url, messages, key="k", status=200, **more):
    """The message of a reply."""
    body = {"model": "m", "messages": messages, "tools": [TOOL], "max_tokens": 5, **more}
    reply = await post(url, "/chat/completions", key, body)
    assert reply.status_code == status, reply.text
    return reply.json()["choices"][0]["message"] if status == 200 else reply.json()["error"]


async def emptied(folder):
    """The journal's thread removes files after the last episode is written."""
    async with asyncio.timeout(60):
        while [*folder.iterdir()]:
            await asyncio.sleep(0.02)


def entries_of(folder):
    """The episodes in its journal, by id."""
    (path,) = (folder / "trajectories").glob("*.jsonl.gz")
    return {entry.episode.id: entry for entry in read_journal(path)}


@pytest.mark.full
async def test_each_conversation_is_an_episode_with_its_tokens(model, tmp_path):
    out = tmp_path / "kept"
    async with serving(model, out, max_slots=4) as url:
        first = await ask(f"{url}/one/v1", [ASKED])
        await ask(f"{url}/one/v1", [ASKED, first, ASKED])
        await ask(f"{url}/two/v1", [ASKED])
        await ask(f"{url}/v1", [ASKED], key="my-secret")
        await ask(f"{url}/v1", [ASKED], key="my-secret")
        assert "1 to 60" in (await ask(f"{url}/{'x' * 61}/v1", [ASKED], status=404))["message"]
        # A client that leaves nothing behind has no episode.
        await ask(f"{url}/none/v1", [{"role": "nobody"}], status=400)
    async with serving(model, out, max_slots=4) as url:
        await ask(f"{url}/one/v1", [ASKED])
    entries = entries_of(out)
    (by_key,) = entries.keys() - {"one", "two", "one-2"}
    # The second request goes on after the tokens of the first; an equal one stands beside it.
    assert [len(t.turns) for t in entries["one"].episode.trajectories] == [2]
    assert [t.reason for t in entries[by_key].episode.trajectories] == [None, Restart.PARALLEL]
    for entry in entries.values():
        episode = entry.episode
        assert (entry.verdicts, episode.ending, episode.total_of()) == ((), Ending.COMPLETED, None)
        for completion in (turn.tokens.completion for turn in episode.turns):
            assert 1 <= len(completion.token_ids) <= 5
            assert np.isfinite(completion.logprobs).all()
    assert "secret" not in by_key
    assert not any(b"my-secret" in path.read_bytes() for path in out.rglob("*") if path.is_file())


@pytest.mark.full
async def test_an_episode_ends_when_it_has_rested(model, tmp_path):
    async with serving(model, tmp_path, max_slots=4, idle_s=0.2) as url:
        for _ in range(2):
            await ask(f"{url}/one/v1", [ASKED])
            await asyncio.sleep(2 * gateway._LOOK_EVERY_S + 0.3)
        await ask(f"{url}/one/v1", [ASKED])
    assert entries_of(tmp_path).keys() == {"one", "one-2", "one-3"}


@pytest.mark.full
def test_its_episodes_are_shown_scored_and_imitated(model, tmp_path, capsys, monkeypatch):
    out = tmp_path / "kept"

    async def asked():
        async with serving(model, out, max_slots=4) as url:
            await asyncio.gather(*(ask(f"{url}/{name}/v1", [ASKED]) for name in ("a", "b", "c")))

    asyncio.run(asked())
    capsys.readouterr()
    main(["view", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["num_episodes"] == 3
    (tmp_path / "my_scores.py").write_text("def length(episode):\n    return float(len(episode.turns))\n")
    monkeypatch.syspath_prepend(tmp_path)
    main(["rescore", str(out), "--reward", "my_scores:length", "--json"])
    scored = json.loads(capsys.readouterr().out)
    (row,) = scored["rows"]
    assert (row["rollouts"], row["old_mean"], row["new_mean"], row["failed"]) == (3, None, 1.0, 0)
    run = ["--hf-checkpoint", str(model), "--output-dir", str(tmp_path / "runs"), "--name", "it"]
    main(["sft", "--sft-data", str(out), *run, "--dialect", "chat"])
    assert "3 taken" in capsys.readouterr().out


async def test_behind_an_endpoint_there_are_messages_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    async with ChatServer(lambda request: assistant("42")).serving() as server:
        where = {"openai_url": server.url, "openai_model": "m"}
        async with serving(None, tmp_path, **where) as url:
            replies = [await ask(f"{url}/{name}/v1", [ASKED]) for name in ("a", "b")]
            assert "tokens" in (await ask(f"{url}/a/v1", [ASKED], status=400, logprobs=True))["message"]
    assert [reply["content"] for reply in replies] == ["42", "42"]
    for entry in entries_of(tmp_path).values():
        (turn,) = entry.episode.turns
        assert (turn.tokens, turn.action.text, entry.verdicts) == (None, "42", ())


async def test_an_endpoint_is_asked_for_the_form_of_each_reply(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    asked = []

    def answer(request):
        asked.append(request.get("response_format"))
        return assistant("{}")

    async with ChatServer(answer).serving() as server:
        where = {"openai_url": server.url, "openai_model": "m"}
        async with serving(None, tmp_path, **where) as url:
            asked.clear()
            for path, form, _ in FORMS:
                for more in (form, {}):
                    reply = await post(f"{url}/a/v1", path, "k", asking(path, more))
                    assert reply.status_code == 200, reply.text
    assert asked == [form for _, _, as_chat in FORMS for form in (as_chat, None)]


def told_usage(text):
    """Every usage in a reply or in the events of a stream, the last one first."""
    bodies = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    found = []
    for body in map(json.loads, bodies or [text]):
        found += [body[name]["usage"] for name in ("message", "response") if name in body]
        found += [body["usage"]] if body.get("usage") else []
    return [usage for usage in reversed(found) if usage]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_is_told_the_tokens_that_the_endpoint_counts(tmp_path, monkeypatch, stream):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    told = {}
    async with ChatServer(lambda request: assistant("42")).serving() as server:
        where = {"openai_url": server.url, "openai_model": "m"}
        async with serving(None, tmp_path, **where) as url:
            for path in ("/chat/completions", "/messages", "/responses"):
                more = {"stream": True} if stream else {}
                if stream and path == "/chat/completions":
                    more["stream_options"] = {"include_usage": True}
                reply = await post(f"{url}/a/v1", path, "k", asking(path, more))
                assert reply.status_code == 200, reply.text
                told[path] = told_usage(reply.text)[0]
            # An endpoint that counts nothing: nobody else does.
            server.behaviours += [answer_of(assistant("42"), usage=None)]
            body = asking("/chat/completions", {})
            uncounted = (await post(f"{url}/b/v1", "/chat/completions", "k", body)).json()["usage"]
    # By the documents of each protocol: Anthropic's input is without what was read from a cache.
    assert told["/chat/completions"] == USAGE
    assert told["/responses"]["input_tokens"] == 20
    assert told["/responses"]["input_tokens_details"]["cached_tokens"] == 8
    assert told["/responses"]["output_tokens"] == 5
    assert told["/responses"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert told["/responses"]["total_tokens"] == 25
    cached, rest, out = (f"{name}_tokens" for name in ("cache_read_input", "input", "output"))
    assert [told["/messages"][name] for name in (rest, cached, out)] == [12, 8, 5]
    assert (uncounted["prompt_tokens"], uncounted["completion_tokens"]) == (0, 0)


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
async def test_a_failure_of_the_endpoint_is_told_and_kept(tmp_path, monkeypatch, path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-theirs")
    broken = (400, refusal(f"the upstream is out of order; key sk-theirs\n{'x' * 5000}"))
    async with ChatServer(lambda request: assistant("42")).serving() as server:
        where = {"openai_url": server.url, "openai_model": "m"}
        async with serving(None, tmp_path, **where) as url:
            server.behaviours += [broken]
            replies = [await post(f"{url}/a/v1", path, "k", asking(path, {})) for _ in range(2)]
            # Nothing is kept of a client that has asked nothing.
            await post(f"{url}/none/v1", path, "k", {"model": "m"})
    assert [reply.status_code for reply in replies] == [500, 200]
    message = replies[0].json()["error"]["message"]
    assert "the upstream is out of order" in message
    assert "sk-theirs" not in message
    assert len(message) < 500
    assert "\n" not in message
    found = {id: entry.episode for id, entry in entries_of(tmp_path).items()}
    assert found.keys() == {"a", "a-2"}
    assert (found["a"].ending, found["a"].turns) == (Ending.FAILED, ())
    assert "the upstream is out of order" in found["a"].failure.detail
    assert found["a-2"].ending is Ending.COMPLETED


async def test_a_reply_that_an_endpoint_cuts_is_its_clients_and_the_episode_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    async with ChatServer().serving() as server:
        where = {"openai_url": server.url, "openai_model": "m"}
        async with serving(None, tmp_path, **where) as url:
            server.behaviours += [answer_of(assistant("40"), "length"), answer_of(assistant("41"))]
            server.behaviours += [answer_of(assistant("42"), "length")]
            body = asking("/chat/completions", {})
            first, again = ASKED, {"role": "user", "content": "Again."}
            replies = []
            for messages in ([first], [first, {"role": "assistant", "content": "40"}, again]):
                asked = await post(f"{url}/a/v1", "/chat/completions", "k", {**body, "messages": messages})
                replies.append(asked.json()["choices"][0])
            whole = await post(f"{url}/b/v1", "/messages", "k", asking("/messages", {}))
    assert [one["finish_reason"] for one in replies] == ["length", "stop"]
    assert [one["message"]["content"] for one in replies] == ["40", "41"]
    assert whole.json()["stop_reason"] == "max_tokens"
    found = {id: entry.episode for id, entry in entries_of(tmp_path).items()}
    assert [turn.action.text for turn in found["a"].turns] == ["40", "41"]
    assert len(found["a"].trajectories) == 1


async def test_a_folder_of_another_model_or_command_is_refused(model, tmp_path, monkeypatch):
    for text in ("[gateway]\n[model]\nhf_checkpoint = '/elsewhere'\n", "[eval]\nn = 3\n"):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(ConfigError, match="choose another output_dir"):
            async with serving(model, tmp_path):
                pass
        assert (tmp_path / "config.toml").read_text() == text


async def test_a_folder_takes_one_model_of_an_endpoint_wherever_that_is(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    for port in range(2):
        async with ChatServer(lambda request: assistant("42")).serving() as server:
            where = {"openai_url": server.url, "openai_model": "m"}
            async with serving(None, tmp_path, **where) as url:
                await ask(f"{url}/at-{port}/v1", [ASKED])
            before = (tmp_path / "config.toml").read_text()
            with pytest.raises(ConfigError, match="of another model"):
                async with serving(None, tmp_path, **{**where, "openai_model": "other"}):
                    pass
            assert (tmp_path / "config.toml").read_text() == before
    assert entries_of(tmp_path).keys() == {"at-0", "at-1"}


@pytest.mark.full
async def test_a_killed_gateway_has_lost_the_last_request_at_most(model, tmp_path):
    flags = ["--model", model, "--output-dir", tmp_path, "--max-slots=4", "--port=0", "--json"]
    command = [sys.executable, "-m", "agentrl.cli", "gateway", *map(str, flags)]
    said = {"one": [], "two": [], "three": []}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        url = json.loads(await asyncio.to_thread(process.stdout.readline))["url"]
        for name in ("one", "two", "one", "one", "three"):
            # The third request of the first conversation begins anew.
            told = [part for reply in said[name] for part in (ASKED, reply["message"])]
            messages = [*([] if len(said[name]) == 2 else told), ASKED]
            body = {"model": "m", "messages": messages, "tools": [TOOL], "max_tokens": 5, "logprobs": True}
            reply = await post(f"{url}/{name}/v1", "/chat/completions", "k", body)
            said[name].append(reply.json()["choices"][0])
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "trajectories").exists(), "no episode has ended"
    for _ in range(2):
        async with serving(model, tmp_path, max_slots=4) as url:
            await ask(f"{url}/one/v1", [ASKED])
        await emptied(tmp_path / "open")
    found = entries_of(tmp_path)
    assert {"one", "two", "one-2", "one-3"} <= found.keys() <= {"one", "two", "three", "one-2", "one-3"}
    for name in found.keys() & said.keys():
        turns = found[name].episode.turns
        logprobs = [turn.tokens.completion.logprobs.tolist() for turn in turns]
        sent = [[token["logprob"] for token in reply["logprobs"]["content"]] for reply in said[name]]
        assert len(said[name]) - len(turns) in (0, int(name in ("one", "three")))
        assert logprobs == sent[: len(turns)]
        assert found[name].episode.ending is Ending.TRUNCATED


@pytest.mark.parametrize("has_tokens", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_no_reply_waits_for_the_disk(request, tmp_path, monkeypatch, has_tokens):
    began, goes_on = threading.Event(), threading.Event()

    def slow(write):
        def waits(*given, **more):
            began.set()
            assert goes_on.wait(120)
            return write(*given, **more)

        return waits

    monkeypatch.setattr("agentrl.evaluation.gateway.write_bytes", slow(gateway.write_bytes))
    monkeypatch.setattr(members, "append", slow(members.append))
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    directory = request.getfixturevalue("model") if has_tokens else None
    async with ChatServer(lambda request: assistant("42")).serving() as server:
        where = {"max_slots": 4} if has_tokens else {"openai_url": server.url, "openai_model": "m"}
        async with serving(directory, tmp_path, idle_s=1.0, **where) as url:
            first = await ask(f"{url}/one/v1", [ASKED])
            assert await asyncio.to_thread(began.wait, 60), "its reply is written"
            messages = [ASKED, first, ASKED]
            for name in ("one", "two", "three"):
                messages.append(await ask(f"{url}/{name}/v1", messages))
                messages.append(ASKED)
            # The first of them end, while nothing has been written.
            await asyncio.sleep(2.0)
            await ask(f"{url}/four/v1", [ASKED])
            assert not [path for path in tmp_path.rglob("*.jsonl*") if path.is_file()]
            goes_on.set()
    assert {id: len(entry.episode.turns) for id, entry in entries_of(tmp_path).items()} == {
        **{"one": 2, "two": 1, "three": 1, "four": 1}
    }
    await emptied(tmp_path / "open")


@pytest.mark.full
def test_the_command_ends_cleanly_with_a_signal(model, tmp_path):
    flags = ["--model", model, "--output-dir", tmp_path, "--max-slots=4", "--port=0", "--json"]
    command = [sys.executable, "-m", "agentrl.cli", "gateway", *map(str, flags)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        facts = json.loads(process.stdout.readline())
        assert facts["has_tokens"]
        asyncio.run(ask(f"{facts['url']}/one/v1", [ASKED]))
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
    assert entries_of(tmp_path).keys() == {"one"}
