"""Sizes that bound the memory of the learner's backward, which `qarl plan` counts with too.

They stand apart from the code they bound, because a plan does not import torch.
"""

LARGEST_PRODUCT = 1 << 25
"""Upper bound on the elements of a weight gradient that CUDA holds at once beside the sum: 128 MiB.

The whole product of an output head would be gigabytes.
"""

GROUPED_TOKENS = 8192
"""Tokens whose experts go through one grouped backward on GPUs.

For each of them, as many rows of several widths are in memory as it has experts.
"""

GRADIENTS_IN_FLIGHT = 1 << 25
"""Number of gradient elements that may be in flight to other processes, in addition to the largest
gradient of one layer.
"""
