"""One real SGLang on the CPU, from its start to its end (`make test-sglang`)."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.protocols import Sampling
from agentrl.types import Finish
from tests.engine.across_updates import play_across_updates
from tests.engine.fleets import pids_at, sglang_fleet, until
from tests.engine.test_fleet import expect_versions, publish, start_request

pytestmark = pytest.mark.full

PROMPT = [1, 10, 20, 30]
LONG = 3000


async def test_it_starts_samples_takes_weights_ends_a_request_and_is_gone(tmp_path):
    async with sglang_fleet(tmp_path, 1, context_len=4096) as fleet:
        port = fleet.processes[0].port
        assert len(pids_at(port)) >= 3, "the server, its scheduler, its detokenizer"

        sampled = {}
        for version in (0, 1):
            if version:
                await publish(fleet, version)
            sampled[version] = await fleet.generate(PROMPT, Sampling(12, temperature=0.0), session="a")
            assert set(sampled[version].versions.tolist()) == {version}
            expect_versions(PROMPT, sampled[version])
        assert sampled[0].token_ids.tolist() != sampled[1].token_ids.tolist()

        prompt, running = start_request(fleet, 3, LONG)
        await until(lambda: any(pending.sent for pending in fleet.policy._pending.values()))
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
