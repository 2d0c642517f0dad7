"""Sampling: prompts in, completions with fp32 log-probs out, from a real engine that takes
published tensors.
"""
