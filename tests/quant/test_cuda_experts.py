"""Which kernels vLLM chooses for routed experts on GPUs, as tests/quant/test_cuda_kernels.py asks for dense layers."""

import itertools

import pytest
import torch

from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.kernels.vllm import VllmFactory
from qarl.quant.kernels.vllm_experts import empty_experts
from qarl.quant.kernels.vllm_layers import kernel_name
from qarl.quant.schemes import SCHEMES, get_scheme
from tests.support.cuda_platform import CAPABILITIES, config_of, engines_experts, fits, stub_cuda
from tests.support.kernels import no_cuda

SHAPES = {  # experts, of which a token, hidden columns, columns of an expert
    "tiny-qwen3-moe": (8, 2, 128, 128),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
}
META = torch.device("meta")
LAYOUTS = {ExpertLayout(), ExpertLayout("w1", "w3", "w2")}
numbers = itertools.count()
"""vLLM takes a layer's name once a process."""


@no_cuda
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_learner_and_engine_choose_one_kernel_for_experts(capability: tuple[int, int]):
    """Contract: for every scheme vLLM has experts for, every shape of these mixtures and every family's names of
    matrices. Integer weights are Marlin's on 9.0 too, where vLLM prefers Humming."""
    factory, chosen = VllmFactory(torch.bfloat16), {}
    with stub_cuda(capability):
        for name, model in itertools.product(SCHEMES, SHAPES):
            scheme, (experts, top_k, hidden, columns) = get_scheme(name), SHAPES[model]
            if not fits(scheme, (2 * columns, hidden), (hidden, columns)):
                continue
            for layout in LAYOUTS:
                quantized, shape = config_of(scheme), ExpertsShape(experts, top_k, hidden, columns, "silu", layout)
                with factory._loading(META):
                    try:
                        engine = kernel_name(engines_experts(shape, quantized, f"{next(numbers)}.experts", layout))
                    except (NotImplementedError, ValueError, AssertionError):  # no kernel: `support` refuses the scheme
                        continue
                    learner = empty_experts(f"{next(numbers)}.experts", shape, META, factory._config, quantized)
                assert kernel_name(learner) == engine, (name, model)
                chosen[name, model] = engine
    assert len(chosen) > 30
    assert chosen["w4a16", "Qwen3-30B-A3B"] == chosen["w8a16", "Qwen3-30B-A3B"] == "MarlinExperts"
