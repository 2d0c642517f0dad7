"""Optimizers of the masters: steps, rounding and loss scaling."""
