"""Schemes that vLLM runs on a CPU, stated by hand.

The code under test finds this out for itself.
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
"""Schemes that vLLM runs on a CPU with this project's plugin → part of the kernel's name."""
CPU_SCHEMES = tuple(VLLM_CPU_KERNELS)
"""The same schemes, for linear layers and for experts."""

AVX512 = torch.cpu._is_avx512_supported()
"""True if the CPU has AVX-512.

Without it vLLM has no int4 kernel on CPUs, for which QaRL has a substitute, and no FP8 cache.
"""

TRUNCATES = AVX512 and not torch.cpu._is_avx512_bf16_supported()
"""True if vLLM rounds to bfloat16 toward zero on this CPU.

The median output of INT4 experts is then 1.5 % too small.
"""

no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a CUDA build of vLLM has no CPU kernels"
)


def products(**families: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test over kernel, scheme and compute dtype.

    families: kernel family = its schemes, each with every compute dtype that it has. vLLM's int4
    kernel on CPUs has no float32.
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
    """Skip if there is no CUDA device.

    `what` names the thing that exists only there. The skip ends on the first machine that has one.
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
    """Return the name of the kernel that vLLM chooses for a layer of parts [rows, columns], without
    loading anything. factory: a `VllmFactory`. Raises vLLM's error if it has no kernel.
    """
    from qarl.quant.kernels.vllm_layers import kernel_name

    with factory._loading(device):
        return kernel_name(factory._empty(name, rows, columns, scheme, False))


def attention_depends_on_requests() -> bool:
    """Return whether vLLM's CPU attention, without short requests, computes a token that is decoded
    by itself differently from a token of a whole prompt. If so, the kernel's tiles of keys are
    wider when decoding.

    A prompt has to be longer than a tile, whose width grows with the machine's level-2 cache: with
    1 MiB it is 320 keys, so longer and longer prompts are tried.
    """
    return any(_last_tokens_depend_on_requests(tokens) for tokens in (700, 3000, 12_000))


def _last_tokens_depend_on_requests(tokens: int, last: int = 100) -> bool:
    from qarl.quant.kernels import cpu_attention as attention

    q = normal(tokens, 8, 128, seed=0).bfloat16()
    k = normal(tokens, 2, 128, seed=1).bfloat16()
    v = normal(tokens, 2, 128, seed=2).bfloat16()
    scoring = Scoring(scale=128**-0.5)
    with replaced(attention, queries_per_request=lambda *_: 1 << 20):
        whole = attention.cpu_attention(q, k, v, scoring, [tokens], [tokens])
        decoded = []
        for position in range(tokens - last, tokens):
            seen = position + 1
            query = q[position:seen]
            decoded.append(attention.cpu_attention(query, k[:seen], v[:seen], scoring, [1], [seen]))
    return not torch.equal(torch.cat(decoded), whole[-last:])
