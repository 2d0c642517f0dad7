"""What vLLM's fused experts on GPUs take from a step of its engine, for products outside of one: scratch memory, and
the context of the step's forward.

The scratch is not the engine's. That one is locked once the engine has warmed up, at the size of its own batches, and
CUDA graphs hold its address.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.config import CompilationConfig, CompilationMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.worker import workspace


@contextmanager
def engine_step(device: torch.device, tokens: int) -> Iterator[None]:
    """Within this context vLLM's layers find what they would in a step over so many tokens. Nothing on CPUs, whose
    experts take neither."""
    if current_platform.is_cpu():
        yield
        return
    engines, workspace._manager = workspace._manager, _scratch(device)
    try:
        with set_forward_context(None, _config(), num_tokens=tokens):
            yield
    finally:
        workspace._manager = engines


@functools.cache
def _scratch(device: torch.device) -> workspace.WorkspaceManager:
    """Grows to the largest batch and stays: the next layer takes the same."""
    return workspace.WorkspaceManager(device)


@functools.cache
def _config() -> VllmConfig:
    return VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
