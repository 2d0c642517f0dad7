"""Set-up of the process that a command runs in: libraries' start-up messages are silenced (their
errors still come through), and text can be written in any encoding.
"""

import io
import logging
import os
import sys
import warnings
from pathlib import Path

from qarl.quant.runtime.libraries import ON_CPU

_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
}


def write_in_any_encoding() -> None:
    """Make stdout and stderr write "?" for characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def quiet_libraries(compiles: bool = False) -> None:
    """Silence the start-up messages of torch, transformers and vLLM, and set their environment
    variables.

    Call this before any of them is imported. Values that the user set in the environment are kept.

    compiles: leave torch.compile on, because the learner uses it (`learner.compile`).
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if any(Path("/dev").glob("nvidia[0-9]*")):
        # Engine and learner, whose micro-batches differ in size, share one allocator; page-locked
        # moments are not rounded up to powers of two. torch reads it at the first tensor on a GPU.
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            os.environ.setdefault(
                "PYTORCH_ALLOC_CONF",
                "expandable_segments:True,pinned_max_round_threshold_mb:1",
            )
    else:
        os.environ.setdefault(ON_CPU, "1")
        # transformers' save_pretrained imports DeepSpeed, which warns
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if not compiles:
            # On CPUs vLLM's sampler compiles one tiny function at the first generate: 10 s and a
            # C++ compiler for nothing measurable. torch reads this when the function is decorated,
            # so before vLLM is imported.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":
        for name in ("vllm", "torch", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\..*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
