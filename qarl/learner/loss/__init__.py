"""Token log-probs → one number to descend, with corrections and KL."""
