"""Hugging Face model directories: opened, drawn at random, written whole or not at all."""
