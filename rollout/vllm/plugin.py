"""What vLLM's processes load of this room: its entry point in `vllm.general_plugins`. Kernels have one of their own."""

FILE_TRANSFER = "qarl_files"


def register() -> None:
    """Name the backend by which servers take published files."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if FILE_TRANSFER not in WeightTransferEngineFactory._registry:  # its module is imported where a server chooses it
        WeightTransferEngineFactory.register_engine(FILE_TRANSFER, "qarl.rollout.servers.vllm.worker", "FileTransfer")
