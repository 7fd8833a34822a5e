"""Eval-only runs against a chat endpoint: full score for the expert, errors for mistakes, no torch."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import sys

import pytest

import agentrl
from agentrl.cli import main
from agentrl.errors import ConfigError, RunExistsError, WorldBrokenError
from agentrl.records import Outcome, read_journal
from agentrl.types import Ending
from tests.engine.chat.chat_server import ChatServer, assistant, expert_of, refusal, reply
from tests.flow.runs import HEARING

KEY = "sk-very-secret-0123456789"
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "tensorboard", "matplotlib")
WORLDS = ("HopSearch-v0", "Calculator-v0")
LIGHT = f"""
import sys
from agentrl.cli import main
try:
    main(sys.argv[1:])
finally:
    print("heavy:", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


def server_of(env_id, *behaviours, **options):
    env = agentrl.make(env_id)
    return ChatServer(expert_of(env, "test"), *behaviours, **options)


async def evaluated(server, env_id="Calculator-v0", **settings):
    where = {"openai_url": server.url, "openai_model": "m", "n": 6, **settings}
    return await asyncio.to_thread(agentrl.evaluate, env_id, quiet=True, **where)


async def command(server, *arguments, key=KEY):
    """The command line in a process of its own: exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LIGHT, "eval", *arguments, "--openai-url", server.url, "--openai-model", "m"),
        env={**os.environ, "OPENAI_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("env_id", WORLDS)
async def test_the_expert_behind_an_endpoint_gets_full_marks(env_id, tmp_path):
    prices = {"price_prompt": 2.0, "price_completion": 10.0, "price_cached": 1.0}
    async with server_of(env_id, key=None).serving() as server:
        report = await evaluated(
            server, env_id, n=12, output_dir=str(tmp_path / "eval"), openai_concurrency=3, **prices
        )
    assert (report.mean, report.n, report.failures) == (1.0, 12, {})
    turns = server.counts["requests"] - 1
    assert report.turns == turns / 12
    assert report.usage == {
        "prompt_tokens": 20 * turns,
        "completion_tokens": 5 * turns,
        "cached_tokens": 8 * turns,
        "reasoning_tokens": 2 * turns,
    }
    assert report.cost == pytest.approx(turns * (12 * 2.0 + 8 * 1.0 + 5 * 10.0) / 1e6)
    assert report.policy_tokens == 5 * turns / 12
    assert report.counts["chat/requests"] == turns
    assert server.max_running <= 3

    entries = list(read_journal(tmp_path / "eval" / "trajectories" / "eval_test_000000.jsonl.gz"))
    assert [entry.verdict.total for entry in entries] == [1.0] * 12
    assert {entry.outcome for entry in entries} == {Outcome.EVALUATED}
    assert sum(entry.episode.usage.prompt_tokens for entry in entries) == 20 * turns
    assert entries[0].episode.limits.max_tokens is None, "the limits in force"
    assert json.loads((tmp_path / "eval" / "report.json").read_text()) == json.loads(
        json.dumps(report.as_json())
    )


def text_of(path):
    """What a file says, unpacked where it is packed."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


async def test_the_command_prints_json_loads_nothing_heavy_and_shows_the_key_nowhere(tmp_path):
    folder = tmp_path / "out"
    leaking = reply(assistant(f"Is {KEY} your key?"))
    async with server_of("HopSearch-v0", reply(assistant("ready")), leaking, key=KEY).serving() as server:
        flags = ("--n", "4", "--temperature", "0", "--price-prompt", "1", "--price-completion", "1")
        code, out, err = await command(
            server, "HopSearch-v0", "--json", "--output-dir", str(folder), "--openai-concurrency", "1", *flags
        )
    assert (code, err) == (0, "heavy: []\n")
    report = json.loads(out)
    assert (report["mean"], report["n"], report["temperature"]) == (0.75, 4, 0.0)
    assert report["cost"] > 0
    assert server.requests[1]["temperature"] == 0
    written = [path for path in folder.rglob("*") if path.is_file()]
    episodes = {"eval_test_000000.jsonl.gz", "eval_test_000000.seconds"}
    names = {"config.toml", "identity.json", "report.json", "run.lock", *episodes}
    assert {path.name for path in written} == names
    assert "OPENAI_API_KEY" in (folder / "config.toml").read_text()
    assert not [path for path in written if KEY in text_of(path)]
    assert KEY not in out


async def test_the_command_shows_tokens_and_cost_to_people():
    async with server_of("Calculator-v0", key=KEY).serving() as server:
        code, out, err = await command(
            server, "Calculator-v0", "--n", "2", "--price-prompt", "1000", "--price-completion", "0"
        )
    assert code == 0
    cost = 0.02 * (server.counts["requests"] - 1)
    assert re.search(rf"cost, all episodes +│ +{cost:.4f} ", out)
    assert re.search(rf"cost per episode +│ +{cost / 2:.6f} ", out)
    assert re.search(r"prompt tokens +│ +\d+ ", out)
    assert "playing Calculator-v0 2/2 done" in out
    assert KEY not in out + err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"key": "another"}, "put the right key into the environment variable OPENAI_API_KEY."),
        ({"models": ["n", "o"]}, "/v1 has no model `m`. It has n, o."),
    ],
)
async def test_a_wrong_key_or_model_is_an_error_before_anything_is_played(options, sentence, tmp_path):
    async with server_of("Calculator-v0", **options).serving() as server:
        code, out, err = await command(server, "Calculator-v0", "--json")
    assert (code, out) == (2, "")
    error, heavy = err.splitlines()
    assert error.startswith("agentrl: ")
    assert error.endswith(sentence)
    assert heavy == "heavy: []"
    assert KEY not in err
    assert server.counts["requests"] <= 1


async def test_a_failed_turn_fails_the_episode_and_is_in_no_mean(tmp_path):
    broken = [reply(assistant("ready")), (400, refusal("bad luck")), b"{"]
    async with server_of("Calculator-v0", *broken).serving() as server:
        report = await evaluated(server, n=8, output_dir=str(tmp_path))
    assert (report.mean, report.n) == (1.0, 6)
    assert report.failures == {"act_protocol": 2}
    entries = list(read_journal(tmp_path / "trajectories" / "eval_test_000000.jsonl.gz"))
    failed = [entry for entry in entries if entry.episode.ending is Ending.FAILED]
    assert [entry.verdict for entry in failed] == [None, None]


async def test_a_failed_episode_costs_what_it_took():
    def play(request):
        return assistant(None, [("calc", '{"expression": "1"}')])

    server = ChatServer(play, *[reply(assistant("1"))] * 2, reply(play(None)), (400, refusal("no")))
    async with server.serving():
        report = await evaluated(server, n=2, openai_concurrency=1)
    assert (report.n, report.failures) == (1, {"act_protocol": 1})
    assert (report.usage["prompt_tokens"], report.counts["chat/requests"], report.cost) == (40, 1, None)


async def test_when_every_episode_fails_the_sentence_blames_the_endpoint():
    async with ChatServer(
        lambda request: assistant("x"), reply(assistant("ready")), *[b"{"] * 3
    ).serving() as server:
        with pytest.raises(WorldBrokenError, match=r"act failed: .*no JSON\); mend the model's end\."):
            await evaluated(server, n=3)


async def test_a_limit_of_tokens_holds_only_where_it_is_set():
    async with server_of("Calculator-v0").serving() as server:
        cut = await evaluated(server, n=2, rollout_max_context_len=10)
        free = await evaluated(server, n=2)
    assert cut.endings == {"truncated": 2}
    assert free.endings == {"completed": 2}


async def test_settings_reach_the_endpoint():
    async with server_of("Calculator-v0").serving() as server:
        await evaluated(
            server,
            n=1,
            temperature=0.25,
            openai_max_tokens=7,
            openai_body={"reasoning_effort": "low"},
            openai_omit="seed",
        )
    for request in server.requests:
        assert (request["temperature"], request["max_tokens"], request["reasoning_effort"]) == (
            0.25,
            7,
            "low",
        )
        assert "seed" not in request


async def test_an_older_evaluation_is_not_written_over(tmp_path):
    async with server_of("Calculator-v0").serving() as server:
        await evaluated(server, n=1, output_dir=str(tmp_path))
        num_requests = server.counts["requests"]
        with pytest.raises(RunExistsError, match="already holds episodes"):
            await evaluated(server, n=1, output_dir=str(tmp_path))
        assert server.counts["requests"] == num_requests
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        await evaluated(server, n=1, output_dir=str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "Name one model to score"),
        (("--model=x", "--openai-url=http://127.0.0.1:9/v1", "--openai-model=m"), "Name one model to score"),
        (("--openai-url=http://127.0.0.1:9/v1",), "give openai_model, too."),
        (("--openai-model=m",), "give openai_url, too."),
        (("--model=x", "--openai-max-tokens=7"), "openai_max_tokens is for a chat endpoint"),
        (("--openai-url=here", "--openai-model=m"), "'here' is not an address"),
        (
            ("--openai-url=http://127.0.0.1:9/v1", "--openai-model=m", "--openai-key-env=NO_SUCH_KEY"),
            "The environment variable NO_SUCH_KEY is not set",
        ),
        (
            ("--openai-url=http://127.0.0.1:9/v1", "--openai-model=m", "--price-prompt=1"),
            "the cost needs price_prompt and price_completion",
        ),
        (
            ("--openai-url=http://127.0.0.1:9/v1", "--openai-model=m", "--price-cached=1"),
            "price_cached needs price_prompt",
        ),
        (
            ("--openai-url=http://127.0.0.1:9/v1", "--openai-model=m", '--openai-body={"messages": []}'),
            "`messages` of a request is not for openai_body",
        ),
        (
            ("--openai-url=http://127.0.0.1:9/v1", "--openai-model=m", "--openai-timeout-s=0"),
            "`openai.openai_timeout_s` = '0' does not fit",
        ),
    ],
)
def test_invalid_settings_are_a_one_line_error(flags, sentence, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["eval", "Calculator-v0", *flags])
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert sentence in output.err
    assert output.err.count("\n") == 1


async def test_interrupting_a_run_leaves_nothing_behind():
    server = server_of("Calculator-v0", reply(assistant("ready")), *["hang"] * 8)
    async with server.serving():
        arguments = ("eval", "Calculator-v0", "--openai-url", server.url, "--openai-model", "m")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HEARING, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(120):
            while server.counts["requests"] < 9:
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in err
