"""The grader `remote` against a real loopback server that fails, hangs and answers garbage."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentrl import ScriptedAgent, Task, UserError, make, play
from agentrl.envs.graders import make_grader
from agentrl.errors import ConfigError, GradingError
from agentrl.types import Ending
from tests.engine.chat.chat_server import ChatServer
from tests.envs.graders.test_text import iter_once

pytestmark = pytest.mark.usefixtures("released")
TASK = Task.ask("t", "How long is it? ", "long")
QUICK = {"attempts": 3, "timeout_s": 5.0}


class RewardServer(ChatServer):
    """A server of rewards: `play` makes the body of each reply."""

    path = "/get_reward"

    def body(self, request):
        return self.play(request)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}{self.path}"


def lengths(request):
    """A reward for each answer of a batch: its length."""
    return {"rewards": [len(response) for response in request["responses"]]}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr("agentrl.envs.graders.remote._FIRST_WAIT_S", 0.01)


async def test_concurrent_answers_share_requests_in_the_form_of_openrlhf():
    async with RewardServer(lengths).serving() as server:
        grade = make_grader("remote", url=server.url, max_batch=16, max_requests=1, **QUICK)
        answers = ["x" * n for n in range(40)]
        assert await asyncio.gather(*(grade(TASK, answer) for answer in answers)) == list(range(40))
    sizes = [len(request["query"]) for request in server.requests]
    assert sum(sizes) == 40
    assert max(sizes) <= 16
    assert len(sizes) <= 4
    assert server.max_running == 1
    first = server.requests[0]
    assert first["query"][1] == "How long is it? x"
    assert (first["prompts"][1], first["responses"][1], first["labels"][1]) == (
        "How long is it? ",
        "x",
        "long",
    )


async def test_a_single_answer_a_request_in_the_form_of_slime():
    async with RewardServer(lambda request: {"score": len(request["response"]) / 4}).serving() as server:
        grade = make_grader("remote", url=server.url, protocol="single", max_requests=2, **QUICK)
        assert await asyncio.gather(*(grade(TASK, "x" * n) for n in range(8))) == [n / 4 for n in range(8)]
    assert server.requests[1] == {"prompt": "How long is it? ", "response": "x", "label": "long"}
    assert server.max_running <= 2


@pytest.mark.parametrize("trouble", [429, 503, "reset", "drop"])
async def test_what_may_pass_is_tried_again(trouble):
    async with RewardServer(lengths, trouble, trouble).serving() as server:
        assert await make_grader("remote", url=server.url, **QUICK)(TASK, "four") == 4
    assert server.counts["requests"] == 3


@pytest.mark.parametrize(
    ("behaviour", "kind", "sentence"),
    [
        (503, "unavailable", "answered 503"),
        ("reset", "crashed", ""),
        ("drop", "crashed", ""),
        (500, "crashed", "answered 500"),
        (403, "refused", "answered 403"),
        (404, "protocol", "answered 404"),
        (b"garbage", "protocol", "the reply is no JSON"),
        (b"[" * 100_000, "protocol", "the reply is no JSON"),
        ({"rewards": []}, "protocol", "the reply has 0 rewards for 1 answers"),
        ({"rewards": [1, 2]}, "protocol", "the reply has 2 rewards for 1 answers"),
        ({"rewards": ["1"]}, "protocol", "'1' in place of a finite number"),
        ({"rewards": [True]}, "protocol", "True in place of a finite number"),
        (b'{"rewards": [NaN]}', "protocol", "nan in place of a finite number"),
        (b'{"rewards": [1e999]}', "protocol", "inf in place of a finite number"),
        (b'{"rewards": [1' + b"0" * 400 + b"]}", "protocol", "in place of a finite number"),
        ({}, "protocol", "None in place of a finite number"),
        (b"x" * 9_000_000, "protocol", "the reply is longer than"),
    ],
)
async def test_what_stays_broken_is_a_typed_failure_and_no_zero(behaviour, kind, sentence):
    async with RewardServer(lengths, *[behaviour] * 3).serving() as server:
        with pytest.raises(GradingError, match=sentence or None) as caught:
            await make_grader("remote", url=server.url, **QUICK)(TASK, "answer")
    assert (caught.value.stage, caught.value.kind) == ("reward", kind)


async def test_a_server_that_hangs_is_unavailable_in_time_and_its_connection_closes():
    async with RewardServer(lengths, "hang").serving() as server:
        grade = make_grader("remote", url=server.url, timeout_s=0.3)
        with pytest.raises(GradingError, match=r"gave no reward in 0\.3 s") as caught:
            await grade(TASK, "answer")
        await asyncio.wait_for(server.closed.wait(), 5)
        assert caught.value.kind == "unavailable"
        assert await grade(TASK, "four") == 4


async def test_a_server_that_is_not_there_is_unavailable():
    with pytest.raises(GradingError) as caught:
        await make_grader("remote", url="http://127.0.0.1:1/", **QUICK)(TASK, "answer")
    assert caught.value.kind == "unavailable"


async def test_a_failure_fails_the_episode_and_is_not_scored():
    async with RewardServer(lengths, 500).serving() as server:
        env = make("SingleTurn-v0", reward=make_grader("remote", url=server.url, **QUICK))
        episode = await play(env, ScriptedAgent(iter_once("four")), TASK, seed=0)
        assert episode.ending is Ending.FAILED
        assert (episode.failure.stage, episode.failure.kind) == ("reward", "crashed")
        episode = await play(env, ScriptedAgent(iter_once("four")), TASK, seed=0)
        assert episode.step_rewards == (4.0,)


async def test_the_key_is_sent_and_needs_its_variable(monkeypatch):
    monkeypatch.setenv("RM_KEY", "secret-key")
    async with RewardServer(lengths, key="secret-key").serving() as server:
        assert await make_grader("remote", url=server.url, key_env="RM_KEY", **QUICK)(TASK, "four") == 4
        with pytest.raises(GradingError, match="answered 401"):
            await make_grader("remote", url=server.url, **QUICK)(TASK, "four")
    with pytest.raises(ConfigError, match="RM_KEYS holds no key"):
        make_grader("remote", url="http://127.0.0.1:1", key_env="RM_KEYS")


async def test_a_long_answer_is_sent_by_its_end():
    async with RewardServer(lengths).serving() as server:
        assert await make_grader("remote", url=server.url, **QUICK)(TASK, "x" * 10_000_000) == 100_000
    assert len(json.dumps(server.requests)) < 500_000


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "missing a required"),
        ({"url": "nowhere"}, "'nowhere' is not an address"),
        ({"url": "http://localhost:secret@127.0.0.1"}, "holds credentials"),
        ({"url": "http://127.0.0.1", "attempts": 0}, "of at least 1"),
        ({"url": "http://127.0.0.1", "timeout_s": 0}, "a timeout_s above 0"),
        ({"url": "http://127.0.0.1", "protocol": "grpc"}, "`protocol` = 'grpc' does not fit"),
    ],
)
def test_bad_settings_are_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        make_grader("remote", **settings)
    assert "\n" not in str(caught.value)
