"""`python -m benchmarks publish`: making and handing over a weight version.

Its speed is compared with memory-copy bandwidth. A random Qwen3-MoE is materialized, and its stream
is consumed as an engine consumes it: each tensor is copied once into memory that is already
allocated. No engine runs, so the engine's later work on the tensors is not in the figures. Each
round starts with plain copies, and shares refer to the bandwidth of the fastest copy, because other
processes on the machine slow both.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from benchmarks.peak_memory import PeakMemory
from qarl.configs.errors import ConfigError
from qarl.quant.checkpoint.load import empty_model
from qarl.quant.digest import ReceivedDigest, StreamDigest
from qarl.quant.layers.context import LayerContext
from qarl.quant.materialize import materialize
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, MASTER_DTYPES, get_scheme
from qarl.report.tables import PlainTable

_COPIED_BYTES = 1 << 29
_RANDOM_VALUES = 1 << 22


@dataclass(frozen=True)
class Work:
    """One kind of work."""

    name: str
    bytes: int
    """Bytes that have to be read and written."""
    seconds: tuple[float, ...]
    """Seconds in each round."""
    shares: tuple[float, ...]
    """Throughput as a fraction of the copy bandwidth measured in the same round."""

    @property
    def gigabytes_a_second(self) -> float:
        """Throughput at the median of the rounds, in 10^9 bytes per second."""
        return self.bytes / statistics.median(self.seconds) / 1e9


@dataclass(frozen=True)
class PublishFigures:
    """Figures of the benchmark; all sizes are in bytes."""

    model: str
    scheme: str
    dtype: str
    master_dtype: str
    threads: int
    materializers: dict[str, str]
    """Implementation that made the low-bit tensors, by scheme."""
    parameters: int
    """Number of the model's parameters."""
    master_bytes: int
    """Bytes that a materialization reads."""
    low_bit_bytes: int
    """Bytes of the stream."""
    largest_layer: int
    """Bytes of the largest master: a matrix or a stack of experts."""
    peak_extra: int
    """Peak of resident memory beyond the masters."""
    copy_bandwidth: float
    """Bytes per second that a plain copy reads and writes, median of the rounds."""
    work: tuple[Work, ...]


def measure(
    scheme: str, parameters: float, dtype: str, master_dtype: str, repeats: int
) -> PublishFigures:
    """Measure everything on one random model of about `parameters` parameters.

    Raises `ConfigError` for unusable values.
    """
    spec = get_scheme(scheme)
    if parameters < 1e6:
        raise ConfigError(f"--parameters {parameters:g} must be at least 1e6")
    compute = COMPUTE_DTYPES[dtype]
    master = MASTER_DTYPES[master_dtype]
    config = moe_config(parameters)
    masters = random_masters(config, master)
    # compile first: this is neither time nor memory of a version
    materialize(torch.ones(128, 256, dtype=master), spec, compute)
    with PeakMemory() as building:
        model = LowBitModel(masters, spec, LayerContext(compute, "reference"))
    sink = [torch.zeros_like(item.tensor) for item in model.low_bit_tensors()]
    with PeakMemory() as running:
        bandwidths, work = _rounds(model, sink, repeats)
    low_bit_bytes = sum(tensor.nbytes for tensor in sink)
    return PublishFigures(
        model=(
            f"Qwen3-MoE, {config.num_hidden_layers} layers, hidden {config.hidden_size},"
            f" {config.num_experts} experts of {config.moe_intermediate_size}, vocabulary"
            f" {config.vocab_size}"
        ),
        scheme=scheme,
        dtype=dtype,
        master_dtype=master_dtype,
        threads=torch.get_num_threads(),
        materializers=model.materializers(),
        parameters=sum(p.numel() for p in model.masters.values()),
        master_bytes=sum(p.nbytes for p in model.masters.values()),
        low_bit_bytes=low_bit_bytes,
        largest_layer=max(p.nbytes for p in model.masters.values()),
        peak_extra=max(building.bytes, low_bit_bytes + running.bytes - 2 * _COPIED_BYTES),
        copy_bandwidth=statistics.median(bandwidths),
        work=work,
    )


def moe_config(parameters: float) -> Qwen3MoeConfig:
    """Return the configuration of a Qwen3-MoE with about `parameters` parameters.

    Its layers are like those of Qwen3-30B-A3B, with 16 of its 128 experts and a fifth of its
    vocabulary. Below 2.5e8 parameters the layers are an eighth as wide.
    """
    large = parameters >= 2.5e8
    hidden, intermediate, experts = (2048, 768, 16) if large else (256, 128, 4)
    heads, head_dim, vocabulary = (32, 128, 32768) if large else (4, 64, 2048)
    layer = 3 * experts * hidden * intermediate + hidden * head_dim * (2 * heads + 2 * 2)
    layers = max(1, round((parameters - 2 * vocabulary * hidden) / layer))
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig(**sizes)


def random_masters(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of this architecture, filled with 4 million normal values that repeat."""
    model: Any = empty_model(config)
    model = model.to(dtype).to_empty(device="cpu").eval()
    model.tie_weights()
    # without this vLLM takes an export for an embedding model
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_RANDOM_VALUES, generator=generator).mul_(0.02).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            for part in parameter.view(-1).split(_RANDOM_VALUES):
                part.copy_(values[: part.numel()])
    return model


def _rounds(
    model: LowBitModel, sink: list[torch.Tensor], repeats: int
) -> tuple[list[float], tuple[Work, ...]]:
    """Return the copy bandwidth of each round, and the work of all rounds.

    A first round warms up and is not counted.
    """
    source = torch.full((_COPIED_BYTES,), 1, dtype=torch.uint8)
    target = torch.full((_COPIED_BYTES,), 2, dtype=torch.uint8)
    master_bytes = sum(master.nbytes for master in model.masters.values())
    low_bit_bytes = sum(tensor.nbytes for tensor in sink)
    seconds: list[tuple[float, ...]] = []
    for _ in range(repeats + 1):
        copy = min(_seconds(lambda: target.copy_(source)) for _ in range(3))
        refresh_seconds = _seconds(model.refresh)
        publish_seconds = _seconds(lambda: _publish(model, sink))
        digest_seconds = _seconds(lambda: _publish_proven(model, sink))
        seconds.append(
            (
                copy,
                refresh_seconds,
                publish_seconds,
                refresh_seconds + publish_seconds,
                digest_seconds,
                refresh_seconds + digest_seconds,
            )
        )
    copies, *others = zip(*seconds[1:], strict=True)
    bandwidths = [2 * _COPIED_BYTES / copy for copy in copies]
    refresh_bytes = master_bytes + low_bit_bytes
    publish_bytes = 2 * low_bit_bytes
    named = {
        "materialize": refresh_bytes,
        "publish": publish_bytes,
        "materialize + publish": refresh_bytes + publish_bytes,
        "publish, digest on both ends": publish_bytes,
        "materialize + publish, digest on both ends": refresh_bytes + publish_bytes,
    }
    work = []
    for (name, moved), times in zip(named.items(), others, strict=True):
        shares = tuple(
            moved / t / bandwidth for t, bandwidth in zip(times, bandwidths, strict=True)
        )
        work.append(Work(name, moved, times, shares))
    return bandwidths, tuple(work)


def _publish(model: LowBitModel, sink: list[torch.Tensor]) -> None:
    for item, target in zip(model.low_bit_tensors(), sink, strict=True):
        _consume(item.tensor, target)


def _publish_proven(model: LowBitModel, sink: list[torch.Tensor]) -> None:
    sender = StreamDigest()
    receiver = ReceivedDigest()
    for item, target in zip(model.low_bit_tensors(), sink, strict=True):
        sender.update(item)
        receiver.update(item)
        _consume(item.tensor, target)
    assert sender.hexdigest() == receiver.hexdigest()


def _consume(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the tensor in this thread.

    A multi-threaded copy would meet OpenMP's barrier for every tensor. With another process on the
    machine each barrier costs a scheduler's time slice, a hundred times the copy.
    """
    source = tensor.detach().view(torch.uint8)
    np.copyto(target.view(torch.uint8).numpy(), source.numpy())


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(found: PublishFigures) -> PlainTable:
    """Return the table to print."""
    made = ", ".join(f"{scheme}: {how}" for scheme, how in found.materializers.items())
    over = found.peak_extra - found.low_bit_bytes
    figures = ("must move", "seconds", "GB/s", "of copy bandwidth")
    title = (
        f"{found.model}: {found.parameters / 1e9:.3f}e9 parameters, {found.scheme}, {found.dtype}, "
        f"masters {found.master_dtype}, {found.threads} threads\nmade by {made}"
    )
    caption = (
        f"copy bandwidth {found.copy_bandwidth / 1e9:.1f} GB/s, read and written; all figures are"
        f" medians of {len(found.work[0].seconds)} rounds\nmemory beyond the masters at its peak:"
        f" {_mib(found.peak_extra)} = low-bit tensors {_mib(found.low_bit_bytes)} + {_mib(over)}"
        f" (the largest layer's master is {_mib(found.largest_layer)})"
    )
    shown = PlainTable("work", *figures, figures=figures, title=title, caption=caption)
    for work in found.work:
        shown.add_row(
            work.name,
            f"{work.bytes / 1e9:.2f} GB",
            f"{statistics.median(work.seconds):.3f}",
            f"{work.gigabytes_a_second:.1f}",
            f"{statistics.median(work.shares):.0%}",
        )
    return shown


def as_data(found: PublishFigures) -> dict:
    """Return the figures as a JSON-ready dictionary, with every round."""
    return dataclasses.asdict(found)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
