import hashlib
import zlib

import numpy as np
import pytest
import torch
import xxhash

from agentrl.weights.checksum import bucket_checksums, checksum, digest, sum_digests
from agentrl.weights.codec import manifest_of, pack_buckets
from agentrl.weights.delta import checksum_of

A = torch.arange(12, dtype=torch.float32).reshape(3, 4)
B = torch.arange(12, 24, dtype=torch.float32).reshape(3, 4)


def test_order_does_not_matter():
    assert checksum([("a", A), ("b", B)]) == checksum([("b", B), ("a", A)])


@pytest.mark.parametrize(
    "other",
    [
        [("a", B), ("b", A)],
        [("a", A)],
        [("a", A), ("b", B), ("c", A)],
        [("a", A), ("c", B)],
        [("a", A.reshape(4, 3)), ("b", B)],
        [("a", A.view(torch.int32)), ("b", B)],
        [("a", A + torch.eye(3, 4) * 1e-6), ("b", B)],
    ],
    ids=["traded contents", "missing", "extra", "renamed", "reshaped", "other dtype", "other bits"],
)
def test_every_difference_shows(other):
    assert checksum(other) != checksum([("a", A), ("b", B)])


def test_it_is_a_64_bit_number_that_reproduces():
    number = checksum([("a", A), ("b", B)])
    assert 0 <= number < 2**64
    assert number == checksum([("a", A.clone()), ("b", B.clone())])
    assert number == checksum([("a", A.T.contiguous().T), ("b", B)])


def test_large_tensors_among_small_ones_count_like_any_other():
    tensors = [
        (f"{n}", torch.arange(n, n + size)) for n, size in enumerate([3, 300_000, 5, *[200_000] * 9, 2])
    ]
    data = [np.frombuffer(tensor.numpy().tobytes(), dtype=np.uint8) for _, tensor in tensors]
    expected = sum_digests(map(digest, manifest_of(tensors), data))
    assert checksum(tensors) == checksum_of(pack_buckets(tensors, 4_000_000)) == expected


def test_bytes_are_hashed_by_xxh3_and_for_receivers_by_crc32():
    tensors = [("a", A), ("b", torch.arange(300_000)), ("c", torch.empty(0, 3))]
    identities = [f"{name}\0{str(t.dtype)[6:]}\0{tuple(t.shape)}\0{xxh3(t)}".encode() for name, t in tensors]
    digests = [
        int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") for identity in identities
    ]
    assert checksum(tensors) == sum(digests) % 2**64
    expected = {name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in tensors}
    assert bucket_checksums(pack_buckets(tensors, 1000)) == (expected, checksum(tensors))


def xxh3(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64(tensor.numpy().tobytes()).intdigest()
