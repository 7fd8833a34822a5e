"""`python -m benchmarks algorithms`: what every estimator gains, and what late weights cost."""
