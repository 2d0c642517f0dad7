"""Which schemes vLLM runs on a CPU, stated by hand: what the code under test finds out for
itself.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from qarl.quant.kernels.base import Scoring
from qarl.quant.runtime.replaced import replaced
from qarl.quant.schemes import COMPUTE_DTYPES, Scheme
from tests.support.tensors import normal

VLLM_CPU_KERNELS = {
    "bf16": "unquantized",
    "w4a16": "WNA16",
    "w4a16-g64": "WNA16",
    "w4a16-g32": "WNA16",
    "w4a16-channel": "WNA16",
    "w8a8": "Int8ScaledMM",
    "w4a8": "Dynamic4bit",
    "fp8": "FP8ScaledMM",
}
"""Schemes vLLM runs on a CPU with this project's plugin, and part of the name of the kernel."""
CPU_SCHEMES = tuple(VLLM_CPU_KERNELS)
"""The same, for linear layers and for experts."""

AVX512 = torch.cpu._is_avx512_supported()
"""Without it vLLM has no int4 kernel on CPUs, in whose place QaRL has one, and no FP8 cache."""

TRUNCATES = AVX512 and not torch.cpu._is_avx512_bf16_supported()
"""vLLM rounds to bfloat16 toward zero there: the median output of INT4 experts is 1.5 % small."""

no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a CUDA build of vLLM has no CPU kernels"
)


def products(**families: Iterable[str]) -> pytest.MarkDecorator:
    """kernel family = its schemes, each in every compute dtype it has: vLLM's int4 kernel on CPUs
    has no float32.
    """
    return pytest.mark.parametrize(
        ("kernel", "scheme", "dtype"),
        [
            pytest.param(
                kernel,
                scheme,
                dtype,
                marks=[no_cuda] * (kernel == "vllm"),
                id=f"{kernel}-{scheme}-{name}",
            )
            for kernel, schemes in families.items()
            for scheme in schemes
            for name, dtype in COMPUTE_DTYPES.items()
            if (kernel, name) != ("vllm", "float32") or "w4a16" not in scheme
        ],
    )


def needs_cuda(what: str) -> pytest.MarkDecorator:
    """Skip where there is no CUDA device. what: is only there. The skip ends on the first machine
    that has one.
    """
    reason = f"{what}: needs a CUDA device; `make test DEVICE=cuda` on one runs it"
    return pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)


def chosen_kernel(
    factory: Any,
    name: str,
    rows: Sequence[int],
    columns: int,
    scheme: Scheme,
    device: Any,
) -> str:
    """Name of the kernel that vLLM chooses for a layer of parts [rows, columns], of which nothing
    is loaded. factory: a `VllmFactory`. Raises what vLLM raises where it has none.
    """
    from qarl.quant.kernels.vllm_layers import kernel_name

    with factory._loading(device):
        return kernel_name(factory._empty(name, rows, columns, scheme, False))


def attention_depends_on_requests() -> bool:
    """Whether vLLM's CPU attention, without short requests, computes a token decoded alone
    otherwise than one of a whole prompt of 700 tokens: the kernel's tiles of keys are narrower
    then.
    """
    from qarl.quant.kernels import cpu_attention as attention

    q, k, v = (normal(700, n, 128, seed=seed).bfloat16() for seed, n in enumerate((8, 2, 2)))
    scoring = Scoring(scale=128**-0.5)
    with replaced(attention, queries_per_request=lambda *_: 1 << 20):
        whole = attention.cpu_attention(q, k, v, scoring, [700], [700])
        decoded = [
            attention.cpu_attention(
                q[at : at + 1], k[: at + 1], v[: at + 1], scoring, [1], [at + 1]
            )
            for at in range(600, 700)
        ]
    return not torch.equal(torch.cat(decoded), whole[600:])
