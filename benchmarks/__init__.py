"""The project's own benchmarks: commands that print JSON, each comparing things side by side in one run."""
