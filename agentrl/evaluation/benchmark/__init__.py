"""Benchmarks of agents: many environments, many policies, one table; they resume, and can be compared."""
