"""`python -m benchmarks megatron`: the Megatron trainer against the torch trainer."""
