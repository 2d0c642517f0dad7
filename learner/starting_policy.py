"""The policy a run started with, by a few of its completions: what `diagnostics.start_distance` measures from.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import torch

from qarl.learner.batching import Batch

_KEPT = ("tokens", "length", "response_mask", "sampler_logprobs")


class StartingPolicy:
    """Of one run. started: whether there was an update, or one begins. sample: rows of the first batch whose sampler is
    the policy itself, its published codes before any update; None without measurements."""

    def __init__(self) -> None:
        self.started = False
        self.sample: Batch | None = None

    def begin(self, sample: Batch | None) -> None:
        """Before the run's first update."""
        self.started, self.sample = True, sample

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """The sample, for a checkpoint; empty without one, None before the first update."""
        if not self.started:
            return None
        return {} if self.sample is None else {name: getattr(self.sample, name) for name in _KEPT}

    def load_state_dict(self, state: dict[str, torch.Tensor] | None) -> None:
        """Take over a `state_dict`: a run that has begun without a sample stays without one."""
        self.started = state is not None
        self.sample = None
        if state:
            kept = {name: tensor.clone() for name, tensor in state.items()}
            group, advantages = torch.zeros_like(kept["length"]), torch.zeros_like(kept["sampler_logprobs"])
            self.sample = Batch(**kept, group=group, advantages=advantages)
