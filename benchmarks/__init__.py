"""The project's own benchmarks: commands that print JSON, each compares its sides in one interleaved run."""
