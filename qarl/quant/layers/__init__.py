"""Low-bit layers with a straight-through backward, and the code they share."""
