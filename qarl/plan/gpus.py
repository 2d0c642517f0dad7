"""GPUs by name, as their data sheets have them, and `8xH100` read. Imports nothing heavy."""

import re
from dataclasses import dataclass

from qarl.configs.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. bandwidth: of its memory, link: to the other GPUs and one way, bytes a second. products: kind of
    operands → operations a second, dense. capability: of CUDA."""

    memory: float
    bandwidth: float
    link: float
    products: dict[str, float]
    capability: float


def _products(bf16: float, fp32: float, int8: float, float8: float = 0.0, float4: float = 0.0) -> dict[str, float]:
    kinds = {"bfloat16": bf16, "float16": bf16, "float32": fp32, "int8": int8, "float8": float8, "float4": float4}
    return {kind: rate * 1e12 for kind, rate in kinds.items() if rate}


GPUS = {
    "a100": Gpu(80e9, 2.04e12, 300e9, _products(312, 19.5, 624), capability=8.0),
    "l40s": Gpu(48e9, 0.864e12, 32e9, _products(362, 91.6, 733, 733), capability=8.9),
    "h100": Gpu(80e9, 3.35e12, 450e9, _products(989, 67, 1979, 1979), capability=9.0),
    "h200": Gpu(141e9, 4.8e12, 450e9, _products(989, 67, 1979, 1979), capability=9.0),
    "b200": Gpu(180e9, 7.7e12, 900e9, _products(2250, 75, 4500, 4500, 9000), capability=10.0),
}
"""By lower-case name; A100 of 80 GB and H100 as SXM modules, L40S linked by PCIe."""


def parse_gpus(text: str) -> tuple[int, str]:
    """`8xH100` → 8 and "h100". Raises `ConfigError` for a GPU that is not known."""
    match = re.fullmatch(r"([1-9]\d*)x(\w+)", text.lower())
    if not match or match[2] not in GPUS:
        known = ", ".join(name.upper() for name in GPUS)
        raise ConfigError(f"--gpus {text!r}: give a count and a kind, such as 8xH100; known are {known}")
    return int(match[1]), match[2]
