"""Updates of the weights from samples and credit. `torch/` is the reference; the config imports no torch."""
