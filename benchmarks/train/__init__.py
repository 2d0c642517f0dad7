"""`python -m benchmarks train`: a complete training against TRL's, by the time to each accuracy."""
