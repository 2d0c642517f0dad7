"""`python -m benchmarks train`: a whole training against TRL's, by the time to each accuracy."""
