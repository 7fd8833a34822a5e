import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, named_weights, non_finite, pack_buckets, unpack, views

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def tensors(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [
        (f"layer.{i}", torch.randint(0, 2, shape, generator=generator).to(dtype))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


@settings(deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=8
    ),
    max_bytes=st.integers(1, 200),
)
def test_any_tensors_survive_any_bucket_size(kinds, max_bytes):
    sent = tensors([shape for shape, _ in kinds], [dtype for _, dtype in kinds])
    buckets = list(pack_buckets(sent, max_bytes))

    arrived = [pair for bucket in buckets for pair in unpack(bucket)]
    assert [name for name, _ in arrived] == [name for name, _ in sent]
    for (_, before), (_, after) in zip(sent, arrived, strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert torch.equal(after, before)
    assert checksum(arrived) == checksum(sent)
    assert [spec for bucket in buckets for spec in bucket.tensors] == list(manifest_of(sent))
    assert all(bucket.data.size <= max_bytes or len(bucket.tensors) == 1 for bucket in buckets)
    assert all(bucket.data.dtype == np.uint8 for bucket in buckets)


def test_buckets_are_filled_before_a_new_one_is_begun():
    sent = tensors([(4,)] * 5, [torch.float32] * 5)
    assert [len(bucket.tensors) for bucket in pack_buckets(sent, 32)] == [2, 2, 1]


def test_bf16_bits_are_kept_even_where_they_spell_nan():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    (bucket,) = pack_buckets([("w", bits.view(torch.bfloat16))], 2**20)
    ((_, arrived),) = unpack(bucket)
    assert arrived.dtype == torch.bfloat16
    assert torch.equal(arrived.view(torch.int16), bits)


def test_transposed_tensors_travel_in_reading_order():
    tensor = torch.arange(6.0).reshape(2, 3).T
    ((_, arrived),) = unpack(next(pack_buckets([("w", tensor)], 100)))
    assert torch.equal(arrived, tensor)


def test_manifest_speaks_torch():
    sent = [("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.tensor(1.0))]
    assert manifest_of(sent) == (TensorSpec("a", (2, 3), "bfloat16"), TensorSpec("b", (), "float32"))


def test_arrived_tensors_do_not_share_memory_with_the_bucket():
    bucket = next(pack_buckets([("w", torch.zeros(3))], 100))
    ((_, arrived),) = unpack(bucket)
    bucket.data[:] = 255
    assert torch.equal(arrived, torch.zeros(3))


@settings(deadline=None)
@given(kinds=st.lists(st.sampled_from(DTYPES), max_size=6), writeable=st.booleans())
def test_views_hold_what_copies_do(kinds, writeable):
    sent = tensors([(3, n % 2) for n in range(len(kinds))], kinds)
    for bucket in pack_buckets(sent, 2**20):
        bucket.data.flags.writeable = writeable
        for (name, viewed), (_, copied) in zip(views(bucket), unpack(bucket), strict=True):
            assert (name, viewed.dtype, viewed.shape) == (name, copied.dtype, copied.shape)
            assert torch.equal(viewed, copied)


def test_views_share_memory_where_it_is_aligned():
    sent = [("a", torch.zeros(3)), ("odd", torch.zeros(1, dtype=torch.int8)), ("b", torch.zeros(3))]
    (bucket,) = pack_buckets(sent, 100)
    viewed = dict(views(bucket))
    bucket.data[:] = 255
    assert viewed["a"].isnan().all()
    assert torch.equal(viewed["b"], torch.zeros(3))


@pytest.mark.parametrize(
    "bucket",
    [
        Bucket((TensorSpec("w", (3,), "float32"),), np.zeros(11, np.uint8)),
        Bucket((TensorSpec("w", (3,), "float32"),), np.zeros(13, np.uint8)),
        Bucket((TensorSpec("w", (3,), "Tensor"),), np.zeros(12, np.uint8)),
    ],
)
def test_a_bucket_that_does_not_add_up_is_refused(bucket):
    with pytest.raises(ValueError, match=r"bytes|dtype"):
        list(unpack(bucket))


def test_bucket_size_must_be_positive():
    with pytest.raises(ValueError, match="max_bytes"):
        list(pack_buckets([("w", torch.zeros(3))], 0))


def test_tied_weights_are_sent_once_under_the_first_name():
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    assert [name for name, _ in named_weights(module)] == ["0.weight", "1.weight"]
    module[1].weight = module[0].weight
    assert [name for name, _ in named_weights(module)] == ["0.weight"]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
)
def test_a_tensor_with_a_number_that_is_not_finite_is_named(poison, dtype):
    sound = [("a", torch.ones(3, 5).to(dtype)), ("empty", torch.ones(0)), ("whole", torch.arange(4))]
    assert non_finite(sound) is None
    for place in (0, 7, 14):
        values = torch.linspace(-1, 1, 15)
        values[place] = poison
        assert (
            non_finite([*sound, ("b.weight", values.view(3, 5).to(dtype)), ("c", torch.ones(1))])
            == "b.weight"
        )
