"""What runs inside vLLM's processes: the publish (`worker`), and what vLLM lacks on a CPU or rounds otherwise there
(`cpu_experts`, `cpu_fp8`, `cpu_int4`, `cpu_int8`, `cpu_attention`).

`register` is this package's entry point in vLLM's plugin group `vllm.general_plugins`.
"""

import os

FILE_TRANSFER = "qarl_files"


def register() -> None:
    """Called by vLLM in each of its processes, before it builds a layer. On GPUs it names the backend by which servers
    take published files, and changes nothing.

    On CPUs with AMX vLLM 0.32 multiplies int4 weights with activations in int8 unless the environment says not to,
    whatever the checkpoint says. A value the user set is kept; `options.refuse_unsupported` refuses it. Its int4 kernel
    does not ask the operating system for AMX, which ends a process that has not asked before ("illegal instruction").
    """
    import torch
    from vllm.platforms import current_platform

    _name_file_transfer()
    if not current_platform.is_cpu():
        return
    from qarl.rollout.vllm.cpu_experts import register_per_expert_products
    from qarl.rollout.vllm.cpu_fp8 import register_fp8_kernel
    from qarl.rollout.vllm.cpu_int4 import register_int4_kernel

    register_per_expert_products()
    register_fp8_kernel()
    register_int4_kernel()
    if torch.cpu._is_amx_tile_supported():
        from qarl.rollout.vllm.cpu_attention import register_fp32_attention
        from qarl.rollout.vllm.cpu_int8 import register_int8_kernel

        torch.cpu._init_amx()
        os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")
        register_int8_kernel()
        register_fp32_attention()


def _name_file_transfer() -> None:
    """The backend `qarl_files` of vLLM's weight transfer; its module is imported where a server chooses it."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if FILE_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(FILE_TRANSFER, "qarl.rollout.servers.worker", "FileTransfer")
