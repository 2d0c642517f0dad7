"""`python -m benchmarks speed`: what engine and training step gain by each scheme, and what is left to gain."""
