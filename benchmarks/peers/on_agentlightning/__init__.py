"""Programs that run under the interpreter of agent-lightning."""
