"""One number for a set of named tensors: equal on both ends exactly when the same weights arrived."""

from __future__ import annotations

import hashlib
import zlib

from agentrl.weights.codec import NamedTensors, bytes_of, manifest_of


def checksum(named_tensors: NamedTensors) -> int:
    """64 bits over name, dtype, shape and bytes of every tensor, whatever their order.

    Each tensor's CRC-32 is hashed together with what the tensor is called before the digests
    are added up. CRCs alone are linear: two tensors of one shape could trade their contents
    without a trace.
    """
    total = 0
    for name, tensor in named_tensors:
        (spec,) = manifest_of([(name, tensor)])
        crc = zlib.crc32(bytes_of(tensor).data)
        told = f"{spec.name}\0{spec.dtype}\0{spec.shape}\0{crc}".encode()
        total += int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
    return total % 2**64
