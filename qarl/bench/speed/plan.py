"""`qarl bench speed --plan MODEL --gpus 8xH100`: a training step predicted from shapes and rates. Nothing is run.

Each GPU samples its share of the prompts with an engine of its own, which holds the whole low-bit policy, and learns
from its share of the batch; masters, gradients and moments are shared out (ZeRO-3), gradients reduced and codes
gathered once an update. That is QaRL's layout (docs/processes.md). Everything is the roofline of its bytes and
operations at the cluster's rates, plus kernel launches; waiting, imbalance and communication's overlap are left out.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qarl.bench.speed.figures import kept
from qarl.bench.speed.job import PHASES
from qarl.bench.speed.rates import Assumptions, Cluster, parse_cluster, why_not_on
from qarl.bench.speed.roofline import Work, decode_work, prefill_work, product_kind
from qarl.configs.errors import ConfigError
from qarl.plan.model import sizes_of
from qarl.plan.shapes import EMBEDDED, NAMED, Shapes
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES, Scheme, SchemeError, get_scheme

_ADAMW_PASSES = 7
"""Master, gradient and two moments read; master and moments written."""

_MUON_PASSES = 5
"""Master, gradient and momentum read; master and momentum written."""

_NEWTON_SCHULZ_STEPS = 5
_MOST_SEQUENCES = 256
"""rollout.max_num_seqs."""


@dataclass(frozen=True)
class PlanOptions:
    """model: a name of `NAMED`, of an embedded policy, a folder or a hub id whose config.json is at hand. gpus: such as
    8xH100. rates: a record to take rates from, or None. schemes: none for all that run there. prompts, samples,
    prompt_tokens, tokens: of a step, tokens of each completion. updates: optimizer steps a batch."""

    model: str
    gpus: str
    rates: str | None
    schemes: tuple[str, ...]
    dtype: str
    prompts: int
    samples: int
    prompt_tokens: int
    tokens: int
    updates: int
    optimizer: str


@dataclass(frozen=True)
class PlanRow:
    """A predicted step. kind: of `KINDS`. phases: seconds. of_bf16: of the step's seconds. kept, over_plain: as
    `StepRow` has them, None where there is no such figure. decode: tokens a second of one GPU. memory: bytes a GPU
    holds but for activations and the key/value cache, of which one token takes cache_a_token bytes."""

    scheme: str
    kind: str
    phases: dict[str, float]
    of_bf16: float
    kept: float | None
    over_plain: float | None
    decode: float
    memory: float
    cache_a_token: int

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class Plan:
    """skipped: scheme → why vLLM would not run it there."""

    options: PlanOptions
    shapes: Shapes
    cluster: Cluster
    assumed: Assumptions
    skipped: dict[str, str]
    rows: list[PlanRow]


def plan(options: PlanOptions) -> Plan:
    """Predict. Raises `ConfigError`, `ModelError` or `SchemeError` for what cannot be: a model, a cluster, a scheme."""
    assumed = Assumptions()
    cluster, shapes = parse_cluster(options.gpus, options.rates, assumed), model_shapes(options.model)
    if options.prompts % cluster.count:
        raise ConfigError(f"--prompts {options.prompts} cannot be dealt to {cluster.count} GPUs, as many to each")
    skipped, step = {}, _Step(options, shapes, cluster, assumed)
    rows = step.rows("bf16", ("bf16",), [])
    for name in options.schemes or SCHEMES:
        scheme = get_scheme(name)
        reason = why_not_on(scheme, cluster.gpu) or _misfit(scheme, shapes)
        if reason and options.schemes:
            raise SchemeError(f"scheme {name!r} cannot be planned on {cluster.name}: {reason}")
        if reason:
            skipped[name] = reason
        elif name != "bf16":
            rows += step.rows(name, ("plain", "qarl"), rows)
    return Plan(options, shapes, cluster, assumed, skipped=skipped, rows=rows)


def model_shapes(model: str) -> Shapes:
    """Of a name in `NAMED`, an embedded policy, a folder or a hub id. Raises `ConfigError` or `ModelError`."""
    if "/" not in model and model.lower() not in (*NAMED, *EMBEDDED) and not Path(model).expanduser().exists():
        raise ConfigError(
            f"--plan {model!r} is neither a folder, nor an embedded policy ({', '.join(EMBEDDED)}), nor a published "
            f"size: {', '.join(NAMED)}"
        )
    return sizes_of(model)[0]


def _misfit(scheme: Scheme, shapes: Shapes) -> str:
    try:
        for shape in (*shapes.attention_matrices, *shapes.mlp_matrices):
            scheme.check_layer("of the model", shape)
    except SchemeError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _Step:
    """One step on one cluster. N tokens of prompts and completions are learned from, R of them sampled, a GPU."""

    options: PlanOptions
    shapes: Shapes
    cluster: Cluster
    assumed: Assumptions

    @property
    def dtype(self) -> torch.dtype:
        return COMPUTE_DTYPES[self.options.dtype]

    @property
    def sequences(self) -> int:
        return self.options.prompts * self.options.samples // self.cluster.count

    def rows(self, name: str, kinds: tuple[str, ...], before: list[PlanRow]) -> list[PlanRow]:
        """before: the rows so far; the first is bf16's."""
        rows: list[PlanRow] = []
        for kind in kinds:
            scheme = get_scheme(name)
            phases = self.phases(scheme, kind)
            bf16 = before[0].phases if before else phases
            total, whole = sum(phases.values()), sum(bf16.values())
            plain = sum(rows[0].phases.values()) if kind == "qarl" else None
            rows.append(
                PlanRow(
                    scheme=name,
                    kind=kind,
                    phases=phases,
                    of_bf16=total / whole,
                    kept=kept(phases["sample"], total - phases["sample"], whole - bf16["sample"]) if before else None,
                    over_plain=None if plain is None else total / plain - 1,
                    decode=self.options.tokens * self.sequences / phases["sample"],
                    memory=self.memory(scheme),
                    cache_a_token=self.shapes.key_value_bytes(self.dtype.itemsize),
                )
            )
        return rows

    def phases(self, scheme: Scheme, kind: str) -> dict[str, float]:
        """Seconds; old where more than one update is taken of a batch."""
        forward, updates = self.forward(scheme, kind), self.options.updates
        codes = self.shapes.checkpoint_bytes(scheme.name, self.dtype.itemsize)
        seconds = {
            "sample": self.sample(scheme),
            "old": forward if updates > 1 else 0.0,
            "forward": forward,
            "backward": self.backward(),
            "optimizer": updates * self.optimizer(),
            "materialize": (updates if kind != "plain" else 1) * self.materialize(codes),
            "publish": self.moving(2 * codes) + 2 * codes / self.assumed.hash_rate,
        }
        return {phase: seconds.get(phase, 0.0) for phase in PHASES}

    def sample(self, scheme: Scheme) -> float:
        """Prefill of each prompt once (its samples share it), then a decoding step a token, in as many waves as the
        engine's most sequences at once make."""
        o, launches = self.options, self.assumed.launches_a_layer * self.shapes.layers * self.assumed.launch_seconds
        prompts = o.prompts // self.cluster.count
        read = prefill_work(self.shapes, scheme, self.dtype, prompts, o.prompt_tokens).seconds(self.cluster.machine)
        waves = -(-self.sequences // _MOST_SEQUENCES)
        batch = -(-self.sequences // waves)
        work = decode_work(self.shapes, scheme, self.dtype, batch, o.prompt_tokens + o.tokens / 2)
        return read + waves * o.tokens * max(work.seconds(self.cluster.machine), launches)

    def products(self) -> float:
        """Operations of one product of every quantized matrix with every token."""
        return 2.0 * self.shapes.active * self.sequences * (self.options.prompt_tokens + self.options.tokens)

    def others(self) -> float:
        """Operations of attention, routers, and the output head over completions, which stay in the compute dtype."""
        s, length = self.shapes, self.options.prompt_tokens + self.options.tokens
        attention = 4 * length * (length + 1) / 2 * s.layers * s.heads * s.head_dim
        return self.sequences * (attention + 2 * length * s.router + 2 * self.options.tokens * s.head)

    def elementwise(self) -> float:
        """Seconds of one forward's passes over the hidden state."""
        tokens = self.sequences * (self.options.prompt_tokens + self.options.tokens)
        return self.moving(self.assumed.elementwise_passes * 4 * self.shapes.hidden * self.shapes.layers * tokens)

    def forward(self, scheme: Scheme, kind: str) -> float:
        plain = self.options.dtype
        low_bit = plain if kind == "plain" else product_kind(scheme, self.dtype)
        dequantizes = kind == "qarl" and scheme.activations is None
        operations = {plain: self.others()}
        slower = self.assumed.weight_only_share if dequantizes else 1.0
        operations[low_bit] = operations.get(low_bit, 0.0) + self.products() / slower
        return Work(0.0, operations).computing(self.cluster.machine) + self.elementwise()

    def backward(self) -> float:
        """dx and dW in the compute dtype; for routed experts with the first of their products once more
        (`quant.layers.grouped_backward`), counted as the whole forward."""
        products = 3 if self.shapes.experts else 2
        operations = {self.options.dtype: 2 * self.others() + products * self.products()}
        reduced = self.assumed.master_bytes * self.shapes.parameters * self.options.updates * self.apart
        seconds = Work(0.0, operations).computing(self.cluster.machine) + 2 * self.elementwise()
        return seconds + reduced / self.cluster.gpu.link

    @property
    def apart(self) -> float:
        """Of what all GPUs share out, the part that others hold."""
        return 1 - 1 / self.cluster.count

    def optimizer(self) -> float:
        """AdamW moves each master's state once; Muon also orthogonalizes every matrix, in bf16."""
        own, s = self.shapes.parameters / self.cluster.count, self.shapes
        passes = _ADAMW_PASSES if self.options.optimizer == "adamw" else _MUON_PASSES
        seconds = self.moving(passes * self.assumed.master_bytes * own)
        if self.options.optimizer == "adamw":
            return seconds
        per_layer = sum(map(_newton_schulz, s.attention_matrices))
        per_layer += sum(map(_newton_schulz, s.mlp_matrices)) * max(s.experts, 1)
        operations = {"bfloat16": s.layers * per_layer / self.cluster.count}
        return seconds + Work(0.0, operations).computing(self.cluster.machine)

    def materialize(self, codes: float) -> float:
        """Masters read and codes written by their holders, then gathered by all."""
        own = (self.assumed.master_bytes * self.shapes.parameters + codes) / self.cluster.count
        return self.moving(own) + codes * self.apart / self.cluster.gpu.link

    def moving(self, count: float) -> float:
        return count / self.cluster.machine.copy_bandwidth

    def memory(self, scheme: Scheme) -> float:
        """Engine's weights, the learner's codes, and this GPU's part of masters, gradients and moments."""
        parts = 4 if self.options.optimizer == "adamw" else 3
        state = parts * self.assumed.master_bytes * self.shapes.parameters / self.cluster.count
        return 2 * self.shapes.checkpoint_bytes(scheme.name, self.dtype.itemsize) + state


def _newton_schulz(shape: tuple[int, int]) -> float:
    """Operations of Muon's five steps on one matrix, m × n with m ≤ n: X Xᵀ, its square, and its product with X."""
    m, n = min(shape), max(shape)
    return _NEWTON_SCHULZ_STEPS * (4.0 * m * m * n + 2.0 * m**3)


def as_data(made: Plan) -> dict[str, Any]:
    """JSON-ready."""
    rows = [dataclasses.asdict(row) | {"seconds": row.seconds} for row in made.rows]
    return dataclasses.asdict(made) | {"rows": rows, "measured": False}
