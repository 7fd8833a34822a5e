"""Processes that play groups: the driver sends prompts, and gets outcomes; requests go to the driver's engine."""
