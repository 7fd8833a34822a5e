"""The Megatron trainer against the torch trainer, side by side."""
