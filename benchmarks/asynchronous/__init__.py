"""The benchmark of asynchronous training: what it gains to play groups while others are trained."""
