"""`qarl mismatch`: how far learners of several kinds are from the sampler, and why.

- `investigate`: samples, scores the samples by each learner, and perturbs layers one by one.
- `pitfalls`: settings known to widen the difference, looked for in what was measured.
- `page`: the page of both.
"""
