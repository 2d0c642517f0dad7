"""What `import qarl` offers: a policy over low-bit tensors, its engine, and whole runs.
docs/reference/api.md
"""
