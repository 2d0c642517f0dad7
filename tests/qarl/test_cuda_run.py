"""Differences of a run on CUDA, tested without a GPU."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import vllm.config.vllm
from transformers import Qwen3Config
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from qarl.configs.load import load_config
from qarl.configs.schema.rollout import RolloutConfig
from qarl.mismatch import investigate as mismatch
from qarl.rollout.vllm.options import VllmOptions, llm_arguments
from tests.support.cuda_platform import CAPABILITIES, stub_cuda
from tests.support.kernels import no_cuda
from tests.support.models import SIZES


@no_cuda
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_an_engines_configuration(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Contract, as vLLM's own CUDA platform resolves it: CUDA graphs of vLLM's own kernels, for no
    more sequences than decode at once, nothing compiled by Inductor, whose norms round twice; a
    runner and a scheduler that CPUs have not. Blind spot: attention, whose kernels are in the CUDA
    wheel.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)

    arguments = llm_arguments(VllmOptions(RolloutConfig(max_prompt_tokens=20, max_new_tokens=20)))
    arguments = {
        key: value for key, value in arguments.items() if key in EngineArgs.__dataclass_fields__
    }
    with stub_cuda(capability):
        config = EngineArgs(model=str(tmp_path), **arguments).create_engine_config(
            UsageContext.LLM_CLASS
        )
    graphs = config.compilation_config
    scheduler = config.scheduler_config
    assert graphs.mode == CompilationMode.NONE
    assert graphs.cudagraph_mode == CUDAGraphMode.FULL
    assert graphs.max_cudagraph_capture_size == 256
    assert len(graphs.cudagraph_capture_sizes or ()) == 35
    assert config.use_v2_model_runner
    assert scheduler.async_scheduling
    assert scheduler.enable_chunked_prefill
    assert config.kernel_config.ir_op_priority.rms_norm == ["vllm_c", "native"]


def test_learners_that_are_compared_are_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`qarl mismatch` and `qarl check --sample` multiply with vLLM's kernels for it."""
    devices = []

    def load(
        folder: Path,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        devices.append(device)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mismatch, "load_masters", load)
    with pytest.raises(InterruptedError):
        mismatch.investigate(load_config(None, {}), Mock(folder=tmp_path))
    assert devices == [torch.device("cuda", 0)]
