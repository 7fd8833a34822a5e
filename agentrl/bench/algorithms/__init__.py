"""`agentrl bench algorithms`: what every estimator gains, and what late weights cost."""
