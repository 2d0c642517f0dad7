"""What GPUs are said to do, and how much of it kernels reach: what `qarl bench speed --plan` predicts from.

Peaks are the vendors' data sheets', dense. Shares are stated here, not measured by QaRL; a record of `qarl bench speed`
measured on the machine replaces both (`--rates`).
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from qarl.bench.speed.roofline import Machine
from qarl.configs.errors import ConfigError
from qarl.plan.gpus import GPUS, Gpu, parse_gpus
from qarl.quant.schemes import Scheme


@dataclass(frozen=True)
class Assumptions:
    """What is stated and not measured. bandwidth_share, product_share: of the peaks. weight_only_share: of that again,
    where a product of many tokens dequantizes its weights. launch_seconds: of one kernel;
    launches_a_layer: of a decoding step, without CUDA graphs (rollout.enforce_eager). elementwise_passes: of fp32 reads
    or writes of the hidden state, a layer and forward, by what is no product (norms, rotary embedding, gates,
    residuals); a backward makes twice as many. hash_rate: bytes a second of a version's digest, which sender and
    receiver both make. master_bytes: of a master, a gradient and each moment."""

    bandwidth_share: float = 0.8
    product_share: float = 0.5
    weight_only_share: float = 0.8
    launch_seconds: float = 5e-6
    launches_a_layer: int = 14
    elementwise_passes: int = 60
    hash_rate: float = 8e9
    master_bytes: int = 4


@dataclass(frozen=True)
class Cluster:
    """count GPUs of one kind. machine: what one of them does, shares taken off. source: of these rates, in words."""

    name: str
    count: int
    gpu: Gpu
    machine: Machine
    source: str


def parse_cluster(text: str, rates: str | None, assumed: Assumptions) -> Cluster:
    """`8xH100` → what it does. rates: a record of `qarl bench speed` measured on one such GPU, or None.

    Raises `ConfigError` for a GPU that is not known and for a file that is no such record.
    """
    count, kind = parse_gpus(text)
    gpu = GPUS[kind]
    if rates is not None:
        machine, device = _measured(rates)
        source = f"measured on {device} ({rates})"
        return Cluster(kind.upper(), count, gpu, machine, source=source)
    machine = Machine(
        gpu.bandwidth * assumed.bandwidth_share,
        {kind: rate * assumed.product_share for kind, rate in gpu.products.items()},
    )
    source = (
        f"stated: {assumed.bandwidth_share:.0%} of the data sheet's {gpu.bandwidth / 1e12:.2f} TB/s, "
        f"{assumed.product_share:.0%} of its products ("
        + ", ".join(f"{kind} {rate / 1e12:,.0f}" for kind, rate in gpu.products.items())
        + " TFLOP/s dense)"
    )
    return Cluster(kind.upper(), count, gpu, machine, source=source)


def _measured(file: str) -> tuple[Machine, str]:
    try:
        record = json.loads(Path(file).read_text())
        machine = record["data"]["machine"]
        return Machine(machine["copy_bandwidth"], machine["products"]), record["environment"]["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--rates {file}: {type(error).__name__}: {error}; give a file that `qarl bench speed --json` wrote on "
            "the kind of machine to plan for"
        ) from None


def why_not_on(scheme: Scheme, gpu: Gpu) -> str:
    """Why vLLM would not run a scheme on this GPU by its own conditions (README's table); "" where it would."""
    needs = {"fp8": 8.9, "fp8-block": 8.9, "nvfp4": 10.0}.get(scheme.name, 0.0)
    if scheme.name == "w4a8":
        return "vLLM has it for CPUs alone"
    if scheme.name == "w4afp8" and gpu.capability != 9.0:
        return "vLLM has it for compute capability 9.0 alone"
    if scheme.name == "mxfp4a16" and gpu.capability >= 10:
        return "vLLM quantizes its activations from Blackwell on"
    if gpu.capability < needs:
        return f"it needs compute capability {needs:g}, this GPU has {gpu.capability:g}"
    return ""


def in_words(assumed: Assumptions) -> list[str]:
    """Every assumption with its value."""
    return [f"{field.name} {getattr(assumed, field.name):g}" for field in dataclasses.fields(assumed)]
