"""A model as Megatron computes it: families, shapes, layers, rows, and outputs at tokens."""
