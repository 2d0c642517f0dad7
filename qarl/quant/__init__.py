"""Low-bit tensors: which layers, which codes and scales, and how they multiply."""
