"""`qarl bench speed`: what the engine and a whole training step gain by each scheme, and what is left to gain."""
