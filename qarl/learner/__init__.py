"""Learning: groups of completions in, stepped master weights out."""
