"""Ways a stream of low-bit tensors can travel."""
