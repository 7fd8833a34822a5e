import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.attention import Ends, folds_of
from agentrl.trainer.torch.forward import Packing, segment_attention
from tests.trainer.tiny import VOCAB, llama, qwen3

CPU = torch.device("cpu")


def ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def packed_states(model, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(s) for s in sequences]
    with torch.no_grad(), segment_attention(model):
        return model.base_model(
            input_ids=torch.cat(sequences)[None],
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            use_cache=False,
            packing=Packing(Ends.of(lengths, CPU)),
        ).last_hidden_state[0]


@pytest.mark.parametrize("make", [qwen3, llama])
@pytest.mark.parametrize(
    "lengths", [[1], [9, 9, 9], [9, 8, 8], [40, 9, 8, 1, 1], [3, 11, 5], [1, 2, 3, 4]], ids=str
)
def test_a_row_gives_each_sequence_what_it_gets_alone(make, lengths):
    model = make()
    sequences = [ids(n, seed) for seed, n in enumerate(lengths)]
    with torch.no_grad():
        separate = [
            model.base_model(input_ids=s[None], use_cache=False).last_hidden_state[0] for s in sequences
        ]
    torch.testing.assert_close(packed_states(model, sequences), torch.cat(separate), rtol=1e-10, atol=1e-10)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.data())
def test_a_sequence_never_feels_its_neighbours(lengths, data):
    model = qwen3()
    sequences = [ids(n, seed) for seed, n in enumerate(lengths)]
    changed = data.draw(st.integers(0, len(lengths) - 1))
    before = packed_states(model, sequences).split(lengths)
    sequences[changed] = (sequences[changed] + 1) % VOCAB
    after = packed_states(model, sequences).split(lengths)
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a, b) == (index != changed)


@given(st.lists(st.integers(1, 60), max_size=20))
def test_folding_covers_the_row_once_and_wastes_little(lengths):
    folds = folds_of(tuple(sorted(lengths, reverse=True)), CPU)
    assert [fold.start for fold in folds] == [0, *(fold.stop for fold in folds)][: len(folds)]
    assert sum(fold.count for fold in folds) == len(lengths)
    assert sum(fold.stop - fold.start for fold in folds) == sum(lengths)
    assert sum(fold.count * fold.longest for fold in folds) <= 1.25 * sum(lengths)


def test_the_model_gets_its_own_attention_back_even_after_an_error():
    model = qwen3()
    before = model.config._attn_implementation
    with segment_attention(model):
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before
    with pytest.raises(AttributeError), segment_attention(model):
        model.base_model(input_ids=ids(3, 0)[None], packing=Packing("no ends at all"))
    assert model.config._attn_implementation == before
