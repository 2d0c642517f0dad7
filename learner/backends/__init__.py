"""How gradients of the masters become a step, in one process or several."""
