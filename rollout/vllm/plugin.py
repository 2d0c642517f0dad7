"""What runs inside vLLM's processes: the publish (`worker`) and quantized experts for CPUs without AMX (`experts`).

`register` is this package's entry point in vLLM's plugin group `vllm.general_plugins`.
"""


def register() -> None:
    """Called by vLLM in each of its processes. Changes nothing on GPUs and on CPUs whose experts vLLM quantizes."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not torch.cpu._is_amx_tile_supported():
        from rollout.vllm.cpu_experts import register_per_expert_products

        register_per_expert_products()
