"""vLLM's kernel selection as on a GPU, without a GPU. vLLM's Python code asks the platform, which
is a stand-in here.
"""

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from types import ModuleType
from typing import Any
from unittest.mock import patch

import vllm.platforms
import vllm.utils.humming
from vllm.model_executor.kernels.linear import CutlassInt8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.platforms.interface import DeviceCapability, Platform
from vllm.plugins import load_general_plugins

from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.kernels.vllm_cpu import register
from qarl.quant.runtime.libraries import SETTLED
from qarl.quant.schemes import Scheme, SchemeError, write_quantization_config

CAPABILITIES = [
    (8, 0),
    (8, 9),
    (9, 0),
    (10, 0),
]
LAYOUT = ExpertLayout()

_PACKAGES = ("has_humming", "has_deep_gemm")
"""Packages that the CUDA lock installs or that vLLM's wheel for CUDA bundles."""

_WHEEL: dict[str, int] = {
    "cutlass_scaled_mm_supports_fp8": 89,
    "cutlass_scaled_mm_supports_block_fp8": 90,
    "CUTLASS_BLOCK_FP8_SUPPORTED": 90,
    "cutlass_scaled_mm_supports_fp4": 100,
    "mxfp4_experts_quant_supported": 100,
    "cutlass_group_gemm_supported": 90,
}
"""Questions that the wheel's operators answer → the lowest capability with a positive answer."""
_LAZY = (
    "vllm.model_executor.layers.fused_moe.oracle",
    "vllm.model_executor.layers.fused_moe.experts",
)
"""Packages whose modules vLLM imports while it chooses.

They are imported beforehand; otherwise they would keep the stand-in.
"""


def fits(scheme: Scheme, *shapes: tuple[int, int]) -> bool:
    """Return whether a scheme can store matrices of these rows and columns."""
    try:
        for shape in shapes:
            scheme.check_layer("layer", shape)
    except SchemeError:
        return False
    return True


class HummingGemms(StrEnum):
    """Stand-in for `humming.GemmType`, a kernel's own attribute that the selection reads.

    Only the CUDA lock has that package.
    """

    INDEXED = "indexed"
    GROUPED_CONTIGUOUS = "grouped_contiguous"
    GROUPED_MASKED = "grouped_masked"


_SCHEMAS = "quant_key_to_input_schema"
"""vLLM's function that says whether Humming quantizes such activations.

From its source, it does so for MXFP4 and NVFP4.
"""

sys.modules.setdefault("vllm._C_stable_libtorch", ModuleType("operators of the CUDA wheel"))
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402


class StubCuda(CudaPlatformBase):
    """Platform of a GPU with one compute capability. vLLM's CUDA platform answers everything that
    is not defined here.
    """

    capability = DeviceCapability(9, 0)
    get_device_capability = classmethod(lambda cls, device_id=0: cls.capability)  # type: ignore[assignment]
    get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA stub")  # type: ignore[assignment]
    get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)  # type: ignore[assignment]
    num_compute_units = classmethod(lambda cls, device_id=0: 132)  # type: ignore[assignment]


def config_of(scheme: Scheme) -> CompressedTensorsConfig | None:
    """Return the quantization configuration as a GPU's vLLM reads it from a checkpoint.

    QaRL's own one on CPUs multiplies experts one by one.
    """
    written = write_quantization_config([(scheme, ["Linear"])] if scheme.quantization else [], [])
    return CompressedTensorsConfig.from_config(written) if written else None


def engines_experts(
    shape: ExpertsShape,
    scheme: CompressedTensorsConfig | None,
    name: str,
    layout: ExpertLayout = LAYOUT,
) -> RoutedExperts:
    """Return the experts as vLLM's decoders build them, without parallelism."""
    return FusedMoEFactory(
        num_experts=shape.experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        renormalize=True,
        quant_config=scheme,
        tp_size=1,
        dp_size=1,
        pcp_size=1,
        prefix=name,
        ckpt_names=(layout.gate, layout.down, layout.up),
    ).routed_experts


@contextmanager
def stub_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Within this context, tell modules of vLLM, and ours that ask it, that
    they run on such a GPU.
    """
    stub = type("Stub", (StubCuda,), {"capability": DeviceCapability(*capability)})()
    number = 10 * capability[0] + capability[1]
    # vLLM does so once a process: on the stand-in ours would leave out the CPU's kernels
    load_general_plugins()
    _import_lazy()
    places: list[tuple[ModuleType, str, Any]] = [(vllm.platforms, "_current_platform", stub)]
    for name, module in list(sys.modules.items()):
        if name.startswith(("vllm.", "qarl.")) and isinstance(module, ModuleType):
            attributes = vars(module)
            if isinstance(attributes.get("current_platform"), Platform):
                places.append((module, "current_platform", stub))
            places += [(module, key, lambda: True) for key in _PACKAGES if key in attributes]
            places += [(module, _SCHEMAS, lambda key: None)] if _SCHEMAS in attributes else []
            wheel = {
                key: number >= least if key.isupper() else _from(least, number)
                for key, least in _WHEEL.items()
            }
            places += [(module, key, answer) for key, answer in wheel.items() if key in attributes]
    _forget(places)
    patches = [patch.object(module, key, value) for module, key, value in places]
    with ExitStack() as stack:
        stack.callback(_forget, places)
        for one in patches:
            stack.enter_context(one)
        stack.enter_context(patch.dict(vars(vllm.utils.humming), {"GemmType": HummingGemms}))
        stack.enter_context(patch.dict(vars(int_wna16)))
        stack.enter_context(patch.object(LinearBase, "requires_unquantized_input", False))
        cutlass = CutlassInt8ScaledMMLinearKernel
        stack.enter_context(patch.object(cutlass, "is_supported", cutlass.is_supported))
        stack.enter_context(patch.dict(os.environ, {SETTLED: "1"}))
        register()
        yield


@functools.cache
def _import_lazy() -> None:
    for package in map(importlib.import_module, _LAZY):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")


def _from(least: int, number: int) -> Callable[..., bool]:
    return lambda *asked: number >= least


def _forget(places: list[tuple[ModuleType, str, Any]]) -> None:
    """Drop answers that modules with a platform have cached."""
    for module in {module for module, _, _ in places}:
        for value in list(vars(module).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
