"""The bytes that one process of a run sends to the others, computed from the model's sizes and the
configuration alone.

A process sends (n - 1) / n of what n processes gather or reduce by scattering, and twice that in an
all-reduce: no algorithm needs fewer. `learner.optim.sharded` says what is sent, and
tests/learner/test_two_processes.py compares these sums with what two processes send.
"""

import math
from dataclasses import dataclass

from qarl.configs.schema.run import RunConfig
from qarl.planning.memory import Count
from qarl.planning.shapes import ITEMSIZE, Shapes

_FP32 = 4
_BF16 = 2


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends; all are 0 in a run of one process."""

    gradients: int = 0
    """Gradients, in each micro-batch."""

    forward_gathers: int = 0
    """Codes gathered for products that are not kept, in each micro-batch's forward."""

    backward_gathers: int = 0
    """The same in its backward, with layers that are computed again and the codes of gradients."""

    update: int = 0
    """In each update: gradients that are summed once, and Muon's updates or DeepSpeed's masters."""

    version: int = 0
    """Codes and compute-dtype copies of one weight version."""

    def step(self, micro_batches: int, updates: int) -> int:
        """Return the bytes of a step in which the process computes that many micro-batches."""
        return micro_batches * self.micro_batch + updates * (self.update + self.version)

    @property
    def gathers(self) -> int:
        """Bytes of all codes gathered in a micro-batch; 0 with `learner.keep_codes`."""
        return self.forward_gathers + self.backward_gathers

    @property
    def micro_batch(self) -> int:
        """Bytes sent in a micro-batch."""
        return self.gradients + self.gathers


def count_traffic(shapes: Shapes, config: RunConfig, device: str, processes: int) -> Traffic:
    """Compute what one process sends; the arguments are those of `memory.count_memory`."""
    count = Count(shapes, config, device, processes)
    if processes == 1:
        return Traffic()
    ring = (processes - 1) / processes
    if count.deepspeed is not None:
        return _by_deepspeed(count, ring)
    learner = config.learner
    gradients = 0
    update = 0.0
    if count.adapters:
        # Every process has all factors, and sums their gradients after the backward.
        update += 2 * ring * _FP32 * count.adapters
    else:
        # A tied head sends its gradient beside the embedding's.
        sent = shapes.parameters + (shapes.head if shapes.tied else 0)
        gradients = int(ring * ITEMSIZE[learner.reduce_dtype] * sent)
    if learner.optimizer.name == "muon" and not count.adapters:
        # Rows go to the process that orthogonalizes their matrix, and come back. Of experts each
        # process has whole matrices.
        matrices = shapes.attention if shapes.experts else shapes.quantized
        update += 2 * ring * _BF16 * matrices / processes
    if count.base_shares == 1:  # every process has the masters that codes are made of
        return Traffic(gradients=gradients, update=int(update))
    casts = 0 if learner.aligned else shapes.parameters * count.batch.itemsize
    version = int(ring * (count.low_bit + count.outside + casts))
    forward = backward = 0
    if learner.aligned and not learner.keep_codes:
        # The head is multiplied a chunk of tokens at a time, and gathered for each.
        chunks = math.ceil(count.batch.tokens / learner.logprob_chunk_tokens)
        head = chunks * shapes.head * count.batch.itemsize
        forward = 0 if learner.keep_kernel_layout else int(ring * (count.low_bit + head))
        again = forward and learner.gradient_checkpointing is True
        uses = 2 if again else 1
        backward = int(ring * (uses * count.low_bit + head))
    return Traffic(
        gradients=gradients,
        forward_gathers=forward,
        backward_gathers=backward,
        update=int(update),
        version=version,
    )


def _by_deepspeed(count: Count, ring: float) -> Traffic:
    """Return what DeepSpeed sends: gradients by all-reduce, and the masters that it stepped.

    Stage 2 reduces for each micro-batch, stage 1 once an update. Codes are made of whole masters.
    """
    assert count.deepspeed is not None
    masters = count.trained * _FP32
    reduced = int(2 * ring * masters)
    stepped = int(ring * masters)
    if count.deepspeed.stage == 2:
        return Traffic(gradients=reduced, update=stepped)
    return Traffic(update=reduced + stepped)
