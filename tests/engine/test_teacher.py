"""A teacher behind HTTP: its logprobs are those of one in the trainer, and what is wrong is one sentence."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentrl.engine.sglang.launch.listener import free_ports, is_free
from agentrl.engine.sglang.teacher import ServedTeacher
from agentrl.errors import ConfigError, TeacherError
from agentrl.losses import PolicyLoss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.teacher import TrainerTeacher
from agentrl.trainer.torch import AuxiliaryModels, TorchTrainer
from agentrl.types import Author
from tests.algorithms.test_distillation import row_of
from tests.engine.fleets import Served, pids_at, send_signal, until
from tests.engine.serving import ScriptedServer, embedded_server, save_tiny
from tests.engine.subjects import VOCAB, text_of, tiny
from tests.listening import listening

W, P = Author.WORLD, Author.POLICY
IDS = list(range(1, VOCAB))


def samples_of_a_batch(number=9, seed=0):
    """Samples of several turns, some with a privileged prompt, one of which nothing was sampled."""
    rng, samples = np.random.default_rng(seed), []
    for n in range(number):
        turns = [[W] * rng.integers(1, 6) + [P] * rng.integers(1, 9) for _ in range(rng.integers(1, 4))]
        authors = [author for turn in turns for author in turn] + [W] * (n % 2)
        ids = rng.integers(0, VOCAB, len(authors)).astype(np.int32)
        privileged = rng.integers(0, VOCAB, rng.integers(1, 12)) if n % 3 else None
        ones = np.ones(len(authors), dtype=np.float32)
        samples.append(row_of(authors, privileged, token_ids=ids, temperatures=ones))
    return [*samples, row_of([W, W], token_ids=np.zeros(2, np.int32), temperatures=np.ones(2, np.float32))]


async def expect_the_trainers(urls, **settings):
    """Check that servers of the first tiny model score as a teacher in the trainer does, to 1e-4."""
    samples = samples_of_a_batch()
    served = await ServedTeacher(urls=tuple(urls), **settings).logprobs(samples, None)
    teacher = AuxiliaryModels(teacher=tiny("qwen3"))
    trainer = TorchTrainer(
        tiny("llama"), PolicyLoss(), TrainerConfig(), tokenizer=None, total_steps=1, auxiliary=teacher
    )
    loaded = await TrainerTeacher("teacher", 256).logprobs(samples, trainer)
    for ours, theirs, sample in zip(served, loaded, samples, strict=True):
        np.testing.assert_allclose(ours[sample.loss_mask], theirs[sample.loss_mask], atol=1e-4)
    assert any(np.abs(scores).max() > 1 for scores in served)


async def test_a_served_teacher_is_the_one_in_the_trainer():
    async with embedded_server() as (url, _), embedded_server() as (other, _):
        await expect_the_trainers([url])
        await expect_the_trainers([f"{url}/", other], max_requests=2)
        await ServedTeacher(urls=(url,)).check(text_of(IDS), IDS)


def scored(request):
    """The reply of a server whose logprobs are -1, -2, ..."""
    ids = request["input_ids"][request["logprob_start_len"] :]
    # SGLang reports the last token of its vocabulary as 0.
    entries = [[-float(n) if n else None, token if token != 105 else 0, None] for n, token in enumerate(ids)]
    return {"meta_info": {"input_token_logprobs": entries}}


class Flaky:
    """A server that answers some requests with other statuses first, and holds at most so many."""

    def __init__(self, *statuses, key=None):
        self.statuses, self.key = list(statuses), key
        self.requests, self.now, self.most = [], 0, 0
        self.app = Starlette(routes=[Route("/generate", self.generate, methods=["POST"])])

    async def generate(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        self.requests.append(json.loads(await request.body()))
        await asyncio.sleep(0.02)
        self.now -= 1
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return JSONResponse({"error": {"message": "busy"}}, status)
        return JSONResponse(scored(self.requests[-1]))


SAMPLE = row_of([W, W, P, P, W, P, W], [7, 8, 9, 10], temperatures=np.ones(7, dtype=np.float32))


async def test_a_request_asks_for_the_sampled_tokens_alone_and_bounds_hold():
    server = Flaky(200, 503, 429, 500)
    async with listening(server.app) as url:
        teacher = ServedTeacher(urls=(url,), max_requests=3)
        found = await teacher.logprobs([SAMPLE] * 12, None)
    assert [scores.tolist() for scores in found] == [[0, 0, -1, -2, -3, -4, 0]] * 12
    assert server.requests[0] == {
        "input_ids": [7, 8, 9, 10, 102, 103, 104, 105],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 3,
    }
    assert len(server.requests) == 15, "three were sent again"
    assert server.most == 3


async def test_a_server_that_is_gone_is_left_for_the_next_address():
    (port,) = free_ports(1)
    server = Flaky()
    async with listening(server.app) as url:
        teacher = ServedTeacher(urls=(f"http://127.0.0.1:{port}", url))
        await teacher.logprobs([SAMPLE] * 4, None)
    assert len(server.requests) == 4


async def test_the_key_is_sent_and_is_in_no_sentence(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "s3cret")
    server = Flaky(key="s3cret")
    async with listening(server.app) as url:
        await ServedTeacher(urls=(url,), key_env="TEACHER_KEY").logprobs([SAMPLE], None)
        with pytest.raises(TeacherError, match=r"answered 401: .*opd_teacher_key_env") as caught:
            await ServedTeacher(urls=(url,)).logprobs([SAMPLE], None)
        with pytest.raises(TeacherError, match=r"opd_teacher_url: .* answered 401"):
            await ServedTeacher(urls=(url,)).check("a", [1])
        monkeypatch.setenv("TEACHER_KEY", "s3 wrong")
        with pytest.raises(TeacherError) as wrong:
            await ServedTeacher(urls=(url,), key_env="TEACHER_KEY").logprobs([SAMPLE], None)
    assert "s3" not in str(caught.value) + str(wrong.value) + repr(ServedTeacher(urls=(url,)))
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(ConfigError, match="the environment variable TEACHER_KEY holds no key"):
        ServedTeacher(urls=(url,), key_env="TEACHER_KEY")
    with pytest.raises(ConfigError, match="leave the user name and password out, and give"):
        ServedTeacher(urls=("http://" + "me:pw@127.0.0.1:1",))


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ({"meta_info": {"input_token_logprobs": []}}, "scored other tokens than it was sent: 0 of 5"),
        ({"meta_info": {"input_token_logprobs": [[None, 10, None]] * 5}}, "scored other tokens"),
        ({"meta_info": {"input_token_logprobs": [[None, 10, None], *[[-1.0, 7, None]] * 4]}}, "5 of 5"),
        ((400, {"error": {"message": "too long"}}), "answered 400: .*too long.* then resume the run"),
        ("{", "does not follow the SGLang protocol"),
    ],
)
async def test_a_reply_that_is_of_no_use_is_one_sentence(reply, sentence):
    async with ScriptedServer(reply).listening() as url:
        with pytest.raises(TeacherError, match=sentence) as caught:
            await ServedTeacher(urls=(url,)).logprobs([SAMPLE], None)
    assert "\n" not in str(caught.value)


async def test_a_server_that_hangs_is_given_up_at_the_deadline():
    async with ScriptedServer("hang").listening() as url:
        began = time.perf_counter()
        with pytest.raises(TeacherError, match=r"did not score 8 tokens in 0.3 s \(opd_teacher_timeout_s\)"):
            await ServedTeacher(urls=(url,), timeout_s=0.3).logprobs([SAMPLE] * 3, None)
        assert time.perf_counter() - began < 5


async def test_tokens_of_another_temperature_are_refused():
    with pytest.raises(TeacherError, match="sampled at another temperature than 1"):
        await ServedTeacher(urls=("http://127.0.0.1:1",)).logprobs([row_of([W, P])], None)


async def test_a_server_is_checked_before_it_gets_a_token():
    (port,) = free_ports(1)
    with pytest.raises(
        TeacherError, match=rf"http://127.0.0.1:{port} cannot be reached .*start the teacher's"
    ):
        await ServedTeacher(urls=(f"http://127.0.0.1:{port}",)).check("a", [1])
    async with embedded_server() as (url, _):
        with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
            await ServedTeacher(urls=(url,)).check(text_of(IDS), [2, *IDS[1:]])
    async with ScriptedServer(
        (400, {"error": {"message": "skip_tokenizer_init: no tokenizer"}})
    ).listening() as url:
        await ServedTeacher(urls=(url,)).check("a", [1])


@pytest.mark.full
async def test_a_server_that_is_killed_in_the_middle_is_waited_for_and_then_given_up(tmp_path):
    save_tiny(tmp_path / "model", context_len=1024)
    server = Served(tmp_path)
    await server.start()
    samples = [sample for seed in range(40) for sample in samples_of_a_batch(seed=seed)]
    teacher = ServedTeacher(urls=(server.url,), timeout_s=30.0)
    expected = await teacher.logprobs(samples, None)
    scoring = asyncio.create_task(teacher.logprobs(samples, None))
    await asyncio.sleep(0.05)
    send_signal(pids_at(server.port), signal.SIGKILL)
    assert not scoring.done()
    await until(lambda: is_free(server.port))
    again = Served(tmp_path, 1)
    again.port = server.port
    await again.start()
    for ours, theirs in zip(await scoring, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    await server.stop()
    await again.stop()
    impatient = ServedTeacher(urls=(server.url,), timeout_s=1.0)
    with pytest.raises(TeacherError, match=r"the last error: .*then resume the run"):
        await impatient.logprobs(samples, None)
