"""What rests holds no memory, and wakes up as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.losses import ValueLoss
from agentrl.trainer import offload
from agentrl.trainer.offload import NetworkMemory, Offloadable
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch import AuxiliaryModels, worker
from agentrl.trainer.torch.critic import Critic, critic_over
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, qwen3, settings, trainer

PINNED_BYTES = 64


@pytest.fixture(autouse=True)
def small_pinned_buffers(monkeypatch):
    monkeypatch.setattr(offload, "PINNED_BYTES", PINNED_BYTES)


def drawn(*sizes):
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=generator) for size in sizes]


def held(tensors):
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def buffer_ids(sleeper):
    return {id(buffer) for buffer in sleeper._pinned}


def test_what_rests_holds_nothing_and_wakes_up_as_it_was():
    tensors, gradients = drawn(1, 16, 17, 100, 0), drawn(30)
    parts = [*tensors, tensors[3][:50], tensors[3][50:].view(5, 10)]
    expected = [tensor.clone() for tensor in parts]
    sleeper = Offloadable(lambda: parts, lambda: gradients)
    sleeper.offload()
    assert held([*parts, *gradients]) == [0] * 8
    ids = buffer_ids(sleeper)
    # One after the other, each once, and no gradients.
    assert len(ids) == -(-sum(4 * len(tensor) for tensor in tensors) // PINNED_BYTES)
    for change in (0.0, 1.0):
        with sleeper.onloaded():
            torch.testing.assert_close(parts, expected, atol=0, rtol=0)
            assert held(gradients) == [4 * 30]
            gradients[0].zero_()
            for tensor in (*tensors, *expected[:5]):
                tensor.add_(change)
            expected[5:] = [expected[3][:50], expected[3][50:].view(5, 10)]
    assert buffer_ids(sleeper) == ids
    with sleeper.onloaded():
        torch.testing.assert_close(parts, expected, atol=0, rtol=0)


def test_it_grows_with_what_an_optimizer_adds():
    tensors = drawn(16)
    sleeper = Offloadable(lambda: tensors)
    sleeper.offload()
    with sleeper.onloaded():
        tensors += drawn(3, 40)
        expected = [tensor.clone() for tensor in tensors]
    assert held(tensors) == [0, 0, 0]
    with sleeper.onloaded():
        torch.testing.assert_close(tensors, expected, atol=0, rtol=0)


def test_an_error_puts_it_to_rest_too():
    tensors = drawn(16)
    expected = tensors[0].clone()
    sleeper = Offloadable(lambda: tensors)
    sleeper.offload()
    with pytest.raises(RuntimeError, match="halfway"), sleeper.onloaded():
        raise RuntimeError("halfway")
    assert held(tensors) == [0]
    with sleeper.onloaded():
        assert torch.equal(tensors[0], expected)


def test_parameters_are_onloaded_alone_and_a_block_leaves_what_is_there():
    parameters, gradients = drawn(10, 6), drawn(20)
    # An optimizer in fp32 has the parameters themselves, and its moments.
    moments = drawn(1, 2, 3)
    main = [parameters[0].view(2, 5), *moments]
    expected = [tensor.clone() for tensor in (*parameters, *moments)]
    memory = NetworkMemory(lambda: parameters, lambda: main, lambda: gradients)
    for _ in range(2):
        with memory.onloaded():
            assert held([*parameters, *moments, *gradients]) == [40, 24, 4, 8, 12, 80]
        memory.offload()
        assert held([*parameters, *main, *gradients]) == [0] * 7
        with memory.parameters_onloaded():
            torch.testing.assert_close(parameters, expected[:2], atol=0, rtol=0)
            assert held([*moments, *gradients]) == [0] * 4
        with memory.onloaded():
            torch.testing.assert_close([*parameters, *moments], expected, atol=0, rtol=0)
        assert held([*parameters, *moments, *gradients]) == [0] * 6
        memory.onload()
        torch.testing.assert_close([*parameters, *moments], expected, atol=0, rtol=0)


async def test_a_torch_trainer_whose_networks_were_offloaded_trains_bit_for_bit_as_one_whose_were_not(
    monkeypatch, tmp_path
):
    batch_, weights = with_returns(batch()), []
    for offloads in (False, True):
        # As on a GPU: the CPU has no other memory to offload to.
        monkeypatch.setattr(worker, "has_own_memory", lambda device, offloads=offloads: offloads)
        critic = Critic(critic_over(qwen3(torch.float32)), Learning(ValueLoss(), settings(), 9))
        models = AuxiliaryModels(critic, ref=qwen3(torch.float32))
        model = qwen3(torch.float32)
        trained = trainer(model, auxiliary=models)
        for _ in range(2):
            assert await trained.onload() is None
            scores = await trained.score(batch_.samples, ("old", "ref", "values"))
            await trained.update(replace(batch_, scores=scores))
            await trained.offload()
            sizes = held([*model.parameters(), *models.ref.parameters(), *critic.network.parameters()])
            assert any(sizes) is not offloads
        # Every other call onloads what it needs.
        await (await trained.save_state(str(tmp_path / f"{offloads}")))
        await trained.load_state(str(tmp_path / f"{offloads}"))
        assert any(held(model.parameters())) is not offloads
        engine = EmbeddedEngine.from_model(qwen3(torch.float32), max_slots=1)
        # The engine compares checksums.
        await trained.publish(engine.sink, version=1)
        await trained.save(str(tmp_path / "model"))
        weights.append(load_file(tmp_path / "model" / "model.safetensors"))
        await engine.close()
    torch.testing.assert_close(*weights, atol=0, rtol=0)
