"""The embedded engine in a process of its own has the same guarantees as in this process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agentrl.engine.conformance import CHECKS, ConformanceCheck, Subject
from agentrl.engine.embedded.messages import Begin, Open, Put
from agentrl.engine.embedded.process import EngineProcess, ProcessEngine
from agentrl.engine.embedded.sink import deliver
from agentrl.errors import EngineDiedError, EngineError, ModelLoadError, UserError
from agentrl.types.seams import Sampling
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.export import save_model
from tests.engine.across_updates import play_across_updates
from tests.engine.serving import save_tiny
from tests.engine.subjects import VOCAB, delivery_of, embedded_subject, logits_of, text_of, tiny
from tests.environ import environment_of


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[EngineProcess]:
    """The process of all tests that do not end it."""
    engine_process = EngineProcess(tmp_path_factory.mktemp("engine"))
    yield engine_process
    engine_process.end()
    assert not os.path.exists(f"/proc/{engine_process.pid}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    word_level = Tokenizer(models.WordLevel({text_of([i]): i for i in range(VOCAB)}, unk_token=text_of([0])))
    word_level.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("model") / "model"
    save_model(tiny("qwen3"), PreTrainedTokenizerFast(tokenizer_object=word_level), str(path))
    return path


def opened(folder: Path) -> Open:
    return Open(str(folder), 4, 64, False, 1, None)


async def subject_on(process: EngineProcess, folder: Path) -> Subject:
    engine = await ProcessEngine.opened(process, opened(folder))
    return replace(embedded_subject("qwen3"), engine=engine, sink=engine.sink)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_it_keeps_its_promise(check: ConformanceCheck, process: EngineProcess, folder: Path) -> None:
    subject = await subject_on(process, folder)
    await check.run(subject)
    await subject.engine.close()


async def test_every_logprob_is_the_trainers_at_the_version_of_its_token(
    process: EngineProcess, folder: Path
) -> None:
    engine = await ProcessEngine.opened(process, opened(folder)._replace(max_context_len=256))
    await play_across_updates(engine, 32)
    await engine.close()


async def test_it_samples_bit_for_bit_what_is_sampled_inline(process: EngineProcess, folder: Path) -> None:
    remote, local = await subject_on(process, folder), embedded_subject("qwen3")
    rules = [Sampling(12, temperature=t, seed=3) for t in (0.0, 0.7, 1.3)]
    for number, rule in enumerate(rules):
        a, b = await remote.sample(number, rule), await local.sample(number, rule)
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()
    await remote.engine.close()


async def test_in_bfloat16_its_logprobs_are_near_those_of_fp32_also_after_an_update(
    process: EngineProcess, folder: Path
) -> None:
    """The same tokens, scored in fp32 with the very weights that were opened, and that were sent in fp32."""
    engine = await ProcessEngine.opened(process, opened(folder)._replace(dtype="bfloat16"))
    sent, prompt = tiny("qwen3", 1), list(range(20))
    for version, model in enumerate((tiny("qwen3"), sent)):
        if version:
            await deliver([*named_weights(sent)], engine.sink, version)
        completion = await engine.generate(prompt, Sampling(40, seed=version), session=str(version))
        assert set(completion.versions.tolist()) == {version}
        ids = [*prompt, *(sampled := completion.token_ids.tolist())]
        rows = torch.from_numpy(logits_of(model, ids)[len(prompt) - 1 : -1]).log_softmax(-1)
        far = np.abs(completion.logprobs - rows[range(40), sampled].numpy())
        # bfloat16 has 8 bits: relative steps of 2^-8 in logits of about 10.
        assert 1e-4 < far.mean() < 0.1
        assert far.max() < 0.5
        # Probabilities in bfloat16 would be on its grid.
        grid = torch.from_numpy(completion.logprobs).exp().bfloat16().float().log().numpy()
        assert (np.abs(grid - completion.logprobs) > 1e-5).mean() > 0.5
    await engine.close()


async def test_released_memory_is_given_back_to_the_system(process: EngineProcess, tmp_path: Path) -> None:
    model = tiny("qwen3", hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    path = save_tiny(tmp_path / "model", model=model)
    engine = await ProcessEngine.opened(process, Open(str(path), 32, 256, False, 1, None))
    # The cache is in RAM where it is used.
    prompt = [1] * 250
    await asyncio.gather(*(engine.generate(prompt, Sampling(4), session=str(n)) for n in range(32)))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    cache = 4 * 2 * 32 * 2 * 257 * 16 * 4
    before = resident_bytes_of(process.pid)
    freed = await engine.release_memory(("weights", "kv_cache"))
    after = resident_bytes_of(process.pid)
    assert before - after > 0.9 * (weights + cache) > 6e6
    assert freed == pytest.approx(before - after, rel=0.05)
    held = asyncio.create_task(engine.generate([1], Sampling(1), session="held"))
    delivery = delivery_of(model)
    await engine.resume_memory(("weights",))
    async with engine.sink.begin(delivery.manifest, 1) as transaction:
        for bucket in delivery.buckets:
            await transaction.put(bucket)
        await transaction.commit(delivery.checksum)
    assert not held.done()
    await engine.resume_memory(("kv_cache",))
    assert (await held).versions.tolist() == [1]
    await engine.close()


def resident_bytes_of(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) * 1024


async def test_many_versions_arrive_intact_in_reused_memory(process: EngineProcess, folder: Path) -> None:
    subject, versions = await subject_on(process, folder), [tiny("qwen3", seed) for seed in range(4)]
    for version, model in enumerate(versions):
        delivery = delivery_of(model)
        assert subject.sink is not None
        async with subject.sink.begin(delivery.manifest, version) as transaction:
            for bucket in delivery.buckets:
                await transaction.put(bucket)
            await transaction.commit(delivery.checksum)
        checked = replace(subject, logits=lambda ids, _, model=model: logits_of(model, ids))
        from agentrl.engine.conformance.subject import expect_logprobs

        completion = await checked.engine.generate(
            checked.prompt(1), Sampling(12, seed=1), session=f"v{version}"
        )
        assert set(completion.versions.tolist()) == {version} == {subject.engine.version}
        expect_logprobs(checked, checked.prompt(1), completion, 1.0)
    await subject.engine.close()


async def test_it_sees_no_card_of_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    process = EngineProcess(tmp_path / "engine")
    try:
        environment = environment_of(process.pid)
    finally:
        process.end()
    assert [line for line in environment if line.startswith("CUDA")] == ["CUDA_VISIBLE_DEVICES="]


async def test_what_cannot_be_opened_is_a_sentence_and_the_process_goes_on(
    process: EngineProcess, folder: Path
) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        await ProcessEngine.opened(process, opened(folder / "nowhere"))
    subject = await subject_on(process, folder)
    assert len((await subject.sample(1, Sampling(2))).token_ids) == 2
    await subject.engine.close()
    with pytest.raises(EngineError, match="closed"):
        await subject.sample(1, Sampling(2))


async def test_answers_that_arrive_together_are_settled_a_few_in_each_turn_of_the_loop(
    process: EngineProcess, folder: Path
) -> None:
    subject, ended, most = await subject_on(process, folder), 0, 0

    async def refused(number: int) -> None:
        nonlocal ended
        with pytest.raises(EngineError, match="needs a prompt"):
            await subject.engine.generate([], Sampling(1), session=str(number))
        ended += 1

    tasks = [asyncio.create_task(refused(number)) for number in range(40)]
    while not all(task.done() for task in tasks):
        before = ended
        await asyncio.sleep(0)
        most = max(most, ended - before)
    assert ended == 40
    assert most <= 4
    await subject.engine.close()


async def test_the_loop_goes_on_while_it_decodes(process: EngineProcess, folder: Path) -> None:
    subject, ticks = await subject_on(process, folder), 0
    tasks = [asyncio.create_task(subject.sample(n, Sampling(57, seed=n))) for n in range(64)]
    began = time.monotonic()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks >= 0.2 * (time.monotonic() - began) / 0.005
    await subject.engine.close()


@pytest.mark.full
async def test_a_commit_that_nobody_waited_for_is_not_reported_as_lost(tmp_path: Path, folder: Path) -> None:
    process, reported = EngineProcess(tmp_path / "engine"), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    subject = await subject_on(process, folder)
    assert subject.sink is not None
    delivery = subject.delivery(1)
    async with subject.sink.begin(delivery.manifest, 1) as transaction:
        await transaction.put(delivery.buckets[0])
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            await transaction.commit(delivery.checksum)
    del transaction
    gc.collect()
    assert reported == []
    process.end()


@pytest.mark.full
async def test_the_thread_of_updates_ends_the_process_with_the_cause_of_its_failure(
    tmp_path: Path, folder: Path
) -> None:
    process = EngineProcess(tmp_path / "engine")
    subject = await subject_on(process, folder)
    delivery = subject.delivery(1)
    await process.call(Begin(tuple(delivery.manifest), 1))
    waiting = [asyncio.create_task(subject.sample(n, Sampling(57, seed=n))) for n in range(8)]
    sentence = r"the embedded engine \(process \d+\) .*RuntimeError: .*/1000000>.*; see .*engine\.log"
    with pytest.raises(EngineDiedError, match=sentence):
        await process.call(Put(delivery.buckets[0].tensors, os.getpid(), 1_000_000, 8))
    for task in waiting:
        with suppress(EngineDiedError):
            assert set((await task).versions.tolist()) == {0}
    assert "Traceback" in (tmp_path / "engine" / "engine.log").read_text()
    assert subject.engine.version == 0
    process.end()


async def test_a_process_that_dies_in_an_update_fails_every_pending_call(
    tmp_path: Path, folder: Path
) -> None:
    process = EngineProcess(tmp_path / "engine")
    subject = await subject_on(process, folder)
    assert subject.sink is not None
    delivery = subject.delivery(1)
    sentence = rf"the embedded engine \(process {process.pid}\) was ended by SIGKILL; see .*engine.log"
    async with subject.sink.begin(delivery.manifest, 1) as transaction:
        waiting = [asyncio.create_task(subject.sample(n, Sampling(57, seed=n))) for n in range(200)]
        await transaction.put(delivery.buckets[0])
        os.kill(process.pid, signal.SIGKILL)
        for task in waiting:
            with pytest.raises(EngineDiedError, match=sentence) as died:
                await task
        for call in (transaction.put(delivery.buckets[1]), transaction.commit(delivery.checksum)):
            with pytest.raises(EngineDiedError, match=sentence):
                await call
    # The error ends a run, instead of one episode after the other.
    assert isinstance(died.value, UserError)
    assert subject.engine.version == 0, "the version that never served is not reported"
    with pytest.raises(EngineDiedError, match=sentence):
        await subject.sample(1, Sampling(1))
    await subject.engine.close()
    process.end()
