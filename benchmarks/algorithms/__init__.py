"""`python -m benchmarks algorithms`: the gain of every estimator, and the cost of delayed weights."""
