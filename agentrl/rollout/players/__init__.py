"""Processes that play groups: prompts go there, outcomes come back; requests go to the driver's engine."""
