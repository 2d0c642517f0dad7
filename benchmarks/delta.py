"""`python -m benchmarks delta`: codes and scales that a step changes, and bytes of its delta.

No model runs. The benchmark takes one decoder layer's matrices, two of its experts and 4,096 rows
of the embedding (and of the output head if it is untied). They get random normal weights with
standard deviation 0.02 and gradients of random tokens, are stepped as a run steps them, and are
materialized before and after. Sizes are added up over the whole model, each kind of matrix as often
as the model has it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, Qwen3Config

from benchmarks.models import MODELS
from benchmarks.publish import moe_config
from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.optim.parameter_optimizer import ParameterOptimizer
from qarl.quant.delta import VersionCache
from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.materialize.code_changes import changed_codes
from qarl.quant.schemes import get_scheme, is_integer
from qarl.quant.types import LowBitTensor
from qarl.report.tables import PlainTable

SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "150m": lambda: Qwen3Config(**MODELS["150m"].config),
    "1b-moe": lambda: moe_config(1e9),
}
STEPS = 8
"""Number of steps.

AdamW's first step moves every weight by the learning rate; later ones move less if gradients
differ.
"""

_SPREAD = 0.02
_TOKENS = 512
_ROWS = 4096
_EXPERTS = 2
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Change:
    """Change of a model's low-bit version by one step."""

    shape: str
    scheme: str
    scale: str
    optimizer: str
    lr: float
    step: int
    """Number of the step, from 1."""
    codes: float | None
    """Fraction of codes that change; None if the scheme has no codes."""
    scales: float | None
    """Fraction of scales that change; None if the scheme has no scales."""
    full_bytes: int
    """Bytes of the whole model's version."""
    delta_bytes: int
    """Bytes of the whole model's delta."""
    quantized_full_bytes: int
    """Bytes of the version's quantized matrices, without embedding and output head."""
    quantized_delta_bytes: int
    """Bytes of the delta's quantized matrices, without embedding and output head."""

    @property
    def share(self) -> float:
        """Bytes of the delta divided by those of the full version."""
        return self.delta_bytes / self.full_bytes

    @property
    def quantized_share(self) -> float:
        """Bytes of the delta divided by those of the full version, for quantized matrices alone."""
        return self.quantized_delta_bytes / self.quantized_full_bytes


@dataclass(frozen=True)
class Kind:
    """Matrix [rows, columns] that represents several equal ones of the model."""

    rows: int
    columns: int
    count: float
    """Number of the model's matrices that this one represents."""
    quantized: bool = True
    """Whether it is quantized.

    If not, it is published in the compute dtype and stepped by AdamW.
    """


def measure(
    shapes: Sequence[str],
    schemes: Sequence[str],
    optimizers: Sequence[str],
    rates: Sequence[float],
) -> list[Change]:
    """Return the first and the last of `STEPS` steps for every combination of the arguments.

    Scales are taken from every version's extremes and, if codes are integers, measured once more
    with the previous scales kept. Invalid values raise before anything is measured.
    """
    specs = [get_scheme(name) for name in schemes]
    configs = [
        OptimizerConfig.model_validate({"name": name, "lr": lr})
        for name in optimizers
        for lr in rates
    ]
    changes = []
    for shape in shapes:
        for config in configs:
            totals: dict[tuple[str, str, int], _Total] = {}
            for number, kind in enumerate(kinds(SHAPES[shape]())):
                for step, before, after in _stepped(kind, config, number):
                    for scheme in specs:
                        rules = (
                            ("minmax", "kept")
                            if scheme.weights and is_integer(scheme.weights)
                            else ("minmax",)
                        )
                        for rule in rules:
                            named = scheme.name if kind.quantized else "bf16"
                            total = totals.setdefault((scheme.name, rule, step), _Total())
                            total.add(kind, before, after, named, rule == "kept")
            changes += [
                total.change(shape, scheme, rule, config, step)
                for (scheme, rule, step), total in totals.items()
            ]
    return changes


def kinds(config: PretrainedConfig) -> list[Kind]:
    """Return the matrices of a Qwen3 or a Qwen3-MoE.

    Norms and routers are left out, because they are only thousandths of the model.
    """
    hidden = config.hidden_size
    layers = config.num_hidden_layers
    queries, values = (
        heads * config.head_dim
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    attention = [
        (queries, hidden),
        (values, hidden),
        (values, hidden),
        (hidden, queries),
    ]
    experts = getattr(config, "num_experts", None)
    width = config.moe_intermediate_size if experts else config.intermediate_size
    mlp = [(width, hidden), (width, hidden), (hidden, width)]
    sampled = _EXPERTS if experts else 1
    outside = config.vocab_size / _ROWS * (1 if config.tie_word_embeddings else 2)
    return [
        *(Kind(rows, columns, layers) for rows, columns in attention),
        *(
            Kind(rows, columns, layers * (experts or 1) / sampled)
            for rows, columns in mlp * sampled
        ),
        Kind(_ROWS, hidden, outside, quantized=False),
    ]


class _Total:
    """Sums over kinds of matrices, each counted as often as the model has it."""

    def __init__(self) -> None:
        self.codes = self.changed = self.scales = self.moved = 0.0
        self.full = {True: 0.0, False: 0.0}
        self.delta = {True: 0.0, False: 0.0}

    def add(
        self,
        kind: Kind,
        before: torch.Tensor,
        after: torch.Tensor,
        scheme: str,
        kept: bool,
    ) -> None:
        """Add one kind, given its masters before and after a step.

        kept: quantize the later master with the earlier one's scales.
        """
        old = materialize(before, get_scheme(scheme), _DTYPE)
        new = materialize(
            after,
            get_scheme(scheme),
            _DTYPE,
            scale=old.scale if kept and kind.quantized else None,
        )
        if old.scale is not None and new.scale is not None:
            self.codes += kind.count * kind.rows * kind.columns
            self.changed += kind.count * changed_codes(old.codes, new)
            self.scales += kind.count * old.scale.numel()
            self.moved += kind.count * int((old.scale != new.scale).sum())
        version = VersionCache(0, _stream(old))
        # a delta that changes nothing is its header, which the whole model's delta has only once
        header_bytes = len(version.make_delta(0, _stream(old)))
        delta_bytes = len(version.make_delta(0, _stream(new))) - header_bytes
        self.full[kind.quantized] += kind.count * version.bytes
        self.delta[kind.quantized] += kind.count * delta_bytes

    def change(
        self, shape: str, scheme: str, rule: str, config: OptimizerConfig, step: int
    ) -> Change:
        """Return the sums as a `Change` of this combination."""
        return Change(
            shape=shape,
            scheme=scheme,
            scale=rule,
            optimizer=config.name,
            lr=config.lr,
            step=step,
            codes=self.changed / self.codes if self.codes else None,
            scales=self.moved / self.scales if self.scales else None,
            full_bytes=round(sum(self.full.values())),
            delta_bytes=round(sum(self.delta.values())),
            quantized_full_bytes=round(self.full[True]),
            quantized_delta_bytes=round(self.delta[True]),
        )


def _stream(weight: LowBitWeight) -> Iterator[LowBitTensor]:
    """Yield the weight's tensors under a name of typical length."""
    return (
        LowBitTensor(f"model.layers.10.mlp.gate_proj.{suffix}", tensor)
        for suffix, tensor in weight.tensors()
    )


def _stepped(
    kind: Kind, config: OptimizerConfig, seed: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (step, master before, master after) for the first and the last of `STEPS`, fp32.

    A gradient is a sum of outer products over tokens. Some tokens weigh many times more than
    others, as they do under advantages.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    master = nn.Parameter(normal(kind.rows, kind.columns) * _SPREAD)
    muon = kind.quantized and config.name == "muon"
    stepped = ParameterOptimizer(
        master, [(slice(None), slice(None))] if muon else [], config, "nearest", None
    )
    for step in range(1, STEPS + 1):
        weights = normal(_TOKENS, 1).exp() * normal(_TOKENS, 1).sign()
        master.grad = (
            (normal(_TOKENS, kind.rows) * weights).T @ normal(_TOKENS, kind.columns) * 1e-4
        )
        wanted = step in (1, STEPS)
        before = master.detach().clone() if wanted else None
        stepped.step(config.lr)
        if before is not None:
            yield step, before, master.detach()


def table(changes: Sequence[Change]) -> PlainTable:
    """Return a table with one row for each combination; shares are in percent."""
    figures = ("lr", "step", "codes", "scales", "delta", "of full", "of the quantized")
    shown = PlainTable(
        "shape",
        "scheme",
        "scales are",
        "optimizer",
        *figures,
        figures=figures,
        title=(
            "What one step changes: codes and scales, and the delta's bytes against the full"
            " version's"
        ),
    )
    for row in changes:
        shown.add_row(
            row.shape,
            row.scheme,
            row.scale,
            row.optimizer,
            f"{row.lr:g}",
            str(row.step),
            _percent(row.codes),
            _percent(row.scales),
            f"{row.delta_bytes / 1e6:.2f} MB",
            _percent(row.share),
            _percent(row.quantized_share),
        )
    return shown


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.3%}"


def as_data(changes: Sequence[Change]) -> list[dict]:
    """Return the changes as JSON-ready dictionaries."""
    return [
        dataclasses.asdict(row) | {"share": row.share, "quantized_share": row.quantized_share}
        for row in changes
    ]
