"""Keeps libraries' start-up chatter off a person's terminal. Their errors still come through."""

import logging
import os
import warnings
from pathlib import Path

_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
}


def quiet_libraries() -> None:
    """Call before torch, transformers or vllm are imported. Levels the user set in the environment are kept."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not any(Path("/dev").glob("nvidia[0-9]*")):  # else DeepSpeed warns at every import that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":
        for name in ("vllm", "torch", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\..*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
