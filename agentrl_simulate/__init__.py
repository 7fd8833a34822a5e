"""Simulated runs: how many engines and trainers a run needs, and the speed under a staleness policy."""
