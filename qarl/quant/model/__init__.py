"""A transformers model whose layers multiply low-bit tensors."""
