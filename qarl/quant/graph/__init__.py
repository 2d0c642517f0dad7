"""The engine's own model as the learner's graph.

It is vLLM's module tree without weights, whose leaves have gradients. `skeleton` builds the tree.
`loading` finds out which tensors of the checkpoint each module takes. `kinds` refuses modules for
which there is no leaf. `graph` installs the leaves and runs the model. `quant.model.engine_model`
connects a model of masters with it.

The leaves are `operators` (norms, rotary embeddings, gates, everything vLLM calls a `CustomOp`),
`attention`, `experts`, and the products of `quant.layers`. Everything between them is vLLM's own
Python over torch.
"""
