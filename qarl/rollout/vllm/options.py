"""A run's `rollout` section as arguments of `vllm.LLM` and as vLLM's environment variables."""

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qarl.configs.errors import InputError
from qarl.configs.schema.rollout import RolloutConfig
from qarl.quant.checkpoint.settings import has_states, prompt_rounding, tower_inputs
from qarl.quant.runtime.batch_invariance import batch_invariant, kernel_arguments
from qarl.quant.runtime.libraries import INT4_AS_W4A8, SETTLED, refuse_split_keys
from qarl.rollout.engine import EngineError

_SMALLEST_SHARE = 0.01
"""Fraction of the device's memory that must be free when vLLM starts."""


@dataclass(frozen=True)
class VllmOptions:
    """Options of an engine."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The run's `rollout` section."""
    dtype: str = "bfloat16"
    """Compute dtype: "bfloat16", "float16" or "float32"."""
    multi_process: bool = False
    """True if this process is one of several that have an engine each.

    Torch's process group is then open.
    """
    rounding: str = ""
    """Name of the model's layers that round a prompt otherwise than sampled tokens, see `of_model`;
    "" if there are none.
    """
    states: bool = False
    """True if the model has these or other layers with a state, see `of_model`."""
    towers: bool = False
    """True if the model has parts for pictures or sound, see `of_model`."""

    def of_model(self, checkpoint: Path) -> "VllmOptions":
        """Return the options for the model in a checkpoint folder."""
        return replace(
            self,
            rounding=prompt_rounding(checkpoint, self.dtype),
            states=has_states(checkpoint),
            towers=bool(tower_inputs(checkpoint)),
        )

    @property
    def logprobs_mode(self) -> str:
        """Mode in which log-probs are those of the distribution at the sampling temperature.

        Log-probs of prompt tokens (the canary's) have temperature 1 in either mode.
        """
        return "raw_logprobs" if self.rollout.temperature == 1.0 else "processed_logprobs"


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads when an engine starts.

    Also repairs an llvmlite that would keep it from starting. Values that the user set are kept.
    """
    if "llvmlite" in sys.modules:
        from qarl.quant.runtime.llvmlite_repair import repair

        repair()
    os.environ[SETTLED] = "1"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def refuse_unsupported(options: VllmOptions) -> None:
    """Raise if this machine or the environment does not allow these options.

    Raises:
        EngineError: vLLM cannot honour the options on this machine.
        InputError: The environment would make vLLM multiply in another way than the schemes
            specify.
    """
    import torch

    int4_as_w4a8 = os.environ.get(INT4_AS_W4A8, "0")
    if int4_as_w4a8 != "0" and not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported():
        raise InputError(
            f"{INT4_AS_W4A8}={int4_as_w4a8}: on this CPU, which has AMX, vLLM would multiply"
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
    """Return the keyword arguments of `vllm.LLM`, without the checkpoint.

    Prompts of layers with a state are not cached: vLLM 0.32 caches states only where it may cut
    prompts into chunks, which it may not on CPUs (see `_scheduler_arguments`), and a prompt that is
    cut elsewhere gets other bits.
    """
    rollout = options.rollout
    kernels = {}
    if batch_invariant():
        # The learner calls this attention's kernel too. With it, and with these kernels, vLLM
        # keeps its batch-invariant mode.
        kernels = {"attention_backend": "FLASH_ATTN", "kernel_config": kernel_arguments()}
    return {
        "dtype": options.dtype,
        **_graph_arguments(rollout),
        **kernels,
        "max_model_len": rollout.longest,
        "max_num_seqs": rollout.max_num_seqs,
        # The cache is set in bytes, because the learner shares the device. vLLM compares the
        # fraction only with the memory that is free.
        "kv_cache_memory_bytes": (rollout.kv_cache_gib or 1) * 2**30,
        "gpu_memory_utilization": _SMALLEST_SHARE,
        **(_tower_arguments(rollout.pictures) if options.towers else {}),
        "enable_prefix_caching": rollout.prefix_caching and not options.states,
        # Every process has a complete engine: tensor parallelism is 1. vLLM only joins the open
        # process group.
        "distributed_executor_backend": "external_launcher" if options.multi_process else "uni",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_return_routed_experts": rollout.router_replay,
        "logprobs_mode": options.logprobs_mode,
        **_scheduler_arguments(rollout),
    }


def _tower_arguments(pictures: int) -> dict[str, Any]:
    """Return the arguments for a model with towers.

    Towers are neither trained nor published, and prompts of text leave them out.

    pictures: upper bound on the pictures of a prompt.
    """
    if not pictures:
        return {"language_model_only": True}
    from qarl.rollout.vllm.pictures import picture_arguments

    return picture_arguments(pictures)


def _graph_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the arguments that capture vLLM's own kernels in CUDA graphs.

    By default vLLM compiles them by Inductor, whose norms round differently from vLLM's own norms,
    which the learner's graph calls (`quant.graph`). A publish refills the tensors that graphs read,
    or raises if it cannot (`rollout.vllm.in_place`).
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
    if not on_gpu:
        return {"enforce_eager": False}
    return {"enforce_eager": False, "compilation_config": graphs}


def _scheduler_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the arguments that bound what the engine computes at once.

    On CPUs prompts are scheduled whole: vLLM 0.32 rewinds a seeded request's generator when it cuts
    a prompt into chunks, which torch's CPU generator cannot do ("CPU Generator does not use
    offset").
    """
    import torch

    if torch.cuda.is_available():
        return {"max_num_batched_tokens": rollout.batched_tokens("cuda")}
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": rollout.batched_tokens("cpu"),
    }
