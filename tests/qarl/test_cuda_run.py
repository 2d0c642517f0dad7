"""What a run does otherwise on CUDA, without one."""

import pytest
import torch

from rollout.engine import EngineError
from rollout.vllm.options import VllmOptions, llm_arguments, refuse_graphs_over_freed_memory


def test_cuda_graphs_are_of_vllms_own_kernels(monkeypatch: pytest.MonkeyPatch):
    """vLLM's default compiles by Inductor, whose norms round twice; the learner's round once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "compilation_config" not in llm_arguments(VllmOptions())
    arguments = llm_arguments(VllmOptions(enforce_eager=False))
    assert arguments["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL"}
    assert arguments["enforce_eager"] is False


def test_graphs_are_refused_over_memory_that_a_publish_frees():
    kernels = {"MacheteLinearKernel", "HummingLinearKernel, activations in the compute dtype"}
    with pytest.raises(EngineError, match=r"with HummingLinearKernel.*set rollout.enforce_eager true"):
        refuse_graphs_over_freed_memory(VllmOptions(enforce_eager=False), kernels)
    refuse_graphs_over_freed_memory(VllmOptions(enforce_eager=True), kernels)
    refuse_graphs_over_freed_memory(VllmOptions(enforce_eager=False), {"MacheteLinearKernel", "unquantized"})
