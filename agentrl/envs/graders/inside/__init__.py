"""Programs that graders start: each imports nothing of agentrl."""
