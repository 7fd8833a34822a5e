"""Weights in transit: what is sent, how it is laid out in bytes, how both ends know it arrived."""

from agentrl.weights.checksum import checksum
from agentrl.weights.codec import NamedTensors, manifest_of, named_weights, pack_buckets, unpack
from agentrl.weights.delivery import deliver

__all__ = ["NamedTensors", "checksum", "deliver", "manifest_of", "named_weights", "pack_buckets", "unpack"]
