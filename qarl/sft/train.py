"""Supervised fine-tuning of the low-bit policy: cross-entropy through the codes that are deployed.

    pairs → −log p of the completions' tokens, by the learner's forward → straight-through gradients
    → masters → codes

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
from qarl.run.session import load_model, model_folder


@dataclass(frozen=True)
class SftStep:
    """One update, a line of metrics.jsonl. step: from 1. loss: before the update, mean over the
    batch's completion tokens, nats. tokens: of the completions, end tokens included. lr: learning
    rate. grad_norm: global L2 norm before clipping. updated: false where the gradient was not
    finite, and the masters stayed as they were. seconds: wall time.
    """

    step: int
    loss: float
    tokens: int
    lr: float
    grad_norm: float
    updated: bool
    seconds: float


def open_learner(config: RunConfig) -> Learner:
    """Return a learner over the configuration's masters in its schemes, in this process, without an
    engine.

    Raises what `load_model` does, and `GraphError` where no gradient reaches a master.
    """
    model = load_model(config, model_folder(config.model), config.learner, Processes())
    if model.operators == "engine":
        require_gradients(model, Processes())
    return Learner(model, config.learner, seed=config.seed, steps=config.steps)


def batch_rows(step: int, size: int, pairs: int, epochs: int | None, seed: int) -> list[int]:
    """Return which pairs a step learns from, `size` of them.

    Each epoch has all pairs in a new order, by the seed; a step may take the end of one and the
    beginning of the next. step: from 0. epochs: after so many no pair is left, so that the last
    step has fewer; None: they never end.
    """
    end = (step + 1) * size if epochs is None else min((step + 1) * size, epochs * pairs)
    places = torch.arange(step * size, end)
    rows = []
    for epoch in places.div(pairs, rounding_mode="floor").unique().tolist():
        generator = torch.Generator().manual_seed(step_seed(seed, epoch))
        order = torch.randperm(pairs, generator=generator)
        rows += order[places[places // pairs == epoch] % pairs].tolist()
    return rows


def pairs_batch(pairs: Sequence[Group], pad_token: int) -> Batch:
    """Return pairs as one batch [B, T]; the response mask has the completions' tokens, end tokens
    included.
    """
    return make_batch(pairs, pad_token, advantage="dr_grpo")


def mean_loss(learner: Learner, batch: Batch) -> float:
    """Return the mean −log p of the batch's completion tokens under the present codes, in nats.
    Nothing is changed.

    Raises `PrecisionError` where a log-prob is not finite.
    """
    rows = RowLogprobs(batch)
    learner.scorer.add(rows, learner.model, torch.arange(len(batch.tokens)))
    return _mean(rows)


def update(learner: Learner, batch: Batch, step: int) -> SftStep:
    """Take one optimizer step on a batch's mean −log p, and make the weight version of it.

    step: of the training, from 0; it decides the learning rate. The loss is a mean over the tokens
    of the whole batch, so that micro-batches change nothing but the order of sums. With
    `learner.router_aux_loss` the routers' load-balance loss is added for the gradient. Raises
    `PrecisionError` where a log-prob is not finite, before anything is changed.
    """
    began = time.perf_counter()
    rows = RowLogprobs(batch)
    lr = learner.schedule.rate(step)
    learner.sharded.optimizer.lr = lr
    accumulate_gradients(learner, batch, rows)
    done = learner.sharded.step()
    if done.taken:
        learner.model.refresh()
    learner.loss_scale.update(done.taken)
    return SftStep(
        step=step + 1,
        loss=_mean(rows),
        tokens=int(batch.response_mask.sum()),
        lr=lr,
        grad_norm=done.norm,
        updated=done.taken,
        seconds=time.perf_counter() - began,
    )


def accumulate_gradients(learner: Learner, batch: Batch, rows: RowLogprobs) -> None:
    """Add the gradient of the batch's mean −log p to the masters', times the loss scale,
    micro-batch by micro-batch.

    rows: takes the log-probs. Raises `PrecisionError` where one is not finite.
    """
    model = learner.model
    scorer = learner.scorer
    scale = learner.loss_scale.scale
    balance = load_balance_coefficient(model, learner.config.router_aux_loss)
    model.gradients.scale_by(scale)
    tokens = int(batch.response_mask.sum())
    index = torch.arange(len(batch.tokens))
    parts = list(scorer.share(batch, index))
    for part in parts:
        own_rows = batch.rows(part.index).to(model.device)
        logprobs, entropies = scorer.token_logprobs(model, own_rows, part.chunks, entropy=False)
        rows.add(part.index, logprobs.detach(), entropies)
        loss = -logprobs.sum() / tokens
        if balance:
            of_rows = load_balance_loss(model, own_rows.real(), scorer.packed_rows(own_rows))
            loss = loss + balance * len(part.index) / len(index) * of_rows
        if part is parts[-1] and learner.config.gradient_checkpointing is not True:
            # as the learner does it: the step makes another version
            model.release_products()
        (loss * scale).backward()
    scorer.complete(rows, model, index)


def _mean(rows: RowLogprobs) -> float:
    return -float(rows.values.double().sum()) / int(rows.batch.response_mask.sum())
