"""`python -m benchmarks step-time`: estimated seconds of a training step on GPUs, per scheme.

The estimate is arithmetic alone; no GPU is used. Rates are those of data sheets times the fraction
that kernels reach. Launches, copies and calls cost what the constants below assume. There are three
learners: bf16 everywhere; "plain", which learns in bf16 and publishes low-bit tensors; and QaRL's.
A micro-batch is simulated, with sums between GPUs beside its products (`benchmarks.overlap`).
Nothing else overlaps. The estimate leaves out rewards, evaluation, checkpoints, prompts that
several completions share, and old log-probs that the first update does not already compute.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.overlap import Layer, micro_batch_seconds
from qarl.configs.errors import ConfigError
from qarl.configs.schemes import SCHEME_SPECS
from qarl.planning.memory import GIB, cache_itemsize
from qarl.planning.plan import MemoryPlan, changed_config, make_plan
from qarl.quant.limits import GRADIENTS_IN_FLIGHT
from qarl.report.tables import PlainTable


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU, from its data sheet."""

    memory: float
    """Bytes per second of its own memory."""
    link: float
    """Bytes per second to other GPUs, in one direction."""
    flops: float
    """Dense bf16 operations per second."""
    int8: float = 2.0
    """Speed of int8 products over bf16; 1 if the GPU has none."""
    fp8: float = 2.0
    """Speed of fp8 products over bf16; 1 if the GPU has none."""


GPUS = {
    "a100": Rates(2.04e12, 300e9, 312e12, fp8=1.0),
    "l40s": Rates(0.86e12, 32e9, 362e12),
    "h100": Rates(3.35e12, 450e9, 989e12),
    "h200": Rates(4.8e12, 450e9, 989e12),
    "b200": Rates(8.0e12, 900e9, 2250e12),
}
NETWORK = 50e9
"""Bytes per second from a GPU to other machines: an adapter of 400 Gb/s for each."""
READING = 0.75
MULTIPLYING = 0.5
SENDING = 0.7
"""Fractions of memory, compute and link rates that large kernels and collectives reach."""
LAYER_SECONDS = {"eager": (400e-6, 560e-6), "graphs": (40e-6, 80e-6)}
"""Lower bound of a decoder layer's step in the engine, for dense layers and for experts.

It is the time of its launches, without CUDA graphs ("eager") and with them ("graphs").
"""
MICRO_BATCH_LAYER_SECONDS = 2.5e-3
"""Lower bound of a decoder layer's forward and backward for one micro-batch of the learner."""
DEQUANTIZING = 20.0
"""Bytes of memory traffic for each weight that a backward dequantizes.

torch's operators do it one after another.
"""
HOST_LINK = 20e9
PAGEABLE = 8e9
"""Bytes per second to the host's pinned memory (`HOST_LINK`) and to its pageable memory."""
A_CALL = 20e-6
A_COPY = 15e-6
"""Seconds of a publish for each tensor: vLLM's loader, and a copy to the host for the digest."""
ITERATIONS = 5
"""Iterations of Muon's orthogonalization."""


@dataclass(frozen=True)
class Lengths:
    """Average lengths in tokens."""

    prompt: int
    answer: int
    at_once: int | None = None
    """Sequences sampled together, whatever cache size the plan leaves for them.

    None: as many as the plan's cache holds.
    """


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one step, by part."""

    scheme: str
    learner: str
    """Kind of learner: "bf16", "plain" or "QaRL"."""
    at_once: int
    """Sequences sampled together, as limited by the cache and the engine."""
    parts: dict[str, float]
    """Seconds of each part."""

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.parts.values())


def measure(
    plan: MemoryPlan,
    schemes: Sequence[str],
    lengths: Lengths,
    gpu: str,
) -> list[StepTime]:
    """Return bf16 first, then the plain learner and QaRL's for each scheme.

    Each has the cache and checkpointing of its own plan. Raises `ConfigError` for prompts or
    answers that are longer than the configuration allows.
    """
    rollout = plan.requested.rollout
    for name, mean, most in (
        ("prompt", lengths.prompt, rollout.max_prompt_tokens),
        ("answer", lengths.answer, rollout.max_new_tokens),
    ):
        if mean > most:
            raise ConfigError(
                f"--{name}-tokens {mean}: above what the configuration allows, {most}"
            )
    kinds = [
        ("bf16", "bf16"),
        *((scheme, kind) for scheme in schemes for kind in ("plain", "QaRL") if scheme != "bf16"),
    ]
    return [_step(plan, scheme, kind, lengths, GPUS[gpu]) for scheme, kind in kinds]


def _step(
    plan: MemoryPlan,
    scheme: str,
    kind: str,
    lengths: Lengths,
    rates: Rates,
) -> StepTime:
    changes = {"scheme": scheme, "learner.aligned": kind == "QaRL", "layers": ()}
    config = changed_config(
        plan.requested,
        changes if kind != "bf16" else {**changes, "learner.aligned": True},
    )
    own_plan = make_plan(config, plan.shapes, plan.source, plan.machine, plan.processes)
    estimate = Estimate(own_plan, lengths, rates)
    parts = {
        "sampling": estimate.sampling(),
        "learner": estimate.learner(),
        "optimizer": estimate.optimizer(),
        "publish": estimate.publish(),
    }
    return StepTime(scheme, kind, estimate.at_once, parts)


class Estimate:
    """Estimate for one process."""

    def __init__(self, plan: MemoryPlan, lengths: Lengths, rates: Rates):
        self.plan = plan
        self.config = plan.config
        self.shapes = plan.shapes
        self.lengths = lengths
        self.reads = rates.memory * READING
        self.flops = rates.flops * MULTIPLYING
        link = rates.link if plan.machine.machines == 1 else min(rates.link, NETWORK)
        self.sends = link * SENDING
        self.rates = rates
        self.spec = SCHEME_SPECS[self.config.scheme]
        self.processes = plan.processes
        self.sequences = (
            -(-self.config.rollout.prompts // self.processes) * self.config.rollout.samples
        )
        s = self.shapes
        expert = sum(rows * columns for rows, columns in s.mlp_matrices) * s.layers
        self.active = s.attention + expert * max(s.experts_a_token, 1)

    @property
    def gain(self) -> float:
        """Speed of the scheme's products over bf16, if arithmetic is the bottleneck."""
        inputs = self.spec.activations
        # 4-bit inputs are not counted as faster than 8-bit ones
        if inputs is None or inputs.bits < 8:
            return 1.0 if inputs is None else self.rates.fp8
        return self.rates.int8 if inputs.kind == "int" else self.rates.fp8

    @property
    def at_once(self) -> int:
        """Number of sequences sampled together, whose answers are on average half complete."""
        if self.lengths.at_once is not None:
            return min(self.lengths.at_once, self.sequences)
        tokens_each = self.lengths.prompt + self.lengths.answer // 2
        cache = (
            (self.config.rollout.kv_cache_gib or 1)
            * GIB
            // self.shapes.key_value_bytes(cache_itemsize(self.config))
        )
        return max(1, min(self.config.rollout.max_num_seqs, self.sequences, cache // tokens_each))

    def sampling(self) -> float:
        """Return the seconds of prefill and of decoding in waves.

        Each decoding step takes the longer of its reads and its products, plus its launches.
        """
        s = self.shapes
        batch = self.at_once
        # expected fraction of the experts that at least one of the batch's tokens is routed to
        used = 1.0
        if s.experts:
            used = 1 - (1 - s.experts_a_token / s.experts) ** batch
        bytes_each = s.quantized_bytes(self.config.scheme, 2) / s.quantized
        weights = s.attention + (s.quantized - s.attention) * used
        read = bytes_each * weights + 2 * s.head
        tokens_each = self.lengths.prompt + self.lengths.answer // 2
        read += batch * tokens_each * s.key_value_bytes(cache_itemsize(self.config))
        products = 2 * batch * (self.active / self.gain + s.head)
        graphs = "eager" if self.config.rollout.enforce_eager else "graphs"
        launches = s.layers * LAYER_SECONDS[graphs][bool(s.experts)]
        decode = max(read / self.reads, products / self.flops) + launches
        prefill = (
            2
            * self.sequences
            / self.config.rollout.samples
            * self.lengths.prompt
            * self.active
            / self.flops
        )
        return self.sequences / batch * self.lengths.answer * decode + prefill

    @property
    def tokens(self) -> int:
        """Tokens of a process's completions in a step, prompts included."""
        return self.sequences * (self.lengths.prompt + self.lengths.answer)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a process in a step."""
        return math.ceil(self.tokens / self.config.learner.micro_batch_tokens)

    def learner(self) -> float:
        """Return the seconds of forward and backward.

        Sums between processes overlap with them as `benchmarks.overlap` says.
        """
        layers = [self._layer()] * self.shapes.layers
        return self.micro_batches * micro_batch_seconds(
            [*layers, self._head()], GRADIENTS_IN_FLIGHT
        )

    def products(self) -> float:
        """Return the seconds of forward and backward of a learner that waits for nothing."""
        layer = self._layer()
        head = self._head()
        layers = self.shapes.layers * (layer.forward + layer.backward)
        return self.micro_batches * (layers + head.forward + head.backward)

    def sending(self) -> float:
        """Return the seconds in which a process sends a step's gradients and gathered codes."""
        traffic = self.plan.traffic
        return self.micro_batches * traffic.micro_batch / self.sends

    def _layer(self) -> Layer:
        """Return one decoder layer of an average micro-batch.

        If layers are computed again, the backward has a second forward. Of adapters, products
        for the weights' gradients are small.
        """
        s = self.shapes
        learner = self.config.learner
        adapts = learner.lora.name != "none"
        again = learner.gradient_checkpointing is True
        tokens = self.tokens / self.micro_batches
        length = self.lengths.prompt + self.lengths.answer
        # a causal mask halves the factor of 4
        scores = 2 * tokens * length * s.heads * s.head_dim
        products = 2 * tokens * self.active / s.layers
        forward = (products / (self.gain if learner.aligned else 1.0) + scores) / self.flops
        backward = ((1 if adapts else 2) * products + 2.5 * scores) / self.flops
        backward += forward if again else 0.0
        if learner.aligned and self.config.scheme != "bf16":
            backward += DEQUANTIZING * s.quantized / s.layers / self.reads
        launches = MICRO_BATCH_LAYER_SECONDS * (2 if s.experts else 1)
        slower = max(1.0, launches / (forward + backward))
        elements = 0 if adapts else (s.quantized + s.router) // s.layers
        traffic = self.plan.traffic
        # Of the gathered bytes the head's few are counted as the layers'.
        waits = s.layers * self.sends
        fetched = 2 * s.quantized / s.layers / HOST_LINK
        fetches = 0
        if learner.base_on_host and not learner.keep_codes:
            fetches = 1 if learner.keep_kernel_layout else (3 if again else 2)
        return Layer(
            forward=slower * forward,
            backward=slower * backward,
            gradients=elements if self.processes > 1 else 0,
            sums=self._sums(elements),
            forward_gather=traffic.forward_gathers / waits,
            backward_gather=traffic.backward_gathers / waits,
            forward_fetch=fetched * (fetches > 1),
            backward_fetch=fetched * (fetches - (fetches > 1)),
        )

    def _head(self) -> Layer:
        """Return the output head, with the embedding's gradient."""
        s = self.shapes
        products = 2 * self.tokens / self.micro_batches * s.head / self.flops
        sent = self.processes > 1 and self.config.learner.lora.name == "none"
        return Layer(
            forward=products,
            backward=2 * products,
            gradients=s.head if sent else 0,
            sums=self._sums(2 * s.head) if sent else 0.0,
        )

    def _sums(self, elements: int) -> float:
        """Return the seconds in which a process sends the gradients of so many parameters."""
        sent = self.plan.traffic.gradients * elements / self.shapes.parameters
        return sent / self.sends

    def optimizer(self) -> float:
        """Return the seconds of the optimizer.

        It steps a process's share of the masters and makes the low-bit tensors.
        """
        s = self.shapes
        learner = self.config.learner
        share = s.parameters / self.processes
        master = 2 if learner.master_dtype == "bfloat16" else 4
        muon = learner.optimizer.name == "muon"
        moments = 4 * (1 if muon else 2)
        seconds = share * (2 * master + 4 + 2 * moments + master + 2) / self.reads
        if learner.optimizer.offload == "cpu":
            seconds += 2 * share * moments / HOST_LINK
        if muon:
            matrices = [*s.attention_matrices, *s.mlp_matrices * max(s.experts, 1)]
            short = [(min(shape), max(shape)) for shape in matrices]
            flops = ITERATIONS * sum(4 * m * m * n + 2 * m**3 for m, n in short) * s.layers
            seconds += flops / self.processes / self.flops
        traffic = self.plan.traffic
        seconds += (traffic.update + traffic.version) / self.sends
        return seconds * learner.mini_batches

    def publish(self) -> float:
        """Return the seconds of loading and digesting the tensors of every update."""
        s = self.shapes
        kinds = 1 if self.spec.weights is None else 2 + (self.spec.format == "pack-quantized")
        matrices = s.layers * (len(s.attention_matrices) + len(s.mlp_matrices) * max(s.experts, 1))
        stored = s.quantized_bytes(self.config.scheme, 2) + 4 * s.head
        # codes and scales; the third kind, a matrix's shape, is on the host already
        copies = matrices * min(kinds, 2) * A_COPY + stored / PAGEABLE
        seconds = matrices * kinds * A_CALL + copies + 2 * stored / self.reads
        return seconds * self.config.learner.mini_batches


def table(rows: list[StepTime], title: str) -> PlainTable:
    """Return a table of the seconds of each part, and two ratios of the total.

    They compare it with bf16's, and with the plain learner's of the same scheme.
    """
    columns = ("at once", *rows[0].parts, "step, s", "of bf16", "of plain")
    shown = PlainTable("learner", *columns, figures=columns, title=title)
    totals = {(row.scheme, row.learner): row.total for row in rows}
    for row in rows:
        plain = totals.get((row.scheme, "plain")) if row.learner == "QaRL" else None
        shown.add_row(
            row.scheme if row.learner == "bf16" else f"{row.scheme} {row.learner}",
            str(row.at_once),
            *(f"{seconds:,.1f}" for seconds in row.parts.values()),
            f"{row.total:,.0f}",
            f"{row.total / rows[0].total:.2f}",
            f"{row.total / plain:.2f}" if plain else "-",
        )
    return shown


def as_data(rows: list[StepTime]) -> list[dict[str, Any]]:
    """Return the rows as JSON-ready dictionaries."""
    return [{**asdict(row), "seconds": row.total} for row in rows]
