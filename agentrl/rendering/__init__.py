"""Messages to tokens and back: one renderer for each dialect, over any Hugging Face tokenizer."""
