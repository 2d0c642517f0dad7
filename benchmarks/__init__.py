"""What developers measure: `python -m benchmarks NAME`, from the checkout. Nothing in the package
imports this.
"""
