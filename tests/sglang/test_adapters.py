"""Real SGLangs that take adapters alone: each version is one of theirs, and requests name it."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager

import httpx2
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agentrl.assembly.fleet import ServedAdapters
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.launch import ServerReplicas, Servers, ServerSettings
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER, plugin_folder
from agentrl.engine.sglang.transports.lora import LoraAdapters
from agentrl.errors import EngineError
from agentrl.records import reconcile
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch.adapters import adapt, adapter_weights
from agentrl.types.seams import Sampling
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import pack_buckets
from agentrl.weights.snapshot import LocalSnapshot
from tests.engine.fleets import PATIENT, pids_at, send_signal, until
from tests.engine.serving import save_tiny, sglang_python
from tests.engine.subjects import VOCAB, text_of, tiny
from tests.flow.runs import WARM, journal_of, metrics_of, train

pytestmark = pytest.mark.full

PROMPT = [1, 10, 20, 30]
GREEDY = Sampling(16, temperature=0.0)
LONG = Sampling(950, temperature=1.0)
KEEP = 2
CONFIG = TrainerConfig(lora_rank=4, lora_alpha=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # On the CPU SGLang pads layers of other widths, and the adapters' memory with them.
    network = tiny("qwen3", intermediate_size=64, max_position_embeddings=1024)
    return save_tiny(tmp_path_factory.mktemp("served") / "model", context_len=1024, model=network)


def learned(model, version):
    """The adapters of a version, as the trainer has them."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapt(network, CONFIG)
    generator = torch.Generator().manual_seed(version)
    for parameter in network.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.25, generator=generator)
    return [(name, tensor.detach()) for name, tensor in adapter_weights(network)]


@asynccontextmanager
async def adapter_fleet(folder, model, count, *, is_pinned):
    served = ServedAdapters(4, CONFIG.lora_scale, ["all"], KEEP, is_pinned)
    limits = {"max_running_requests": 4, "max_total_tokens": 4096, "context_length": 1024}
    settings = ServerSettings(
        model=model,
        log_folder=folder,
        device="cpu",
        arguments={"custom_weight_loader": [LOADER], **limits, **served.arguments(on_gpu=False)},
        python=sglang_python(),
        python_path=(LOADER_FOLDER, plugin_folder(folder / "plugin", adapters=True)),
    )
    async with Servers(ServerReplicas(settings, count=count)) as servers:
        policy = SGLangPolicy(
            servers.url,
            vocab_size=VOCAB,
            decode=text_of,
            resend_lost=True,
            attempts=10,
            adapters=served.choice,
        )
        transport = LoraAdapters(folder / "adapters", model=model, scale=served.scale, keep=KEEP)
        fleet = Fleet(servers.servers, servers.router, policy, transport, _nothing, PATIENT).watch()
        try:
            yield fleet
        finally:
            await fleet.close()


async def _nothing():
    pass


def snapshot_of(model, version):
    tensors = learned(model, version)
    return LocalSnapshot(list(pack_buckets(tensors, 4_000)), checksum(tensors))


async def publish(fleet, model, version):
    await fleet.sink.load(snapshot_of(model, version), version)


async def sampled_across(fleet, snapshot, version):
    """A request that runs while a version is published."""
    running = asyncio.create_task(fleet.generate(PROMPT, LONG, session="long"))
    await until(lambda: any(pending.sent for pending in fleet.policy._pending))
    await asyncio.sleep(0.2)
    await fleet.sink.load(snapshot, version)
    return await running


class Reference:
    """The logprobs by peft, of the folders that were written."""

    def __init__(self, folder, model):
        self.folder, self.model, self.networks = folder, model, {}

    def note(self, version):
        network = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        if version:
            (path,) = (self.folder / "adapters").glob(f"{version}.*")
            network = PeftModel.from_pretrained(network, path)
        self.networks[version] = network.eval()

    @torch.no_grad()
    def check(self, prompt, completion):
        ids = completion.token_ids.tolist()
        expected = np.zeros(len(ids))
        for version in set(completion.versions.tolist()):
            logits = self.networks[version](torch.tensor([[*prompt, *ids]])).logits[0]
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            row = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
            expected = np.where(completion.versions == version, row, expected)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


async def loaded(fleet):
    """The versions that each server has."""
    async with httpx2.AsyncClient() as client:
        replies = [(await client.get(f"{process.url}/v1/models")).json() for process in fleet.processes]
    names = [[model["id"] for model in reply["data"] if model.get("parent")] for reply in replies]
    return [sorted(int(name.partition(".")[0]) for name in each) for each in names]


async def expect_an_update_or_none(fleet, model):
    """A version that arrived damaged is not served, and a server that restarts has those that were."""
    damaged = LocalSnapshot(list(pack_buckets(learned(model, 9), 4_000)), 1)
    with pytest.raises(EngineError, match="held other adapters than were written"):
        await fleet.sink.load(damaged, 9)
    assert fleet.version == 8
    assert await loaded(fleet) == [[7, 8]] * 2

    send_signal(pids_at(fleet.processes[0].port), signal.SIGKILL)
    await until(lambda: fleet.incidents, 120)
    assert await loaded(fleet) == [[7, 8]] * 2


async def test_each_version_is_an_adapter_and_an_episode_ends_under_its_own(tmp_path, model):
    reference = Reference(tmp_path, model)
    async with adapter_fleet(tmp_path, model, 2, is_pinned=True) as fleet:
        for version in range(5):
            if version:
                await publish(fleet, model, version)
            reference.note(version)
            completions = await asyncio.gather(
                *(fleet.generate(PROMPT, GREEDY, session=f"{version}.{n}") for n in range(4))
            )
            for completion in completions:
                assert set(completion.versions.tolist()) == {version}
                reference.check(PROMPT, completion)
            assert await loaded(fleet) == [list(range(max(1, version - KEEP + 1), version + 1))] * 2
        # An episode of version 3 goes on under it; one of version 2, which is gone, under the last.
        for version, expected in ((4, 4), (3, 3), (2, 4), (0, 4)):
            completion = await fleet.generate([*PROMPT, 5], GREEDY, session=f"{version}.0")
            assert set(completion.versions.tolist()) == {expected}
            reference.check([*PROMPT, 5], completion)
        assert (fleet.version, fleet.incidents) == (4, [])
        await fleet.close_session("3.0")
        assert set((await fleet.generate(PROMPT, GREEDY, session="3.0")).versions.tolist()) == {4}

        # One that runs meanwhile ends under its version, too.
        completion = await sampled_across(fleet, snapshot_of(model, 5), 5)
        assert set(completion.versions.tolist()) == {4}
        assert fleet.policy.counts["resumed"] >= 1
        reference.check(PROMPT, completion)

        # Some of these wait when they are aborted.
        running = [
            asyncio.create_task(fleet.generate([*PROMPT, n], LONG, session=f"many {n}")) for n in range(20)
        ]
        await asyncio.sleep(0.7)
        for version in (6, 7, 8):
            await asyncio.wait_for(publish(fleet, model, version), 60)
        await fleet.abort()
        await asyncio.gather(*running)
        assert await loaded(fleet) == [[7, 8]] * 2

        await expect_an_update_or_none(fleet, model)


async def test_without_the_setting_a_request_goes_on_under_the_newest(tmp_path, model):
    reference = Reference(tmp_path, model)
    async with adapter_fleet(tmp_path, model, 1, is_pinned=False) as fleet:
        await publish(fleet, model, 1)
        reference.note(1)
        completion = await sampled_across(fleet, snapshot_of(model, 2), 2)
        reference.note(2)
        assert completion.versions[0] == 1
        assert completion.versions[-1] == 2
        assert sorted(set(completion.versions.tolist())) == [1, 2]
        reference.check(PROMPT, completion)


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    """A model whose layers SGLang does not pad on the CPU."""
    options = {"ffn_hidden_size": 128, "num_rollout": 0, **WARM}
    return train("Talkative", tmp_path_factory.mktemp("runs"), "warm", **options).folder / "checkpoint"


def versions_of(entry):
    turns = [turn for trajectory in entry["episode"]["trajectories"] for turn in trajectory["turns"]]
    return {version for turn in turns for version in turn["tokens"]["completion"]["versions"]}


@pytest.mark.parametrize("late", [{}, {"max_staleness": 1, "correction": "tis", "pin_policy_version": True}])
def test_a_run_publishes_its_adapters_alone(tmp_path, begin, late):
    served = {"engine": "sglang", "sglang_python": str(sglang_python()), "update_weights_transport": "lora"}
    # With a larger rate it may come to say always the same, which has no gradient and makes no version.
    adapters = {"lora_rank": 4, "lr": 1e-3, "num_rollout": 4, "eval_interval": 1000}
    run = train(
        "Talkative", tmp_path, "x", hf_checkpoint=str(begin), inline=False, **served, **adapters, **late
    )
    assert reconcile(run.folder).problems == ()
    rows = [row for row in metrics_of(run.folder) if "rollout/raw_reward" in row]
    versions = [versions_of(entry) for entry in journal_of(run.folder, "step_*")]
    assert all(len(each) == 1 for each in versions), "each episode has one policy"
    num_updates = sum(row["train/optimizer_steps"] > 0 for row in rows[: len(rows) - 1 - bool(late)])
    assert num_updates
    assert set.union(*versions) >= set(range(num_updates + 1))
    if not late:
        assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-3 for row in rows)
    files = {path.name for path in (run.folder / "checkpoint").iterdir()}
    assert "adapter_model.safetensors" in files
