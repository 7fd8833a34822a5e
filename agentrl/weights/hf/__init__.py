"""Hugging Face model directories: reading, random initialization, atomic writes."""
