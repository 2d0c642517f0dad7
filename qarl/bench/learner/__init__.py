"""`qarl bench learner`: a step's seconds and memory, per scheme and against TRL."""
