"""What is on disk: Hugging Face directories, Megatron directories, and all that a trainer knows."""
