"""`qarl bench launches`: kernels, waits and bytes of a learner step on a GPU, counted without one.

`tally`     counts what is called on tensors without values
`gpu`       what stands for a GPU and for vLLM's kernels
`measure`   the step, and the sum over a model's layers
"""
