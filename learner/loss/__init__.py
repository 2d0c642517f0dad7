"""Token log-probs → one number to descend, with corrections, KL and remedies for clipping."""
