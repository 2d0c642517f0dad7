"""What `qarl mismatch` measured, as its page takes it. Axes: n response tokens of all sequences, B sequences."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ScoredLearner:
    """sampler, learner: log-probs of the same tokens, [n]; lengths: tokens of each response, [B]. measured: the fields
    of `learner.mismatch.Mismatch`."""

    name: str
    sampler: np.ndarray
    learner: np.ndarray
    lengths: np.ndarray
    measured: dict[str, float | None]


@dataclass(frozen=True)
class LayerDeviation:
    """What a layer makes of the input it has in an unquantized forward, relative L2 errors: scheme, of the codes'
    values against the master; kernel, of the aligned learner's product against those values."""

    layer: str
    scheme: float
    kernel: float
