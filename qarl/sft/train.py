"""Supervised fine-tuning of the low-bit policy: cross-entropy through the codes that are deployed.

    pairs → −log p of the completions' tokens, by the learner's forward
          → straight-through gradients → masters → codes

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qarl.configs.schema.run import RunConfig
from qarl.configs.seeds import step_seed
from qarl.learner.batching import Batch, make_batch
from qarl.learner.gradient_gate import require_gradients
from qarl.learner.learner import Learner
from qarl.learner.load_balance import load_balance_coefficient, load_balance_loss
from qarl.learner.processes import Processes
from qarl.learner.row_logprobs import RowLogprobs
from qarl.rollout.types import Group
from qarl.run.policy import Architecture, load_model


@dataclass(frozen=True)
class SftStep:
    """One update, a line of metrics.jsonl."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean −log p of the batch's completion tokens before the update, nats."""
    tokens: int
    """Number of completion tokens, with end tokens."""
    lr: float
    """Learning rate."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    updated: bool
    """Whether the masters were updated. They are not if the gradient is not finite."""
    seconds: float
    """Wall time of the step."""


def open_learner(config: RunConfig, architecture: Architecture) -> Learner:
    """Return a learner over a model's masters in the configuration's schemes.

    It is in this process, without an engine. Raises what `load_model` does, and `GraphError` if no
    gradient reaches a master.
    """
    model = load_model(config, architecture, config.learner, Processes())
    if model.operators == "engine":
        require_gradients(model, Processes())
    return Learner(model, config.learner, seed=config.seed, steps=config.steps)


def batch_rows(
    step: int,
    size: int,
    pairs: int,
    epochs: int | None,
    seed: int,
) -> list[int]:
    """Return which pairs a step learns from, `size` of them.

    Each epoch has all pairs in a new order, by the seed. A step may take the end of one epoch and
    the beginning of the next.

    Args:
        step: training step, from 0.
        epochs: number of passes after which no pair is left, so the last step has fewer. None:
            unlimited.
    """
    end = (step + 1) * size if epochs is None else min((step + 1) * size, epochs * pairs)
    # Positions in the sequence of all epochs' pairs.
    positions = torch.arange(step * size, end)
    epoch_of_position = positions // pairs
    rows = []
    for epoch in epoch_of_position.unique().tolist():
        generator = torch.Generator().manual_seed(step_seed(seed, epoch))
        order = torch.randperm(pairs, generator=generator)
        rows += order[positions[epoch_of_position == epoch] % pairs].tolist()
    return rows


def pairs_batch(pairs: Sequence[Group], pad_token: int) -> Batch:
    """Return pairs as one batch [B, T].

    The response mask has the completions' tokens, with end tokens.
    """
    return make_batch(pairs, pad_token, advantage="dr_grpo")


def mean_loss(learner: Learner, batch: Batch) -> float:
    """Return the mean −log p of the batch's completion tokens under the present codes, in nats.

    Nothing is changed. Raises `PrecisionError` if a log-prob is not finite.
    """
    rows = RowLogprobs(batch)
    learner.scorer.fill(rows, torch.arange(len(batch.tokens)), learner.model)
    return _mean(rows)


def update(learner: Learner, batch: Batch, step: int) -> SftStep:
    """Take one optimizer step on a batch's mean −log p, and materialize its weight version.

    The loss is a mean over the tokens of the whole batch, so micro-batches change nothing but the
    order of sums. With `learner.router_aux_loss` the routers' load-balance loss is added for the
    gradient. Raises `PrecisionError` if a log-prob is not finite, before anything is changed.

    step: training step, from 0; it decides the learning rate.
    """
    start = time.perf_counter()
    rows = RowLogprobs(batch)
    lr = learner.schedule.rate(step)
    learner.optimizer.lr = lr
    accumulate_gradients(learner, batch, rows)
    result = learner.optimizer.step()
    if result.taken:
        learner.model.refresh()
    learner.loss_scale.update(result.taken)
    return SftStep(
        step=step + 1,
        loss=_mean(rows),
        tokens=int(batch.response_mask.sum()),
        lr=lr,
        grad_norm=result.norm,
        updated=result.taken,
        seconds=time.perf_counter() - start,
    )


def accumulate_gradients(learner: Learner, batch: Batch, rows: RowLogprobs) -> None:
    """Add the gradient of the batch's mean −log p to the masters', times the loss scale.

    It is computed micro-batch by micro-batch. Raises `PrecisionError` if a log-prob is not finite.

    rows: receives the log-probs.
    """
    model = learner.model
    scorer = learner.scorer
    scale = learner.loss_scale.scale
    balance = load_balance_coefficient(model, learner.config.router_aux_loss)
    model.gradients.scale_by(scale)
    tokens = int(batch.response_mask.sum())
    index = torch.arange(len(batch.tokens))
    parts = list(scorer.micro_batches(batch, index))
    for part in parts:
        micro = batch.rows(part.index).to(model.device)
        logprobs, entropies = scorer.token_logprobs(model, micro, part.chunks, entropy=False)
        rows.write(part.index, logprobs.detach(), entropies)
        loss = -logprobs.sum() / tokens
        if balance:
            auxiliary = load_balance_loss(model, micro.real(), scorer.packed_rows(micro))
            loss = loss + balance * len(part.index) / len(index) * auxiliary
        if part is parts[-1] and learner.config.gradient_checkpointing is not True:
            # No forward needs this version's kernels again: the step makes the next version.
            model.release_kernels()
        learner.optimizer.backward(loss * scale, part is parts[-1])
    scorer.all_reduce(rows, index, model)


def _mean(rows: RowLogprobs) -> float:
    """Return the mean −log p of a batch's response tokens."""
    return -float(rows.values.double().sum()) / int(rows.batch.response_mask.sum())
