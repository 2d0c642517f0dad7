"""Products of vLLM's that it lacks on a CPU, or rounds otherwise there, registered in vLLM's own tables."""

import os


def register_cpu_kernels() -> None:
    """Register them, once for a process on a CPU, before vLLM builds a layer.

    On CPUs with AMX vLLM 0.32 multiplies int4 weights with activations in int8 unless the environment says not to,
    whatever the checkpoint says. A value the user set is kept; `qarl.rollout.vllm.options` refuses it. Its int4 kernel
    does not ask the operating system for AMX, which ends a process that has not asked before ("illegal instruction").
    """
    import torch

    from qarl.quant.kernels.vllm_cpu.experts import register_per_expert_products
    from qarl.quant.kernels.vllm_cpu.fp8 import register_fp8_kernel
    from qarl.quant.kernels.vllm_cpu.int4 import register_int4_kernel

    register_per_expert_products()
    register_fp8_kernel()
    register_int4_kernel()
    if torch.cpu._is_amx_tile_supported():
        from qarl.quant.kernels.vllm_cpu.attention import register_fp32_attention
        from qarl.quant.kernels.vllm_cpu.int8 import register_int8_kernel

        torch.cpu._init_amx()
        os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")
        register_int8_kernel()
        register_fp32_attention()
