"""The public API of `import qarl`: a policy over low-bit tensors, its engine, and complete runs
(docs/reference/api.md).
"""
