"""`python -m benchmarks learner`: a step's seconds and memory, per scheme and against TRL."""
