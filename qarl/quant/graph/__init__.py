"""The engine's own model as the learner's graph: vLLM's module tree without weights, whose leaves
have gradients.

`skeleton` builds the tree, `loading` says which tensors of the checkpoint each module takes,
`kinds` which modules have no leaf, `graph` puts the leaves in and runs it;
`quant.model.engine_model` has the way from a model of masters to it. Leaves: `operators` (norms,
rotary embeddings, gates, whatever vLLM calls a `CustomOp`), `attention`, `experts`, and the
products of `quant.layers`. What lies between them is vLLM's own Python over torch.
"""
