"""The weights on their way: byte buckets, checksums that both ends compare, deltas, model directories."""
