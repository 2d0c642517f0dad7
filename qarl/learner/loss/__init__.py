"""The loss of token log-probs, with corrections for the mismatch and a KL penalty."""
