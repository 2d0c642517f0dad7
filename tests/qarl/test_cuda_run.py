"""What a run does otherwise on CUDA, without one."""

from pathlib import Path

import pytest
import torch

from qarl.advice import mismatch
from qarl.configs.load import load_config
from qarl.configs.schema.run import RolloutConfig
from qarl.rollout.vllm.options import VllmOptions, llm_arguments


def test_cuda_graphs_are_of_vllms_own_kernels(monkeypatch: pytest.MonkeyPatch):
    """vLLM's default compiles by Inductor, whose norms round twice; the learner's round once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not {"compilation_config", "kernel_config"} & llm_arguments(VllmOptions()).keys()
    arguments = llm_arguments(VllmOptions(RolloutConfig(enforce_eager=False)))
    assert arguments["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL"}
    assert arguments["enforce_eager"] is False


def test_learners_that_are_compared_are_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`qarl mismatch` and `qarl check --sample` multiply with vLLM's kernels for it."""
    devices = []

    def load(folder: Path, dtype: torch.dtype, device: torch.device | None = None) -> None:
        devices.append(device)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mismatch, "load_masters", load)
    monkeypatch.setattr(mismatch, "model_folder", lambda *_: tmp_path)
    monkeypatch.setattr(mismatch, "open_prompter", lambda *_: None)
    with pytest.raises(InterruptedError):
        mismatch.investigate(load_config(None, {}))
    assert devices == [torch.device("cuda", 0)]
