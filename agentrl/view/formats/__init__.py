"""Episodes of a journal in the formats of other tools, and back (`agentrl export`, `agentrl import`).

A module a format, each from an episode to what its format holds of it; `table` lists them. `reading` goes the
other way, from files of others to a journal.
"""
