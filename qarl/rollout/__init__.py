"""Sampling: prompts in, completions with fp32 log-probs out.

The engine is a real one, and takes published tensors while it runs.
"""
