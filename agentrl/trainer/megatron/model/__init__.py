"""A model as Megatron computes it: families, shapes, layers, rows, and what is said of tokens."""
