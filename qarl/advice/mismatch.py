"""Learner against sampler, without training: one policy's completions scored by several learners,
and layer by layer.

Axes: B sequences, T tokens, of which T-1 are predicted; n response tokens of all sequences.
"""

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from qarl.advice.finding import Finding
from qarl.advice.pitfalls import Evidence, find_pitfalls
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.run import LayerRule, RolloutConfig, RunConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.logprobs import token_logprobs
from qarl.learner.mismatch import measure_mismatch
from qarl.learner.processes import Processes
from qarl.ptq.export import initial_codes
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.kept_scales import start_from_codes
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.surgery import changed_logits
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.rollout.types import Group, Sampling
from qarl.run.policy import model_folder, open_policy
from qarl.run.prompts import Prompter, open_prompter, score_groups
from qarl.run.session import share_layers
from qarl.sync.export import export_checkpoint
from qarl.sync.publisher import Publisher
from qarl.tasks import Task


@dataclass(frozen=True)
class LearnerKind:
    """kernel, aligned, operators: as `LowBitModel` takes them."""

    kernel: str
    aligned: bool
    operators: str


FIRST = 8
"""Sequences that are scored alone."""

FLOOR = LearnerKind("reference", False, "transformers")
LEARNERS = {
    "plain": FLOOR,
    "fake-quant": LearnerKind("reference", True, "transformers"),
    "aligned": LearnerKind("auto", True, "auto"),
}


@contextmanager
def engine_of(
    model: LowBitModel, folder: Path, rollout: RolloutConfig, dtype: str
) -> Iterator[Engine]:
    """An engine on the model's present codes. folder: of its tokenizer and architecture."""
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        export_checkpoint(model, folder, checkpoint)
        with open_engine(checkpoint, rollout, dtype) as engine:
            yield engine


@torch.no_grad()
def scored(model: LowBitModel, batch: Batch) -> torch.Tensor:
    """A learner's log-probs of the responses, fp32 [B, T-1], on the CPU as the batch is."""
    tokens, mask = batch.tokens.to(model.device), batch.response_mask.to(model.device)
    return token_logprobs(model, tokens, mask, entropy=False)[0].cpu()


@dataclass(frozen=True)
class ScoredLearner:
    """sampler, learner: log-probs of the same tokens, [n]; lengths: tokens of each response, [B].
    measured: the fields of `learner.mismatch.Mismatch`.
    """

    name: str
    sampler: np.ndarray
    learner: np.ndarray
    lengths: np.ndarray
    measured: dict[str, float | None]


@dataclass(frozen=True)
class LayerDeviation:
    """What a layer makes of the input it has in an unquantized forward, relative L2 errors: scheme,
    of the codes' values against the master; kernel, of the aligned learner's product against those
    values.
    """

    layer: str
    scheme: float
    kernel: float


@dataclass(frozen=True)
class Investigation:
    """batch: sampled by the engine. learners: name → log-probs, fp32 [B, T-1]. layers: in the
    model's order. multiplies: what the aligned learner multiplied with, in words. pitfalls: that
    were found on the way.
    """

    batch: Batch
    learners: dict[str, torch.Tensor]
    layers: list[LayerDeviation]
    multiplies: str
    pitfalls: list[Finding]


def investigate(config: RunConfig, task: Task) -> Investigation:
    """Sample and score `rollout.samples` completions of `rollout.prompts` prompts of the
    configuration's task.
    """
    folder = model_folder(config.model)
    prompter = open_prompter(folder, config.rollout, config.task)
    masters = load_masters(folder, torch.float32, Processes().device)
    of_run = config.scheme, config.dtype
    cache = config.quantization.kv_cache
    models = {
        name: learner_over(masters, *of_run, kind, config.layers, cache)
        for name, kind in LEARNERS.items()
    }
    if config.quantization.init:
        codes = initial_codes(open_policy(config, task=task), config)
        for name in ("fake-quant", "aligned"):
            start_from_codes(models[name], codes, keep_masters=True)
    task = task.shortened(prompter.fits)
    problems = task.problems("train", 0, config.rollout.prompts, config.seed)
    prompts = [prompter.prompt(problem) for problem in problems]
    with ExitStack() as stack:
        engine = stack.enter_context(
            engine_of(models["aligned"], folder, config.rollout, config.dtype)
        )
        completions = engine.generate(prompts, Sampling.of(config.rollout, config.seed))
        groups = [
            group
            for group in score_groups(task, problems, prompts, completions)
            if group.completions
        ]
        if not groups:  # an environment's own reward comes with its last turn
            pairs = zip(prompts, completions, strict=True)
            groups = [
                Group(prompt, tuple(answers), (0.0,) * len(answers)) for prompt, answers in pairs
            ]
        batch = make_batch(groups, prompter.pad_token, config.learner.advantage)
        multiplies = share_layers(
            Publisher(models["aligned"], engine, (), bound=0.0, canary_every=1), stack
        )
        learners = {name: scored(model, batch) for name, model in models.items()}
        layers = layer_errors(models["plain"], models["fake-quant"], models["aligned"], batch)
        aligned = models["aligned"], learners["aligned"]
        pitfalls = find_pitfalls(evidence_of(*aligned, groups, batch, prompter, config.learner))
        rows = models["aligned"].check_rows()
        pitfalls.append(Finding("warning" if rows.dependent else "good", "self-test", str(rows)))
    return Investigation(
        batch=batch,
        learners=learners,
        layers=layers,
        multiplies=multiplies,
        pitfalls=pitfalls,
    )


@torch.no_grad()
def evidence_of(
    model: LowBitModel,
    logprobs: torch.Tensor,
    groups: Sequence[Group],
    batch: Batch,
    prompter: Prompter,
    config: LearnerConfig,
) -> Evidence:
    """What pitfalls are looked for in. model: the learner's, aligned; logprobs: its own of the
    batch, [B, T-1].
    """
    first = torch.arange(min(FIRST, len(batch.tokens)))
    alone = torch.zeros(len(first), batch.response_mask.shape[1])
    for row in first.tolist():
        of_row = scored(model, batch.rows(first[row : row + 1]))
        alone[row, : of_row.shape[1]] = of_row[0]
    packed = None
    if model.operators == "engine":
        rows = batch.to(model.device)
        packed = token_logprobs(
            model, rows.tokens, rows.response_mask, packed=rows.packed(), entropy=False
        )[0].cpu()
    tokenizer = prompter.tokenizer
    return Evidence(
        groups=groups,
        batch=batch,
        learner=logprobs,
        alone=alone,
        packed=packed,
        begin_token=tokenizer.bos_token_id,
        encode=lambda ids: tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"],
        masters=model.masters,
        config=config,
    )


def learner_over(
    masters: PreTrainedModel,
    scheme: str,
    dtype: str,
    kind: LearnerKind,
    rules: Sequence[LayerRule] = (),
    kv_cache: str | None = None,
) -> LowBitModel:
    """Over modules of its own and the very tensors of `masters`, which nothing here writes.
    kv_cache: the engine's, which a learner with the engine's operators alone reads: those are also
    for models that change their logits.
    """
    tensors = (*masters.parameters(), *masters.buffers())
    modules = copy.deepcopy(masters, {id(tensor): tensor for tensor in tensors})
    operators = "engine" if changed_logits(masters.config) else kind.operators
    read = None if operators == "transformers" else kv_cache
    context = LayerContext(COMPUTE_DTYPES[dtype], kind.kernel, kind.aligned, kv_cache=read)
    return LowBitModel(modules, get_scheme(scheme), context, operators, rules)


@torch.no_grad()
def layer_errors(
    plain: LowBitModel, dequantized: LowBitModel, aligned: LowBitModel, batch: Batch
) -> list[LayerDeviation]:
    """Over one forward of `plain`, whose layers' inputs the other two are given. plain: unaligned,
    with transformers' operators, which call each layer alone. dequantized: whose products are the
    codes' values.
    """
    sums: dict[str, list[float]] = {}

    def hook(name: str) -> Callable[..., None]:
        def compare(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            values, product = (model.multiplied(name, *inputs) for model in (dequantized, aligned))
            pairs = ((output, values), (values, product))
            squares = [_square(expected - actual) for expected, actual in pairs] + [
                _square(e) for e, _ in pairs
            ]
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * 4), squares, strict=True)]

        return compare

    layers = {**plain.linears, **plain.experts}
    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        scored(plain, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [
        LayerDeviation(layer=name, scheme=_ratio(scheme, output), kernel=_ratio(kernel, values))
        for name, (scheme, kernel, output, values) in sums.items()
    ]


def _square(values: torch.Tensor) -> float:
    return float(values.double().square().sum())


def _ratio(error: float, size: float) -> float:
    return (error / size) ** 0.5 if size else 0.0


def scored_learners(investigation: Investigation) -> list[ScoredLearner]:
    """As the page takes them."""
    batch = investigation.batch
    mask, sampler = batch.response_mask, batch.sampler_logprobs
    return [
        ScoredLearner(
            name=name,
            sampler=sampler[mask].numpy(),
            learner=logprobs[mask].numpy(),
            lengths=mask.sum(-1).numpy(),
            measured=dataclasses.asdict(
                measure_mismatch(logprobs, sampler, mask, batch.advantages, batch.ended)
            ),
        )
        for name, logprobs in investigation.learners.items()
    ]
