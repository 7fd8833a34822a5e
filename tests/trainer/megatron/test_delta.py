"""The gated delta rule over packed rows is its recurrence in float64, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, pad

from agentrl.losses import LossOutput
from agentrl.trainer.batch import micro_batches
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.delta import convolved_within, gated_delta_rule
from agentrl.trainer.megatron.model.rows import gathered_places, pieces_of
from agentrl.trainer.megatron.model.shape import shape_of
from tests.trainer.megatron.models import LINEAR, checkpoint_of, model_of
from tests.trainer.tiny import batch

GROUPS, TIMES, KEYS, VALUES = 2, 3, 5, 4


def recurrence(query, key, value, decay, beta):
    """The formula itself: [n, G, R, L, V]."""
    state = torch.zeros(*value.shape[:3], KEYS, VALUES, dtype=torch.float64)
    reads = []
    for t in range(value.shape[3]):
        q, k = query[:, :, :, t, :, None], key[:, :, :, t, :, None]
        state = decay[..., t, None, None].exp() * state
        error = value[..., t, :] - (k * state).sum(-2)
        state = state + k * (beta[..., t, None] * error)[..., None, :]
        reads.append((q * state).sum(-2))
    return torch.stack(reads, 3)


def inputs(length: int, forgets: float) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = [(1, length, KEYS), (1, length, KEYS), (TIMES, length, VALUES), (TIMES, length), (TIMES, length)]
    query, key, value, decay, beta = (
        torch.randn(2, GROUPS, *shape, generator=draw, dtype=torch.float64) for shape in shapes
    )
    key = key / key.norm(dim=-1, keepdim=True)
    return [x.requires_grad_() for x in (query, key, value, -forgets * decay.exp(), beta.sigmoid())]


# As long as a chunk, one token more or less, and several chunks.
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("forgets", [0.01, 20.0])
def test_chunks_give_what_the_recurrence_gives_and_its_gradient(length, forgets):
    given = [x.detach().requires_grad_() for x in inputs(length, forgets)]
    expected = recurrence(*given)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    of_expected = torch.autograd.grad((weight * expected).sum(), given)
    result = gated_delta_rule(*given)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)
    for gradient, other in zip(torch.autograd.grad((weight * result).sum(), given), of_expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-9)


def test_each_sequence_is_convolved_by_itself():
    lengths, taps, channels = (7, 1, 2, 9), 4, 6
    draw = torch.Generator().manual_seed(0)
    row = torch.randn(sum(lengths), channels, generator=draw, dtype=torch.float64)
    weight = torch.randn(channels, 1, taps, generator=draw, dtype=torch.float64)
    expected = [
        conv1d(pad(part.T, (taps - 1, 0))[None], weight, groups=channels)[0].T for part in row.split(lengths)
    ]
    torch.testing.assert_close(convolved_within(row, weight, lengths), torch.cat(expected))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_token_has_its_place_among_those_of_all_context_ranks(ranks):
    lengths = (12 * ranks, 2 * ranks, 4 * ranks)
    starts = np.cumsum((0, *lengths[:-1]))
    gathered = np.concatenate(
        [
            start + pieces_of(length, ranks, rank)
            for rank in range(ranks)
            for start, length in zip(starts, lengths, strict=True)
        ]
    )
    np.testing.assert_array_equal(gathered[gathered_places(lengths, ranks)], np.arange(sum(lengths)))


def distances(layout: MegatronConfig, _rank: int, kind: str) -> tuple[float, dict[str, float]]:
    """Runs in the only rank: how far a row of long sequences is from transformers.

    That of the sum of its logprobs, and that of each parameter's gradient, relative to its norm.
    """
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.passes import Passes

    model = model_of(kind)
    network = Network(shape_of(model.config), layout, bf16=False)
    network.load(checkpoint_of(model).__getitem__)
    # Two and three chunks, and less than one.
    samples = batch(masks=[[0] * 10 + [1] * (length - 10) for length in (150, 128, 20)]).samples
    masks = [sample.loss_mask for sample in samples]

    def loss(_row, outputs):
        return LossOutput(outputs.logp_N.sum(), {"loss": outputs.logp_N.sum().detach()})

    (report,) = Passes(network).learn(micro_batches(samples, masks, 1_000), loss)
    total = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        temperatures = torch.from_numpy(sample.temperatures[1:, None])
        logps = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperatures, -1)
        chosen = logps.gather(1, ids[1:, None])[:, 0]
        total = total + chosen[torch.from_numpy(sample.loss_mask[1:])].sum()
    total.backward()
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients, dims = checkpoint_of(model, own), network.shape.dims(1)
    far = {}
    for placed, parameter in network.pieces():
        expected = placed.rule.join([gradients[name] for name in placed.hf], dims)
        far[placed.megatron] = float((parameter.main_grad - expected).norm() / expected.norm())
    return abs(float(report["loss"]) / float(total.detach()) - 1), far


@pytest.mark.parametrize("kind", LINEAR)
def test_a_row_of_long_sequences_is_transformers(single, kind):
    layout = MegatronConfig(actor_num_gpus_per_node=1, use_distributed_optimizer=False)
    ((loss, gradients),) = single.run(distances, layout, kind)
    assert loss < 1e-5
    assert max(gradients.values()) < 1e-4, gradients
