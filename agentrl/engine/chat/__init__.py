"""An agent over any OpenAI-compatible chat endpoint: it plays with messages, without tokens."""
