"""Turning samples and credit into better weights. `torch/` is the reference; the config is torch-free."""
