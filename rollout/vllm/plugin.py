"""What vLLM's processes load before they build a layer: this package's entry point in `vllm.general_plugins`."""

FILE_TRANSFER = "qarl_files"


def register() -> None:
    """Name the backend by which servers take published files, and on CPUs register the products vLLM lacks there."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if FILE_TRANSFER not in WeightTransferEngineFactory._registry:  # its module is imported where a server chooses it
        WeightTransferEngineFactory.register_engine(FILE_TRANSFER, "qarl.rollout.servers.vllm.worker", "FileTransfer")
    if current_platform.is_cpu():
        from qarl.quant.kernels.vllm_cpu import register_cpu_kernels

        register_cpu_kernels()
