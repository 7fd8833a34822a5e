"""Megatron-Core: models from Hugging Face directories, spread over ranks in every layout."""
