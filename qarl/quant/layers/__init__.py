"""Low-bit layers with a straight-through backward, and what they share."""
