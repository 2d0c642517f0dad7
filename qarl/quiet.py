"""Keeps libraries' start-up chatter off a person's terminal. Their errors still come through."""

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Call before torch, transformers or vllm are imported. Levels the user set in the environment are kept."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("TORCH_CPP_LOG_LEVEL", "ERROR"),
        ("DS_ACCELERATOR", "cpu") if not os.path.exists("/dev/nvidia0") else ("DS_LOG_LEVEL", "ERROR"),
    ):
        os.environ.setdefault(name, value)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\..*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
