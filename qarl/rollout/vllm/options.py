"""A run's rollout section in vLLM's words: arguments of `vllm.LLM`, and what vLLM reads from the
environment.
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from qarl.configs.errors import InputError
from qarl.configs.schema.run import RolloutConfig
from qarl.quant.runtime.batch_invariance import batch_invariant, kernel_arguments
from qarl.quant.runtime.libraries import SETTLED, refuse_split_keys
from qarl.rollout.engine import EngineError

_SMALLEST_SHARE = 0.01


@dataclass(frozen=True)
class VllmOptions:
    """rollout: a run's section. dtype: "bfloat16", "float16" or "float32". multi_process: this
    process is one of several, each with an engine of its own, and torch's process group is open.
    """

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    dtype: str = "bfloat16"
    multi_process: bool = False

    @property
    def logprobs_mode(self) -> str:
        """Of sampled tokens at the temperature they are sampled at. Of the prompt's tokens (the
        canary's) log-probs are of temperature 1 either way.
        """
        return "raw_logprobs" if self.rollout.temperature == 1.0 else "processed_logprobs"


def prepare_environment() -> None:
    """Set what vLLM takes from the environment alone, read when an engine starts, and mend what
    would keep it from starting. Values the user set are kept.
    """
    if "llvmlite" in sys.modules:
        from qarl.quant.runtime.llvmlite_repair import repair

        repair()
    os.environ[SETTLED] = "1"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def refuse_unsupported(options: VllmOptions) -> None:
    """Raise `EngineError` for options that vLLM cannot honour on this machine, and `InputError`
    where the environment would have it multiply otherwise than the schemes say.
    """
    import torch

    int4_as_w4a8 = os.environ.get("VLLM_CPU_INT4_W4A8", "0")
    if int4_as_w4a8 != "0" and not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported():
        raise InputError(
            f"VLLM_CPU_INT4_W4A8={int4_as_w4a8}: on this CPU, which has AMX, vLLM would multiply"
            " int4 weights with int8 activations, which the w4a16 schemes do not say; unset it or"
            " set it to 0"
        )
    if not torch.cuda.is_available():
        refuse_split_keys()
    if options.rollout.router_replay and not torch.cuda.is_available():
        raise EngineError(
            "rollout.router_replay: vLLM returns expert choices through its V2 model runner alone,"
            " which needs Triton and so a GPU; set it to false on this machine"
        )


def llm_arguments(options: VllmOptions) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, but for the checkpoint."""
    rollout = options.rollout
    return {
        "dtype": options.dtype,
        **_graph_arguments(rollout),
        # The attention whose kernel the learner calls too, with which vLLM keeps its mode, and
        # kernels that do.
        **(
            {"attention_backend": "FLASH_ATTN", "kernel_config": kernel_arguments()}
            if batch_invariant()
            else {}
        ),
        "max_model_len": rollout.longest,
        "max_num_seqs": rollout.max_num_seqs,
        # Bytes, not a share of the device, which the learner needs too: the share is only compared
        # with what is free.
        "kv_cache_memory_bytes": (rollout.kv_cache_gib or 1) * 2**30,
        "gpu_memory_utilization": _SMALLEST_SHARE,
        "enable_prefix_caching": rollout.prefix_caching,
        # Each engine is whole: tensor parallelism is 1. vLLM takes its place in the open group, no
        # more.
        "distributed_executor_backend": "external_launcher" if options.multi_process else "uni",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_return_routed_experts": rollout.router_replay,
        "logprobs_mode": options.logprobs_mode,
        **_cpu_arguments(rollout.longest),
    }


def _graph_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """CUDA graphs of vLLM's own kernels. Its default is to compile them by Inductor, whose norms
    round otherwise than vLLM's own, which the learner's graph calls (`quant.graph`). A publish
    refills what they read, or says that it cannot (`rollout.vllm.in_place`).
    """
    import torch

    on_gpu = torch.cuda.is_available()
    if rollout.enforce_eager or (rollout.enforce_eager is None and not on_gpu):
        return {"enforce_eager": True}
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL",
        "max_cudagraph_capture_size": rollout.max_num_seqs,
    }
    return {
        "enforce_eager": False,
        **({"compilation_config": graphs} if on_gpu else {}),
    }


def _cpu_arguments(max_model_len: int) -> dict[str, Any]:
    """On CPUs prompts are scheduled whole: vLLM 0.32 rewinds a seeded request's generator when a
    prompt is cut in chunks, which torch's CPU generator cannot do ("CPU Generator does not use
    offset").
    """
    import torch

    if torch.cuda.is_available():
        return {}
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, max_model_len),
    }
