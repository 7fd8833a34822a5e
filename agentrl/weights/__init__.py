"""The transfer of weights: manifests, byte buckets, and the checksums that both ends compare."""

from agentrl.weights.checksum import checksum
from agentrl.weights.codec import NamedTensors, manifest_of, named_weights, pack_buckets, unpack
from agentrl.weights.delivery import deliver

__all__ = ["NamedTensors", "checksum", "deliver", "manifest_of", "named_weights", "pack_buckets", "unpack"]
