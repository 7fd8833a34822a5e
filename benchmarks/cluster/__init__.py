"""What Ray costs: calls of a trainer's rank, the hand-off of samples, new weights for servers."""
