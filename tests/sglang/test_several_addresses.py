"""Two real SGLangs that somebody else started, as one engine: sessions, weights, and the end of one."""

from __future__ import annotations

import asyncio
import re
import signal
from contextlib import ExitStack
from dataclasses import replace

import pytest

from agentrl.assembly.fleet import FleetPlan
from agentrl.engine.config import EngineConfig
from agentrl.types.seams import Sampling
from tests.engine.fleets import pids_at, send_signal, until
from tests.engine.serving import free_port, running, save_tiny, sglang_command, sglang_python
from tests.engine.subjects import VOCAB, text_of
from tests.engine.test_fleet import expect_exact, expect_versions, publish, start_request

pytestmark = pytest.mark.full

CONTEXT_LEN, LONG = 1024, 800
GREEDY = Sampling(16, temperature=0.0)


def requests_in(log) -> int:
    """How many prompts a server has computed, from its log."""
    return len(re.findall(r"Prefill batch", log.read_text()))


async def test_two_servers_at_addresses_play_as_one_and_one_may_end(tmp_path):
    model, ports = save_tiny(tmp_path / "model", context_len=CONTEXT_LEN), [free_port(), free_port()]
    logs = [tmp_path / f"server-{port}.log" for port in ports]
    events = []
    with ExitStack() as stack:
        for port, log in zip(ports, logs, strict=True):
            command = sglang_command(model, port, context_length=CONTEXT_LEN)
            stack.enter_context(running(command, f"http://127.0.0.1:{port}", "/health_generate", log))
        config = EngineConfig(
            engine="sglang",
            sglang_url=",".join(f"http://127.0.0.1:{port}" for port in ports),
            sglang_python=str(sglang_python()),
            update_weights_transport="disk",
            rollout_health_check_interval=60.0,
            rollout_health_check_first_wait=1.0,
            router={"policy": "manual", "max_idle_secs": 600},
        )
        plan = FleetPlan(model=model, config=config, folder=tmp_path / "engine", on_event=events.append)
        fleet = await replace(plan, vocab_size=VOCAB, decode=text_of).join()
        try:
            assert [server.url[-5:] for server in fleet.processes] == [str(port)[-5:] for port in ports]
            await publish(fleet, 1)
            before = [requests_in(log) for log in logs]
            requests = [start_request(fleet, number, 8) for number in range(8)]
            assert await expect_exact(requests, 8) == [{1}] * 8
            await until(lambda: all(requests_in(log) > n for log, n in zip(logs, before, strict=True)))

            # A session that has a server finds its own prefix there, and is told what it took.
            prompt = [5, 6, 7, 8]
            first = await fleet.generate(prompt, GREEDY, session="one")
            longer = [*prompt, *first.token_ids.tolist()]
            second = await fleet.generate(longer, GREEDY, session="one")
            expect_versions(longer, second)
            assert second.cached_tokens >= len(longer) - 1
            assert second.seconds.request > 0

            going = [start_request(fleet, number, LONG) for number in range(4)]
            await until(lambda: all(pending.sent for pending in fleet.policy._pending))
            await asyncio.sleep(0.3)
            send_signal(pids_at(ports[0]), signal.SIGKILL)
            assert await expect_exact(going, LONG) == [{1}] * 4
            await until(lambda: any("it is restarted" in event for event in events))
        finally:
            await fleet.close()
