"""Test of which schemes can run on this machine, by running their kernels.

A small layer is materialized, built by vLLM and multiplied once, so the answer and the text of a
refusal are vLLM's own. The answer is for the engine. The learner's kernels are the same, or the
reference, which runs every scheme.
"""

import dataclasses
import functools
import math
import warnings
from dataclasses import dataclass

import torch

from qarl.configs.schemes import SCHEME_SPECS
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
"""Name of the experts under test."""
_SHAPE = (256, 256)
"""Shape of the layer under test: output rows, input columns."""
_TOKENS = 4
"""Number of tokens that the layer multiplies."""
_LONGEST_REASON = 500
"""Largest number of characters of vLLM's message that a reason quotes."""

_WEIGHT_ONLY_KERNELS = ("Marlin", "A16", "CPUFp8BlockScaledMM", "CPUFp8PerTensor")
"""Parts of the names of vLLM kernels that leave activations in the compute dtype, even if the
checkpoint says otherwise.
"""

_ACTIVATION_KERNELS = ("MxFp4", "Mxfp4", "NvFp4", "CPUExpertsInt4")
"""Parts of the names of vLLM kernels that quantize activations, unless the name also has a part in
`_WEIGHT_ONLY_KERNELS`.
"""

_REFUSALS = (ValueError, NotImplementedError, RuntimeError, AssertionError)
"""Exceptions that vLLM raises when it refuses a scheme."""


@dataclass(frozen=True)
class Support:
    """Answer to whether a scheme can run."""

    kernel: str
    """Name of the kernel, as the audit prints it; "" if the scheme cannot run."""
    reason: str
    """Why the scheme cannot run; "" if it can."""
    lasting: bool = True
    """True if the answer holds until machine or software change; False if, for example, memory was
    short.
    """


@functools.cache
def support(scheme: str, dtype: torch.dtype, experts: bool = False) -> Support:
    """Return whether the engine can run the named scheme in `dtype`, for a linear layer.

    experts: test routed experts instead of a linear layer. Imports vLLM, which takes seconds. Does
    not change torch's random state. Raises `InstallError` if vLLM's operators cannot be loaded.
    """
    resolved = get_scheme(scheme)
    if not has_vllm():
        return Support(
            "",
            "vLLM, which samples, is not installed here: pip install 'qarl-train[cpu]' or"
            " 'qarl-train[cuda]'",
        )
    from qarl.quant.kernels.vllm_cpu.library import require_operators

    require_operators()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    columns = _SHAPE[1]
    values = torch.linspace(-2.0, 3.0, _TOKENS * columns, device=device).cos()
    x = values.view(_TOKENS, columns).to(dtype)
    multiply = _multiply_experts if experts else _multiply
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            kernel, y = multiply(x, resolved)
    except KernelError as error:
        return Support("", str(error))
    # An unforeseen error is one scheme's reason too; it must not stop the test of other schemes.
    except Exception as error:
        words = _in_words(resolved, error)
        if isinstance(error, _REFUSALS) and not isinstance(error, torch.OutOfMemoryError):
            return Support("", words)
        return Support("", f"{type(error).__name__}: {words}", lasting=False)
    if not torch.isfinite(y).all():
        return Support("", f"{kernel} returned NaN or infinity for a small layer")
    reason = _other_arithmetic(resolved, kernel)
    return Support("" if reason else kernel, reason)


@functools.cache
def shape_refusal(scheme: str, dtype: torch.dtype, shape: tuple[int, int]) -> str:
    """Return vLLM's reason for having no kernel for a linear weight of this shape; "" if it has.

    shape: (O, I).
    """
    from qarl.quant.kernels.vllm import VllmFactory

    resolved = get_scheme(scheme)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            VllmFactory(dtype).require_shape(resolved, shape)
    except (ValueError, NotImplementedError) as error:
        return _in_words(resolved, error)
    return ""


@functools.cache
def packs_bias(scheme: str, dtype: torch.dtype) -> bool:
    """Return whether vLLM's kernel of a scheme packs a layer's bias into the weight.

    It then adds the bias where it is asked for none, too, as on each rank of a row-parallel layer.
    A small layer with a bias is built and multiplied. Raises what vLLM raises if it has no kernel.
    """
    from qarl.quant.kernels.vllm import VllmFactory

    resolved = get_scheme(scheme)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = materialize(_master(_SHAPE, device), resolved, dtype)
    bias = torch.full(_SHAPE[:1], 1000.0, dtype=dtype, device=device)
    x = torch.ones((_TOKENS, _SHAPE[1]), dtype=dtype, device=device)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        layer = VllmFactory(dtype).linear("a small layer", [weight], [bias])
        # of 256 terms that are at most 1/16 each, a product without the bias is at most 16
        return bool((layer.unbiased(x) > 500).all())


def kept_support(scheme: str, dtype: torch.dtype, experts: bool = False) -> Support:
    """Return `support`'s answer, from the cache on disk if machine and software are the same."""
    question = {"scheme": scheme, "dtype": str(dtype), "experts": experts}
    if batch_invariant():
        question["mode"] = BATCH_INVARIANT
    cached = read_answer("support", question)
    if isinstance(cached, dict) and cached.keys() == {"kernel", "reason", "lasting"}:
        return Support(**cached)
    result = support(scheme, dtype, experts)
    if result.lasting:
        keep_answer("support", question, dataclasses.asdict(result))
    return result


def _multiply(x: torch.Tensor, scheme: Scheme) -> tuple[str, torch.Tensor]:
    """Return the name of the kernel and its product of x with a small layer."""
    weight = materialize(_master(_SHAPE, x.device), scheme, x.dtype)
    kernel = make_factory("vllm", x.dtype).linear("a small layer", [weight], [None])
    return kernel.name, kernel(x)


def _multiply_experts(x: torch.Tensor, scheme: Scheme) -> tuple[str, torch.Tensor]:
    """Return the same as `_multiply`, for two small experts that get every token."""
    count = 2
    columns = _SHAPE[1]
    shape = ExpertsShape(
        experts=count,
        top_k=count,
        hidden=columns,
        intermediate=columns,
        activation="silu",
        layout=ExpertLayout(),
    )
    gate_up = _master((count, 2 * columns, columns), x.device)
    down = _master((count, columns, columns), x.device)
    weights = materialize_experts(gate_up, down, scheme, x.dtype, _EXPERTS)
    kernel = make_factory("vllm", x.dtype).experts(_EXPERTS, shape, weights)
    index = torch.arange(count, device=x.device).expand(len(x), count)
    halves = torch.full(index.shape, 0.5, device=x.device)
    return kernel.name, kernel(x, halves, index)


def _master(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a master whose values are at most 1/√I, with I columns.

    The output of gated experts then stays far below float16's largest number.
    """
    values = torch.linspace(-1.0, 1.0, math.prod(shape), device=device).sin().view(shape)
    return values / math.sqrt(shape[-1])


def require_support(scheme: Scheme, dtype: torch.dtype, experts: bool = False) -> None:
    """Raise `SchemeError` if the engine cannot run `scheme` on this machine.

    experts: require support for routed experts, which have separate kernels.
    """
    if scheme.quantization is None:
        return
    reason = kept_support(scheme.name, dtype, experts).reason
    if reason:
        able = [name for name in SCHEMES if not kept_support(name, dtype, experts).reason]
        subject = " for a mixture of experts" if experts else ""
        remedy = f"schemes that can: {', '.join(map(repr, able))}" if able else "no scheme can"
        raise SchemeError(
            f"scheme {scheme.name!r} cannot run in the engine on this machine{subject} ({dtype}):"
            f" {reason}; {remedy}"
        )


def require_cache(kv_cache: str | None) -> None:
    """Raise `SchemeError` if the engine lacks this kind of key-value cache on this machine."""
    if (
        kv_cache is not None
        and has_vllm()
        and not torch.cuda.is_available()
        and not torch.cpu._is_avx512_supported()
    ):
        raise SchemeError(
            f"quantization.kv_cache {kv_cache!r} cannot run in the engine on this machine: vLLM has"
            " it for CPUs with AVX-512 alone, and for GPUs; omit it"
        )


def _in_words(scheme: Scheme, error: Exception) -> str:
    """Return vLLM's message on one line, with the machines that vLLM has the scheme for."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    text = (
        "; ".join(lines)
        .split(" for layer_name=")[0]
        .replace("Reasons:;", "Reasons:")
        .removesuffix(" Reasons:")
    )
    text = text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "…"
    only = SCHEME_SPECS[scheme.name].only
    if not only:
        return text or type(error).__name__
    return f"{text.rstrip('.')} (vLLM has it for {only} alone)"


def _other_arithmetic(scheme: Scheme, kernel: str) -> str:
    """Return why a kernel that runs does not compute what the scheme says; "" if it does."""
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
