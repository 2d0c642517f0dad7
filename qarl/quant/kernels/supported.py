"""Which schemes can run on this machine, and why not: asked of the kernels themselves.

A small layer is materialized, built by vLLM and multiplied once, so the answer, and the words of a
refusal, are vLLM's own. They are the engine's; the learner's kernels are the same, or the
reference, which runs everything.
"""

import dataclasses
import functools
import math
import warnings
from dataclasses import dataclass

import torch

from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.kernels import KernelError, make_factory
from qarl.quant.kernels.vllm_layers import INT8_ACTIVATIONS, QUANTIZED, UNQUANTIZED
from qarl.quant.materialize import materialize
from qarl.quant.materialize.experts import materialize_experts
from qarl.quant.runtime.answers import keep_answer, read_answer
from qarl.quant.runtime.batch_invariance import BATCH_INVARIANT, batch_invariant
from qarl.quant.runtime.libraries import has_vllm
from qarl.quant.schemes import SCHEMES, Scheme, SchemeError, get_scheme

_EXPERTS = "small.experts"
_SHAPE = (256, 256)
_TOKENS = 4
_LONGEST_REASON = 500

_WEIGHT_ONLY_KERNELS = ("Marlin", "A16", "CPUFp8BlockScaledMM", "CPUFp8PerTensor")
"""Parts of the names of vLLM kernels that leave activations in the compute dtype, whatever the
checkpoint says.
"""

_ACTIVATION_KERNELS = ("MxFp4", "Mxfp4", "NvFp4", "CPUExpertsInt4")
"""Of those that quantize activations, unless `_WEIGHT_ONLY_KERNELS` says otherwise."""

_NOTES = {
    "w4a8": "vLLM has it for CPUs alone",
    "w4afp8": "vLLM has it for GPUs of compute capability 9.0 alone",
    "nvfp4": "vLLM has it for NVIDIA GPUs alone",
    "nvfp4a16": "vLLM has it for NVIDIA GPUs alone",
    "mxfp4a16": "vLLM has it for GPUs alone",
}
_REFUSALS = (ValueError, NotImplementedError, RuntimeError, AssertionError)
"""What vLLM refuses a scheme with."""


@dataclass(frozen=True)
class Support:
    """kernel: what multiplies, as the audit names it; "" where nothing can. reason: why not; ""
    where it can. lasting: until machine or software change, not for want of memory just now.
    """

    kernel: str
    reason: str
    lasting: bool = True


@functools.cache
def support(scheme: str, dtype: torch.dtype, experts: bool = False) -> Support:
    """Whether the engine runs the named scheme in `dtype`.

    experts: ask for routed experts instead of a linear layer. Imports vLLM, which takes seconds.
    Leaves torch's random state alone.
    """
    resolved = get_scheme(scheme)
    if not has_vllm():
        return Support(
            "",
            "vLLM, which samples, is not installed here: pip install 'qarl[cpu]' or 'qarl[cuda]'",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    columns = _SHAPE[1]
    x = (
        torch.linspace(-2.0, 3.0, _TOKENS * columns, device=device)
        .cos()
        .view(_TOKENS, columns)
        .to(dtype)
    )
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            kernel, y = (_multiply_experts if experts else _multiply)(x, resolved)
    except KernelError as error:
        return Support("", str(error))
    # what nobody foresaw, too: one scheme's reason, never the end of the question
    except Exception as error:
        words = _in_words(resolved, error)
        if isinstance(error, _REFUSALS) and not isinstance(error, torch.OutOfMemoryError):
            return Support("", words)
        return Support("", f"{type(error).__name__}: {words}", lasting=False)
    if not torch.isfinite(y).all():
        return Support("", f"{kernel} returned NaN or infinity for a small layer")
    reason = _other_arithmetic(resolved, kernel)
    return Support("" if reason else kernel, reason)


def kept_support(scheme: str, dtype: torch.dtype, experts: bool = False) -> Support:
    """`support`, remembered on disk: asked again only where machine or software changed."""
    question = {"scheme": scheme, "dtype": str(dtype), "experts": experts}
    if batch_invariant():
        question["mode"] = BATCH_INVARIANT
    kept = read_answer("support", question)
    if isinstance(kept, dict) and kept.keys() == {"kernel", "reason", "lasting"}:
        return Support(**kept)
    result = support(scheme, dtype, experts)
    if result.lasting:
        keep_answer("support", question, dataclasses.asdict(result))
    return result


def _multiply(x: torch.Tensor, scheme: Scheme) -> tuple[str, torch.Tensor]:
    """The kernel's name and its product of x with a small layer."""
    weight = materialize(_master(_SHAPE, x.device), scheme, x.dtype)
    product = make_factory("vllm", x.dtype).linear("a small layer", [weight], [None])
    return product.name, product(x)


def _multiply_experts(x: torch.Tensor, scheme: Scheme) -> tuple[str, torch.Tensor]:
    """As `_multiply`, of two small experts that see every token."""
    count, columns = 2, _SHAPE[1]
    shape = ExpertsShape(
        experts=count,
        top_k=count,
        hidden=columns,
        intermediate=columns,
        activation="silu",
        layout=ExpertLayout(),
    )
    gate_up = _master((count, 2 * columns, columns), x.device)
    weights = materialize_experts(
        gate_up, _master((count, columns, columns), x.device), scheme, x.dtype, _EXPERTS
    )
    product = make_factory("vllm", x.dtype).experts(_EXPERTS, shape, weights)
    index = torch.arange(count, device=x.device).expand(len(x), count)
    return product.name, product(x, torch.full(index.shape, 0.5, device=x.device), index)


def _master(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Values up to 1/√I, I columns: what leaves the gated experts is far from float16's largest
    number.
    """
    return torch.linspace(-1.0, 1.0, math.prod(shape), device=device).sin().view(shape) / math.sqrt(
        shape[-1]
    )


def require_support(scheme: Scheme, dtype: torch.dtype, experts: bool = False) -> None:
    """Raise `SchemeError` where the engine cannot run `scheme` on this machine.

    experts: for routed experts, which need kernels of their own.
    """
    if scheme.quantization is None:
        return
    reason = kept_support(scheme.name, dtype, experts).reason
    if reason:
        able = [name for name in SCHEMES if not kept_support(name, dtype, experts).reason]
        of = " for a mixture of experts" if experts else ""
        others = f"schemes that can: {', '.join(map(repr, able))}" if able else "no scheme can"
        raise SchemeError(
            f"scheme {scheme.name!r} cannot run in the engine on this machine{of} ({dtype}):"
            f" {reason}; {others}"
        )


def require_cache(kv_cache: str | None) -> None:
    """Raise `SchemeError` where the engine has no such cache of keys and values on this machine."""
    if (
        kv_cache is not None
        and has_vllm()
        and not torch.cuda.is_available()
        and not torch.cpu._is_avx512_supported()
    ):
        raise SchemeError(
            f"quantization.kv_cache {kv_cache!r} cannot run in the engine on this machine: vLLM has"
            " it for CPUs with AVX-512 alone, and for GPUs; leave it out"
        )


def _in_words(scheme: Scheme, error: Exception) -> str:
    """An exception of vLLM's, on one line, with what is known beyond it."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    text = (
        "; ".join(lines)
        .split(" for layer_name=")[0]
        .replace("Reasons:;", "Reasons:")
        .removesuffix(" Reasons:")
    )
    text = text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "…"
    note = _NOTES.get(scheme.name)
    return f"{text.rstrip('.')} ({note})" if note else text or type(error).__name__


def _other_arithmetic(scheme: Scheme, kernel: str) -> str:
    """Why a kernel that runs would not compute what the scheme says; "" where it would."""
    weight_only = UNQUANTIZED in kernel or any(part in kernel for part in _WEIGHT_ONLY_KERNELS)
    if scheme.activations is not None and weight_only:
        return f"vLLM would multiply with {kernel}, which leaves activations in the compute dtype"
    by_name = not weight_only and any(part in kernel for part in _ACTIVATION_KERNELS)
    quantizes = by_name or QUANTIZED in kernel or INT8_ACTIVATIONS in kernel
    if scheme.activations is None and quantizes:
        return f"vLLM would multiply with {kernel}, which quantizes activations"
    if batch_invariant() and BATCH_INVARIANT not in kernel:
        return (
            f"vLLM would multiply with {kernel}, which it does not call batch-invariant, as"
            " `bitwise` asks"
        )
    return ""
