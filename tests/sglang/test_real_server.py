"""One real SGLang on the CPU, from its start to its end (`make test-sglang`)."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.engine.sglang.launch.phases import StartLog
from agentrl.engine.sglang.teacher import ServedTeacher
from agentrl.errors import ConfigError, TeacherError
from agentrl.trainer.batch import micro_batches
from agentrl.trainer.torch.forward import TorchNetwork, token_outputs
from agentrl.types import KEPT_IDS, Author, Finish, RolloutId, Sample, joined_extras
from agentrl.types.seams import Sampling
from tests.engine.across_updates import play_across_updates
from tests.engine.fleets import pids_at, send_signal, sglang_fleet, until
from tests.engine.serving import embedded_server
from tests.engine.subjects import text_of, tiny
from tests.engine.test_fleet import expect_versions, publish, start_request
from tests.engine.test_scoring import scored_replies
from tests.engine.test_teacher import IDS, expect_the_trainers, samples_of_a_batch

pytestmark = pytest.mark.full

PROMPT = [1, 10, 20, 30]
LONG = 3000


async def test_it_starts_samples_takes_weights_ends_a_request_and_is_gone(tmp_path):
    async with sglang_fleet(tmp_path, 1, context_len=4096) as fleet:
        port = fleet.processes[0].port
        phases = StartLog(fleet.processes[0].log, 0).new_phases()
        assert phases[:3] == ["joining the other GPUs", "loading weights", "allocating the cache"]
        assert "warming up" in phases
        assert len(pids_at(port)) >= 3, "the server, its scheduler, its detokenizer"

        sampled = {}
        for version in (0, 1):
            if version:
                await publish(fleet, version)
            sampled[version] = await fleet.generate(PROMPT, Sampling(12, temperature=0.0), session="a")
            assert set(sampled[version].versions.tolist()) == {version}
            expect_versions(PROMPT, sampled[version])
        assert sampled[0].token_ids.tolist() != sampled[1].token_ids.tolist()
        await expect_replayed(fleet, tiny("qwen3", 1))

        await fleet.profile(tmp_path / "traces", 3)
        timed = await fleet.generate(PROMPT, Sampling(12, temperature=0.0), session="a")
        await until(lambda: list((tmp_path / "traces").glob("server-0/*.trace.json.gz")))
        assert timed.seconds.request > 0

        prompt, running = start_request(fleet, 3, LONG)
        await until(lambda: any(pending.sent for pending in fleet.policy._pending))
        await asyncio.sleep(0.5)  # some tokens are sampled, but not all
        await fleet.abort()
        cut = await asyncio.wait_for(running, 30)
        assert cut.finish is Finish.ABORT
        assert 0 < len(cut.token_ids) < LONG
        expect_versions(prompt, cut)

        after = await fleet.generate(PROMPT, Sampling(12, temperature=0.0), session="b")
        assert after.token_ids.tolist() == sampled[1].token_ids.tolist()
        assert (fleet.incidents, fleet.policy.counts["aborts"]) == ([], 1)
    assert pids_at(port) == []


async def test_every_logprob_is_the_trainers_at_the_version_of_its_token(tmp_path):
    async with sglang_fleet(tmp_path, 1, context_len=1024) as fleet:
        await play_across_updates(fleet, 120)
        assert fleet.policy.counts["resumed"] >= 2
        assert fleet.incidents == []


def sample_of(number, prompt, completion):
    sizes = len(prompt), len(completion.token_ids)
    is_sampled = np.repeat([False, True], sizes)
    before = np.zeros(len(prompt))
    return Sample(
        token_ids=np.concatenate([prompt, completion.token_ids]).astype(np.int32),
        author=np.where(is_sampled, Author.POLICY, Author.WORLD).astype(np.int8),
        loss_mask=is_sampled,
        logprobs=np.concatenate([before, completion.logprobs]).astype(np.float32),
        versions=np.concatenate([before - 1, completion.versions]).astype(np.int32),
        turns=np.zeros(sum(sizes), np.int32),
        temperatures=np.full(sum(sizes), completion.temperature, np.float32),
        rollout_id=RolloutId(f"e{number}"),
        extras=joined_extras([(len(prompt), {}), (len(completion.token_ids), completion.extras)]),
    )


async def expect_replayed(fleet, model):
    """The trainer renormalises over what the server kept, and gives every token the same logprob."""
    rule = Sampling(100, temperature=0.8, top_p=0.4, top_k=8, return_kept_ids=True)
    prompts = [[number, 2, 3, 4] for number in range(8)]
    completions = await asyncio.gather(
        *(fleet.generate(prompt, rule, session=f"k{number}") for number, prompt in enumerate(prompts))
    )
    samples = [sample_of(n, *pair) for n, pair in enumerate(zip(prompts, completions, strict=True))]
    sizes = np.concatenate([np.diff(completion.extras[KEPT_IDS].offsets) for completion in completions])
    assert sizes.max() == 8, "top_k cut somewhere"
    assert 1 <= sizes.min() < 8, "top_p cut somewhere"
    gaps, biased = [], []
    network = TorchNetwork(model)
    with torch.no_grad(), network.attending():
        for row in micro_batches(samples, [sample.loss_mask for sample in samples], 512):
            behaviour_N = row.gather([sample.logprobs for sample in samples])
            for found, cut in ((gaps, row), (biased, replace(row, kept_N=None))):
                outputs = token_outputs(network, cut, bf16=False)
                found.append(np.abs(outputs.logp_N.numpy() - behaviour_N))
    assert np.concatenate(gaps).max() < 2e-5
    assert np.concatenate(biased).mean() > 0.05


def rounded(reply):
    """A reply whose logprobs are compared to 1e-4: the two compute in float32, in different orders."""
    if isinstance(reply, float):
        return pytest.approx(reply, abs=1e-4)
    if isinstance(reply, dict):
        return {name: rounded(value) for name, value in reply.items()}
    return [rounded(value) for value in reply] if isinstance(reply, list) else reply


async def test_our_server_scores_prompts_as_sglang_does_and_both_teach_as_the_trainer_does(tmp_path):
    async with sglang_fleet(tmp_path, 1, context_len=256) as fleet, embedded_server() as (url, _):
        port = fleet.processes[0].port
        address = f"http://127.0.0.1:{port}"
        expected = await scored_replies(address)
        assert await scored_replies(url) == rounded(expected)
        assert any(reply["input_token_logprobs"] for reply in expected)

        await expect_the_trainers([address])
        await expect_the_trainers([address, url])
        teacher = ServedTeacher(urls=(address,), timeout_s=2.0)
        await teacher.check(text_of(IDS), IDS)
        with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
            await teacher.check(text_of(IDS), [2, *IDS[1:]])
        scoring = asyncio.create_task(teacher.logprobs(samples_of_a_batch(200), None))
        await asyncio.sleep(0.1)
        send_signal(pids_at(port), signal.SIGKILL)
        with pytest.raises(TeacherError, match=r"did not score .* in 2 s .*then resume the run"):
            await scoring
