"""Developers' benchmarks: `python -m benchmarks NAME`, run from the checkout.

No module of the package imports this one.
"""
