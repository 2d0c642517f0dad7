"""What one process learns of `batch_of()`, with which several processes are compared."""

import functools
from typing import Any

import torch

from qarl.learner.learner import Learner
from tests.support.learners import batch_numbers, batch_of, make_learner, masters_of

ADAMW = {"lr": 1e-4, "name": "adamw"}
LEARNER: dict[str, Any] = {
    "mini_batches": 2,
    "micro_batch_tokens": 30,
    # several a micro-batch, of other counts in the other process
    "logprob_chunk_tokens": 8,
    "optimizer": ADAMW,
}
MUON: dict[str, Any] = {**LEARNER, "optimizer": {"lr": 1e-4, "name": "muon"}}


def plain(
    batches: int,
    learner: dict[str, Any] = LEARNER,
) -> tuple[Learner, list[list[float]]]:
    """Learn some batches in one process.

    Return the learner and each batch's numbers in the order in which the worker writes them.
    """
    found = make_learner("bf16", torch.float32, **learner)
    stats = [found.learn(batch_of(), step=step) for step in range(batches)]
    return found, [batch_numbers(each) for each in stats]


@functools.cache
def trained(
    batches: int, muon: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[list[float]]]:
    """Return masters, optimizer state and numbers of `plain`.

    They are trained once for all tests, which only read them.
    """
    learner, numbers = plain(batches, MUON if muon else LEARNER)
    return masters_of(learner), learner.state_dict()["moments"], numbers
