"""Playing with somebody else's model: an agent over any OpenAI-compatible chat endpoint, without tokens."""
