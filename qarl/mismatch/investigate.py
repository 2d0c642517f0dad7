"""The mismatch of learner and sampler, measured without training.

Several learners score the completions of one policy, and each layer is compared by itself.

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

from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.schema.run import LayerRule, RunConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.logprobs import token_logprobs
from qarl.learner.mismatch import measure_mismatch
from qarl.learner.optim.loss_scale import require_finite_scores
from qarl.learner.processes import Processes
from qarl.mismatch.pitfalls import Evidence, find_pitfalls
from qarl.ptq.export import initial_codes
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.kept_scales import start_from_codes
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.operator_check import check_operators
from qarl.quant.model.surgery import changed_logits
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.report.finding import Finding
from qarl.rollout.engine import SamplingEngine
from qarl.rollout.open import open_engine
from qarl.rollout.types import Group, Sampling
from qarl.run.policy import RunInputs, open_policy
from qarl.run.prompts import Prompter, score_groups
from qarl.run.session import share_layers
from qarl.sync.export import export_checkpoint
from qarl.sync.publisher import Publisher


@dataclass(frozen=True)
class LearnerKind:
    """A way to compute a learner's log-probs, by the arguments of `LowBitModel`."""

    kernel: str
    """Kernel family of linear layers and experts."""

    aligned: bool
    """Whether codes are multiplied, or masters in the compute dtype."""

    operators: str
    """Operators between these layers: "engine", "transformers" or "auto"."""


FIRST = 8
"""Number of sequences that are also scored alone."""
_PART = 1 << 22
"""Elements of an output that are compared at a time, in float64."""

FLOOR = LearnerKind("reference", False, "transformers")
"""A learner that multiplies masters, with transformers' operators."""

LEARNERS = {
    "plain": FLOOR,
    "fake-quant": LearnerKind("reference", True, "transformers"),
    "aligned": LearnerKind("auto", True, "auto"),
}
"""The learners that are compared, by name."""


@contextmanager
def engine_of(
    model: LowBitModel, folder: Path, rollout: RolloutConfig, dtype: str
) -> Iterator[SamplingEngine]:
    """Start an engine on the model's present codes.

    folder: model folder that has tokenizer and architecture.
    """
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        export_checkpoint(model, folder, checkpoint)
        with open_engine(checkpoint, rollout, dtype) as engine:
            yield engine


@torch.no_grad()
def scored(model: LowBitModel, batch: Batch) -> torch.Tensor:
    """Return a learner's log-probs of the responses, fp32 [B, T-1], on the CPU."""
    tokens = batch.tokens.to(model.device)
    mask = batch.response_mask.to(model.device)
    logprobs = token_logprobs(model, tokens, mask, entropy=False)[0].cpu()
    what = "a learner on the sampled tokens"
    require_finite_scores(logprobs, mask.cpu(), what, model.context.forward_dtype)
    return logprobs


@dataclass(frozen=True)
class ScoredLearner:
    """The log-probs that one learner gives the sampler's tokens."""

    name: str
    """Name in `LEARNERS`."""

    sampler: np.ndarray
    """The sampler's log-probs, [n]."""

    learner: np.ndarray
    """The learner's log-probs of the same tokens, [n]."""

    lengths: np.ndarray
    """Number of tokens of each response, [B]."""

    measured: dict[str, float | None]
    """Fields of `learner.mismatch.Mismatch`, by name."""


@dataclass(frozen=True)
class LayerDeviation:
    """Relative L2 errors of a layer's output, given its input in an unquantized forward."""

    layer: str
    """Checkpoint name of the layer."""

    scheme: float
    """Error of multiplying with the values that the codes stand for, against the master."""

    kernel: float
    """Error of the aligned learner's product, against a product with those values."""


@dataclass(frozen=True)
class Investigation:
    """The measurements of one batch."""

    batch: Batch
    """The batch that the engine sampled."""

    learners: dict[str, torch.Tensor]
    """Name of a learner → its log-probs, fp32 [B, T-1]."""

    layers: list[LayerDeviation]
    """Errors of the layers, in the model's order."""

    multiplies: str
    """The kernels that the aligned learner multiplied with, in words."""

    pitfalls: list[Finding]
    """Pitfalls that the batch shows, and the self-tests of kernels and operators."""


def investigate(config: RunConfig, inputs: RunInputs) -> Investigation:
    """Sample `rollout.samples` completions of `rollout.prompts` prompts, and score them.

    inputs: what the checks of the configuration returned.
    """
    folder = inputs.folder
    prompter = inputs.prompter
    task = inputs.task
    masters = load_masters(folder, torch.float32, Processes().device)
    cache = config.quantization.kv_cache
    models = {
        name: learner_over(masters, config.scheme, config.dtype, kind, config.layers, cache)
        for name, kind in LEARNERS.items()
    }
    if config.quantization.init:
        codes = initial_codes(open_policy(config, inputs=inputs), config)
        for name in ("fake-quant", "aligned"):
            start_from_codes(models[name], codes, keep_masters=True)
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
        # An environment gives its reward with the last turn, so that no completion has one here.
        if not groups:
            pairs = zip(prompts, completions, strict=True)
            groups = [
                Group(prompt, tuple(answers), (0.0,) * len(answers)) for prompt, answers in pairs
            ]
        batch = make_batch(groups, prompter.pad_token, config.learner.advantage)
        aligned = models["aligned"]
        publisher = Publisher(aligned, engine, (), bound=0.0, canary_every=1)
        multiplies = share_layers(publisher, stack)
        learners = {name: scored(model, batch) for name, model in models.items()}
        layers = layer_errors(models["plain"], models["fake-quant"], aligned, batch)
        logprobs = learners["aligned"]
        evidence = evidence_of(aligned, logprobs, groups, batch, prompter, config.learner)
        pitfalls = find_pitfalls(evidence)
        rows = aligned.check_rows()
        pitfalls.append(Finding("warning" if rows.dependent else "good", "self-test", str(rows)))
        sampled = zip(batch.tokens.tolist(), batch.length.tolist(), strict=True)
        operators = check_operators(aligned, [tokens[:length] for tokens, length in sampled])
        if operators is not None:
            level = "warning" if operators.wrong or operators.unknown else "good"
            pitfalls.append(Finding(level, "operators", str(operators)))
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
    """Measure the batch as the checks of pitfalls need it.

    model: the aligned learner's. logprobs: its log-probs of the batch, fp32 [B, T-1].
    """
    first = torch.arange(min(FIRST, len(batch.tokens)))
    alone = torch.zeros(len(first), batch.response_mask.shape[1])
    for row in first.tolist():
        row_logprobs = scored(model, batch.rows(first[row : row + 1]))
        alone[row, : row_logprobs.shape[1]] = row_logprobs[0]
    packed = None
    if model.operators == "engine":
        rows = batch.to(model.device)
        packed = token_logprobs(
            model, rows.tokens, rows.response_mask, packed=rows.packed(), entropy=False
        )[0].cpu()
    tokenizer = prompter.tokenizer

    def encode(ids: Sequence[int]) -> Sequence[int]:
        return tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]

    return Evidence(
        groups=groups,
        batch=batch,
        learner=logprobs,
        alone=alone,
        packed=packed,
        begin_token=tokenizer.bos_token_id,
        encode=encode,
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
    """Build a learner on the tensors of `masters`, which it shares and never writes.

    The learner has modules of its own. A model that changes its logits gets the engine's operators
    whatever `kind` says.

    kv_cache: dtype of the engine's KV cache, which learners with the engine's operators read alike.
    """
    # Deep-copying with a memo of the tensors copies the modules alone.
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
    """Compare each layer's output in one forward of `plain`; the others get the same inputs.

    plain: an unaligned learner with transformers' operators, which call each layer by itself.
    dequantized: a learner that multiplies with the values that the codes stand for.
    """
    # Name → sums of squares: scheme's error, kernel's error, plain output, dequantized output.
    sums: dict[str, list[float]] = {}

    def hook(name: str) -> Callable[..., None]:
        def compare(
            module: Any,
            inputs: tuple[torch.Tensor, ...],
            output: torch.Tensor,
        ) -> None:
            values = dequantized.multiplied(name, *inputs)
            aligned_output = aligned.multiplied(name, *inputs)
            squares = [
                _square(output - values),
                _square(values - aligned_output),
                _square(output),
                _square(values),
            ]
            before = sums.get(name, [0.0] * 4)
            sums[name] = [a + b for a, b in zip(before, squares, strict=True)]

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
    """Return the sum of squares in float64, part by part, because output heads are wide."""
    return sum(float(part.double().square().sum()) for part in values.flatten().split(_PART))


def _ratio(error: float, size: float) -> float:
    return (error / size) ** 0.5 if size else 0.0


def scored_learners(investigation: Investigation) -> list[ScoredLearner]:
    """Return each learner's log-probs and mismatch as arrays, which the page draws."""
    batch = investigation.batch
    mask = batch.response_mask
    sampler = batch.sampler_logprobs
    learners = []
    for name, logprobs in investigation.learners.items():
        mismatch = measure_mismatch(logprobs, sampler, mask, batch.advantages, batch.ended)
        learners.append(
            ScoredLearner(
                name=name,
                sampler=sampler[mask].numpy(),
                learner=logprobs[mask].numpy(),
                lengths=mask.sum(-1).numpy(),
                measured=dataclasses.asdict(mismatch),
            )
        )
    return learners
