"""The same suite over HTTP: on the embedded engine, and on a real SGLang, with and without its router."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from agentrl.engine.conformance import CHECKS, ConformanceCheck, EngineCaps, lack
from agentrl.engine.sglang import wire
from agentrl.types.seams import Sampling
from tests.engine.serving import (
    embedded_server,
    free_port,
    running,
    save_tiny,
    sglang_command,
    sglang_python,
)
from tests.engine.subjects import HTTP_CAPS, ROUTED_CAPS, SGLANG_CAPS, logits_of, remote_subject, tiny

CONTEXT_LEN = 256
SGLANG_CONTEXT_LEN = 2048
"""Longer, because SGLang finishes short requests before a test can end them."""
MAX_TOKENS = SGLANG_CONTEXT_LEN - 2
"""SGLang reserves two tokens of its context."""


def checked(caps: EngineCaps) -> list[ConformanceCheck]:
    return [check for check in CHECKS if lack(check, caps) is None]


async def keeps(check: ConformanceCheck, url: str, caps: EngineCaps, max_context_len: int) -> None:
    subject = remote_subject(url, caps, max_context_len)
    await check.run(subject)
    await subject.engine.close()


def test_missing_capabilities_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for name, caps in {"embedded over HTTP": HTTP_CAPS, "SGLang": SGLANG_CAPS}.items():
            lacks = [reason for check in CHECKS if (reason := lack(check, caps))]
            print(f"\n{name}:", *lacks, sep="\n  ")
    assert len(CHECKS) - len(checked(HTTP_CAPS)) == 6
    assert len(CHECKS) - len(checked(SGLANG_CAPS)) == 8


@pytest.mark.parametrize("check", checked(HTTP_CAPS), ids=lambda check: check.name)
async def test_the_embedded_engine_keeps_its_promise_over_http(check: ConformanceCheck) -> None:
    async with embedded_server(max_context_len=CONTEXT_LEN) as (url, engine):
        await keeps(check, url, HTTP_CAPS, CONTEXT_LEN)
        assert engine.num_requests == 0, "a request was left behind"


# It ends before other modules count the remaining processes.
@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sglang")
    port = free_port()
    model = save_tiny(folder / "model", context_len=SGLANG_CONTEXT_LEN)
    command = sglang_command(model, port, context_length=SGLANG_CONTEXT_LEN)
    with running(command, f"http://127.0.0.1:{port}", "/health_generate", folder / "server.log") as url:
        yield url


@pytest.fixture(scope="module")
def routed(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    with router(sglang, log) as url:
        yield url


def router(worker: str, log: Path):
    port, metrics = free_port(), free_port()
    command = [sglang_python(), "-m", "sglang_router.launch_router", "--worker-urls", worker]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    return running([*command, *flags], f"http://127.0.0.1:{port}", "/readiness", log)


@pytest.mark.full
@pytest.mark.parametrize("where", ["sglang", "routed"])
@pytest.mark.parametrize("check", checked(SGLANG_CAPS), ids=lambda check: check.name)
async def test_sglang_keeps_its_promise(
    check: ConformanceCheck, where: str, request: pytest.FixtureRequest
) -> None:
    worker, url = request.getfixturevalue("sglang"), request.getfixturevalue(where)
    assert httpx2.post(f"{worker}/flush_cache", trust_env=False).status_code == 200, (
        "requests were left behind"
    )
    await keeps(check, url, SGLANG_CAPS, MAX_TOKENS)


@pytest.mark.full
async def test_a_real_server_reports_the_version_of_new_weights(sglang: str, tmp_path: Path) -> None:
    rule, prompt = Sampling(24, temperature=0.0), [1, 10, 20, 30]
    subject = remote_subject(sglang, SGLANG_CAPS, MAX_TOKENS)
    before = await subject.engine.generate(prompt, rule, session="a")
    for seed, version in ((1, "7"), (0, "default")):
        update = {"model_path": str(save_tiny(tmp_path / version, seed)), "weight_version": version}
        response = httpx2.post(f"{sglang}/update_weights_from_disk", json=update, timeout=60, trust_env=False)
        assert response.json()["success"], response.text
        after = await subject.engine.generate(prompt, rule, session="a")
        assert set(after.versions.tolist()) == {wire.version_of(version)}
        assert subject.engine.version == wire.version_of(version)
        ids = [*prompt, *after.token_ids.tolist()]
        likeliest = logits_of(tiny("qwen3", seed), ids)[len(prompt) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == after.token_ids.tolist()
    assert after.token_ids.tolist() == before.token_ids.tolist()
    await subject.engine.close()


@pytest.mark.full
async def test_the_embedded_engine_serves_behind_the_router_of_sglang(tmp_path: Path) -> None:
    # As long as those of SGLang: an abort that comes through the router has to find them running.
    folder, port = save_tiny(tmp_path / "model", context_len=SGLANG_CONTEXT_LEN), free_port()
    flags = ["--port", str(port), "--max-slots", "4", "--max-context-len", str(SGLANG_CONTEXT_LEN)]
    command = [Path(sys.executable).parent / "agentrl", "serve", folder, *flags]
    address = f"http://127.0.0.1:{port}"
    with (
        running(command, address, "/health_generate", tmp_path / "server.log") as worker,
        router(worker, tmp_path / "router.log") as url,
    ):
        for check in checked(ROUTED_CAPS):
            await keeps(check, url, ROUTED_CAPS, SGLANG_CONTEXT_LEN)
