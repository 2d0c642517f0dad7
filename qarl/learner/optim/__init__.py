"""Masters and their optimizers: steps, rounding and loss scaling."""
