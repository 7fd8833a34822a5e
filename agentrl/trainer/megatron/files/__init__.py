"""Files: Hugging Face directories, and the saved state of a rank."""
