"""Tests of the kernels that vLLM chooses on GPUs, by vLLM's own selection under a stand-in for the
platform; of what its experts need outside an engine's step; and of its batch-invariant mode on both
sides (`bitwise`).

Blind spot: whether those kernels run, what they compute, and whether bits are equal (tests/gpu).
"""

import itertools
import json
import runpy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.determinism import batch_invariant_configs
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEKernelModularImpl,
)
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.utils import torch_utils
from vllm.utils.flashinfer import has_flashinfer
from vllm.v1.worker import workspace

from qarl.configs.errors import ConfigError, InputError
from qarl.configs.load import load_config
from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.kernels import flash_attention, supported, vllm_experts
from qarl.quant.kernels.base import Scoring
from qarl.quant.kernels.supported import support
from qarl.quant.kernels.vllm import VllmFactory, VllmMatmul
from qarl.quant.kernels.vllm_experts import empty_experts
from qarl.quant.kernels.vllm_gpu import settle
from qarl.quant.kernels.vllm_layers import QUANTIZED, UNQUANTIZED, kernel_name
from qarl.quant.runtime.batch_invariance import BATCH_INVARIANT, batch_invariant
from qarl.quant.schemes import SCHEMES, Scheme, get_scheme
from qarl.rollout.vllm.options import VllmOptions, llm_arguments
from qarl.run.policy import enable_batch_invariance
from tests.support.cuda_platform import (
    CAPABILITIES,
    config_of,
    engines_experts,
    fits,
    stub_cuda,
)
from tests.support.kernels import chosen_kernel, no_cuda
from tests.support.runs import ROOT

SHAPES = {
    "tiny-qwen3": (128, 2, 1, 64, 256),
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072),
    "Qwen3-1.7B": (2048, 16, 8, 128, 6144),
    "Qwen3-4B": (2560, 32, 8, 128, 9728),
    "Qwen3-8B": (4096, 32, 8, 128, 12288),
    "Qwen3-14B": (5120, 40, 8, 128, 17408),
    "Qwen3-30B-A3B": (2048, 32, 4, 128, 6144),
    "Qwen2.5-Math-1.5B": (1536, 12, 2, 128, 8960),
    "Qwen2.5-Math-7B": (3584, 28, 4, 128, 18944),
    "Qwen2.5-Math-72B": (8192, 64, 8, 128, 29568),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192),
    "Llama-3.2-3B": (3072, 24, 8, 128, 8192),
    "Llama-3.1-8B": (4096, 32, 8, 128, 14336),
    "Llama-3.1-70B": (8192, 64, 8, 128, 28672),
    "Mixtral-8x7B": (4096, 32, 8, 128, 14336),
}
"""Model → hidden columns, heads, key/value heads, head size, columns of the MLP."""
META = torch.device("meta")


def engines_layers(factory: VllmFactory, model: str, scheme: Scheme) -> dict[str, nn.Module]:
    """Return the layers as vLLM's decoders of these families build them, without tensor
    parallelism.
    """
    hidden, heads, kv_heads, size, inner = SHAPES[model]
    quantized = factory._quant_config(scheme)
    shared = {
        "bias": False,
        "params_dtype": torch.bfloat16,
        "quant_config": quantized,
        "disable_tp": True,
    }
    return {
        "qkv_proj": QKVParallelLinear(hidden, size, heads, kv_heads, prefix="qkv_proj", **shared),
        "o_proj": RowParallelLinear(heads * size, hidden, prefix="o_proj", **shared),
        "gate_up_proj": MergedColumnParallelLinear(
            hidden, [inner] * 2, prefix="gate_up_proj", **shared
        ),
        "down_proj": RowParallelLinear(inner, hidden, prefix="down_proj", **shared),
    }


def learners_parts(model: str) -> dict[str, tuple[list[int], int]]:
    """Return the rows of each matrix of a stack that a learner multiplies at
    once, and its columns.
    """
    hidden, heads, kv_heads, size, inner = SHAPES[model]
    return {
        "qkv_proj": ([heads * size, kv_heads * size, kv_heads * size], hidden),
        "o_proj": ([hidden], heads * size),
        "gate_up_proj": ([inner, inner], hidden),
        "down_proj": ([hidden], inner),
    }


@no_cuda
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_learner_and_engine_choose_one_kernel(capability: tuple[int, int]):
    """Contract: learner and engine choose the same kernel for every scheme vLLM has a kernel for
    and for every shape of these models. Without stacks this fails on 9.0, where Machete needs rows
    in multiples of 128 and tiny-qwen3's k and v have 64.
    """
    factory = VllmFactory(torch.bfloat16)
    compared = 0
    with stub_cuda(capability):
        for scheme in map(get_scheme, SCHEMES):
            for model in SHAPES:
                parts = learners_parts(model)
                if not fits(
                    scheme,
                    *((part, columns) for rows, columns in parts.values() for part in rows),
                ):
                    continue
                try:
                    with factory._loading(META):
                        engine = {
                            n: kernel_name(layer)
                            for n, layer in engines_layers(factory, model, scheme).items()
                        }
                # no kernel: `support` refuses the scheme
                except (NotImplementedError, ValueError):
                    continue
                learner = {
                    name: chosen_kernel(factory, name, *part, scheme, META)
                    for name, part in parts.items()
                }
                assert learner == engine, (scheme.name, model)
                compared += 1
    assert compared > 80


@no_cuda
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_wheel_has_code_for_the_kernels_that_are_chosen(capability: tuple[int, int]):
    """Contract: the wheel's record, by scripts/wheel_kernels.py, has machine code or PTX for every
    kernel that vLLM chooses for a scheme there.
    """
    script = runpy.run_path(str(ROOT / "scripts/wheel_kernels.py"))
    record = json.loads((ROOT / "benchmarks/records/wheel-0.32.0.json").read_text())["data"][
        "kernels"
    ]
    factory = VllmFactory(torch.bfloat16)
    compared = 0
    with stub_cuda(capability):
        for scheme in map(get_scheme, SCHEMES):
            try:
                chosen = chosen_kernel(factory, "layer", [1024], 1024, scheme, META)
            except (NotImplementedError, ValueError):  # no kernel: `support` refuses the scheme
                continue
            name = chosen.partition(",")[0]
            if name in script["MADE_AT_RUN_TIME"] or not name.endswith("Kernel"):
                continue
            kernel = script["SAME_CODE"].get(name, name)
            assert record[kernel]["{}.{}".format(*capability)], (scheme.name, chosen)
            compared += 1
    assert compared > 5


@no_cuda
def test_one_layer_of_a_stack_alone_would_take_another_kernel():
    """Contract: a single layer of a stack would take another kernel, so the test above can fail."""
    factory = VllmFactory(torch.bfloat16)
    scheme = get_scheme("w4a16")
    with stub_cuda((9, 0)):
        names = [
            chosen_kernel(factory, "layer", rows, 128, scheme, META)
            for rows in ([128, 64, 64], [64])
        ]
    assert names == ["MacheteLinearKernel", "HummingLinearKernel"]


@no_cuda
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_w8a8_takes_triton_where_cutlass_has_no_int8(capability: tuple[int, int]):
    """Contract: vLLM's choice on 10.0 would raise at the first product."""
    factory = VllmFactory(torch.bfloat16)
    with stub_cuda(capability):
        name = chosen_kernel(factory, "layer", [256], 256, get_scheme("w8a8"), META)
    library = "Triton" if capability >= (10, 0) else "Cutlass"
    assert name == f"{library}Int8ScaledMMLinearKernel"


@no_cuda
def test_batch_invariant_products_have_one_tile_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: vLLM's settings by number of rows, which for Qwen3-1.7B's shapes give decoding
    another tensor-core instruction than prompts, are left out.
    """
    for name in ("_TUNED_MATMUL_CONFIGS_FOR_DEVICE", "_TUNED_MATMUL_CONFIGS_RESOLVED"):
        monkeypatch.setattr(batch_invariant_configs, name, getattr(batch_invariant_configs, name))
    tiles = []
    with stub_cuda((9, 0)):
        for mode in ("0", "1"):
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", mode)
            batch_invariant_configs._TUNED_MATMUL_CONFIGS_RESOLVED = False
            settle()
            chosen = (
                batch_invariant_configs._get_matmul_config(
                    rows, 2048, 2048, torch.bfloat16, {"BLOCK_SIZE_M": 128}
                )["BLOCK_SIZE_M"]
                for rows in (1, 2048)
            )
            tiles.append(tuple(chosen))
    assert tiles == [(16, 64), (128, 128)]


@no_cuda
def test_flashinfer_is_left_out_though_vllm_finds_it(monkeypatch: pytest.MonkeyPatch):
    """Contract: kernels do not depend on FlashInfer, which vLLM finds or not depending on the
    shell's PATH.
    """
    package = ModuleType("flashinfer")
    package.__spec__ = ModuleSpec("flashinfer", None)
    factory = VllmFactory(torch.bfloat16)
    scheme = get_scheme("nvfp4")
    names = []
    for _ in range(2):
        with stub_cuda((10, 0)):
            names.append(chosen_kernel(factory, "layer", [256], 256, scheme, META))
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
        assert has_flashinfer()
        has_flashinfer.cache_clear()
    assert names == ["CutlassNvFp4LinearKernel"] * 2


@pytest.mark.parametrize(
    "error",
    [
        KeyError("triton"),
        AttributeError("no attribute 'hf_text_config'"),
        OSError("gcc"),
    ],
)
def test_any_error_of_a_probe_becomes_the_reason(error: Exception, monkeypatch: pytest.MonkeyPatch):
    """Contract: an error while probing one scheme neither ends `qarl schemes` nor hides the other
    schemes.
    """

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(supported, "make_factory", fails)
    found = support.__wrapped__("w4a16", torch.bfloat16)
    assert found.kernel == ""
    assert found.reason.startswith(type(error).__name__)
    assert str(error) in found.reason


class HummingKernel:
    """Stand-in for a loaded Humming kernel: its configuration, not its class, says what it does
    with activations.
    """

    def __init__(self, quantizes: bool, experts: bool = False):
        config = SimpleNamespace(input_quant_mode=SimpleNamespace(should_quantize=quantizes))
        if experts:
            self.humming_configs = {"w13": config, "w2": config}
        else:
            self.layer_config = config


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(
    ("scheme", "quantizes", "said"),
    [
        ("nvfp4a16", False, ""),
        ("nvfp4a16", True, "quantizes activations"),
        ("nvfp4", True, ""),
        ("nvfp4", False, "leaves activations in the compute dtype"),
        ("mxfp4a16", False, ""),
        ("w4a16", False, ""),
    ],
)
def test_hummings_activations_are_read_from_its_configuration(
    scheme: str, quantizes: bool, said: str, experts: bool
):
    kernel = HummingKernel(quantizes, experts)
    method = (
        SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))
        if experts
        else SimpleNamespace()
    )
    layer = SimpleNamespace(quant_method=method, scheme=SimpleNamespace(kernel=kernel))
    name = kernel_name(layer)
    assert name == f"HummingKernel, {QUANTIZED if quantizes else UNQUANTIZED}"
    reason = supported._other_arithmetic(get_scheme(scheme), name)
    assert (said in reason) if said else reason == ""


@no_cuda
def test_experts_find_scratch_and_a_context_outside_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: vLLM's own allocation of scratch memory and Humming's read of the forward context
    succeed without an engine, and beside an engine whose scratch is locked. Afterwards everything
    is unchanged.
    """
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    vllm_experts.uncompiled_config.cache_clear()
    kernel = SimpleNamespace(
        fused_experts=SimpleNamespace(
            workspace_dtype=lambda dtype: dtype,
            workspace_shapes=lambda m, n, k, top_k, *_: (
                (m, top_k, n),
                (m, top_k, n // 2),
                (m, k),
            ),
            finalize_weight_and_reduce_impl=lambda: None,
        ),
        prepare_finalize=SimpleNamespace(allocate_fused_expert_output=lambda *_: None),
    )

    cpu = torch.device("cpu")
    arguments: Any = (
        kernel,
        torch.bfloat16,
        cpu,
        40,
        40,
        64,
        32,
        2,
        4,
        4,
        None,
        None,
    )

    def allocate() -> tuple[torch.Size, ...]:
        return tuple(
            tensor.shape for tensor in FusedMoEKernelModularImpl._allocate_buffers(*arguments)[:3]
        )

    with stub_cuda((9, 0)):
        with pytest.raises(AssertionError, match="WorkspaceManager not initialized"):
            allocate()
        for engines in (None, workspace.WorkspaceManager(cpu)):
            monkeypatch.setattr(workspace, "_manager", engines)
            if engines is not None:
                engines.lock()
            with vllm_experts.engine_step(cpu, 40):
                assert allocate() == ((40, 2, 64), (40, 2, 32), (40, 32))
                assert get_forward_context().dp_metadata is None
            assert workspace._manager is engines
            assert not is_forward_context_available()


@no_cuda
@pytest.mark.parametrize("kind", [VllmMatmul, vllm_experts.VllmExperts])
def test_a_recomputed_product_stays_on_its_threads_stream(
    kind: Any, monkeypatch: pytest.MonkeyPatch
):
    """Contract: if a checkpointed layer is recomputed in a thread of autograd's, Marlin's locks
    change the stream of that thread only and are not taken from the engine's manager, which graphs
    have locked. Otherwise vLLM would set a new stream, and autograd's next operator would read what
    that stream has not yet written. Blind spot: the kernel itself.
    """
    thread = threading.local()
    locks = set()
    monkeypatch.setattr(
        torch.cuda,
        "Stream",
        type("Stream", (), {"wait_stream": lambda new, other: None}),
    )
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device=None: getattr(thread, "stream", "torch's"),
    )
    monkeypatch.setattr(
        torch_utils, "prev_set_stream", lambda stream: setattr(thread, "stream", stream)
    )
    monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())

    def multiply(x: torch.Tensor, *_: object) -> torch.Tensor:
        locks.add(marlin_utils.get_marlin_workspace(x.device).data_ptr())
        return x * x

    def backward(y: torch.Tensor) -> tuple[Any, Any]:
        thread.stream = "autograd's"
        y.sum().backward()
        return thread.stream, getattr(torch_utils._current_stream_tls, "value", None)

    method = SimpleNamespace(
        apply=lambda layer, *args: multiply(*args),
        is_monolithic=False,
        topk_indices_dtype=None,
    )
    layer: Any = SimpleNamespace(quant_method=method, forward_modular=multiply)
    routed = (
        ()
        if kind is VllmMatmul
        else (
            torch.ones(3, 1),
            torch.zeros(3, 1),
        )
    )
    engines = workspace.WorkspaceManager(torch.device("cpu"))
    engines.lock()
    monkeypatch.setattr(workspace, "_manager", engines)
    with stub_cuda((8, 0)), ThreadPoolExecutor(1) as autograd:
        y = checkpoint(
            kind(layer),
            torch.ones(3, 4, requires_grad=True),
            *routed,
            use_reentrant=False,
        )
        assert autograd.submit(backward, y).result() == ("autograd's", None)
    assert len(locks) == 2, "streams that may run at once have locks of their own"
    assert torch.cuda.current_stream() == "torch's"
    assert workspace._manager is engines


MIXTURES = {
    "tiny-qwen3-moe": (8, 2, 128, 128),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
}
"""Model → experts, experts per token, hidden columns, columns of an expert."""
LAYOUTS = {ExpertLayout(), ExpertLayout("w1", "w3", "w2")}
numbers = itertools.count()
"""Counter for unique layer names, because vLLM accepts a name only once per process."""


@no_cuda
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_learner_and_engine_choose_one_kernel_for_experts(capability: tuple[int, int]):
    """Contract: this holds for every scheme vLLM has experts for, every shape of these mixtures and
    every family's names of matrices. Integer weights take Marlin on 9.0 too, where vLLM prefers
    Humming.
    """
    factory = VllmFactory(torch.bfloat16)
    chosen = {}
    with stub_cuda(capability):
        for name, model in itertools.product(SCHEMES, MIXTURES):
            scheme = get_scheme(name)
            experts, top_k, hidden, columns = MIXTURES[model]
            if not fits(scheme, (2 * columns, hidden), (hidden, columns)):
                continue
            for layout in LAYOUTS:
                quantized = config_of(scheme)
                shape = ExpertsShape(experts, top_k, hidden, columns, "silu", layout)
                with factory._loading(META):
                    try:
                        engine = kernel_name(
                            engines_experts(shape, quantized, f"{next(numbers)}.experts", layout)
                        )
                    # no kernel: `support` refuses the scheme
                    except (NotImplementedError, ValueError, AssertionError):
                        continue
                    learner = empty_experts(
                        f"{next(numbers)}.experts",
                        shape,
                        META,
                        factory._config,
                        quantized,
                    )
                assert kernel_name(learner) == engine, (name, model)
                chosen[name, model] = engine
    assert len(chosen) > 30
    assert chosen["w4a16", "Qwen3-30B-A3B"] == chosen["w8a16", "Qwen3-30B-A3B"] == "MarlinExperts"


BF16 = torch.bfloat16
QKV = ([2048, 1024, 1024], 2048)
_BOTH = {
    "bf16",
    "w4a16",
    "w4a16-g64",
    "w4a16-g32",
    "w4a16-channel",
    "w8a16",
    "w4a8",
    "w8a8",
    "fp8",
}
KEEP = {
    (9, 0): _BOTH | {"w4afp8", "mxfp4a16"},
    (10, 0): _BOTH | {"nvfp4"},
}
"""Schemes whose kernels for Qwen3-1.7B's qkv are batch-invariant."""


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


@no_cuda
@pytest.mark.parametrize("capability", KEEP, ids=str)
def test_schemes_without_a_batch_invariant_kernel_are_refused(
    capability: tuple[int, int], mode: None
):
    """Contract: int4 and int8 weights take Humming instead of Machete and Marlin.

    Other schemes are refused before anything loads unless vLLM calls their kernel batch-invariant.
    """
    # before the stand-in: vLLM's plugins are loaded for this platform
    factory = VllmFactory(BF16)
    names = {}
    with stub_cuda(capability):
        for scheme in map(get_scheme, SCHEMES):
            try:
                names[scheme.name] = chosen_kernel(factory, "layer", *QKV, scheme, META)
            except (NotImplementedError, ValueError):
                continue
            refused = "as `bitwise` asks" in supported._other_arithmetic(scheme, names[scheme.name])
            assert refused != (BATCH_INVARIANT in names[scheme.name])
    assert {name for name, kernel in names.items() if BATCH_INVARIANT in kernel} == KEEP[
        capability
    ], names
    assert names["w4a16"] == f"HummingLinearKernel, {BATCH_INVARIANT}"


def test_the_engines_arguments_choose_the_learners_kernels(mode: None):
    """Contract: by vLLM's own reading of the arguments, attention uses the kernel that the learner
    calls, and weights the same backend.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    arguments = llm_arguments(VllmOptions())
    known = EngineArgs(
        model="none",
        **{name: arguments[name] for name in ("attention_backend", "kernel_config")},
    )
    assert known.kernel_config.linear_backend_per_quant == {"mixed_precision": "humming"}
    assert AttentionBackendEnum[arguments["attention_backend"]] is AttentionBackendEnum.FLASH_ATTN


def test_attention_does_not_split_keys_in_batch_invariant_mode(
    mode: None, monkeypatch: pytest.MonkeyPatch
):
    """Contract: attention does not split keys.

    Norms are vLLM's own modules, which read the mode themselves.
    """
    from vllm.v1.attention.backends import fa_utils

    splits = []
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **needed: 3)
    kernel = "flash_attn_varlen_func"
    monkeypatch.setattr(
        fa_utils, kernel, lambda **how: splits.append(how["num_splits"]), raising=False
    )
    q = torch.zeros(6, 1, 8, dtype=BF16)
    scoring = Scoring(scale=1.0)
    flash_attention.flash_attention(q, q, q, None, scoring, [6], [6])
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    flash_attention.flash_attention(q, q, q, None, scoring, [6], [6])
    assert splits == [1, 0]


@pytest.mark.parametrize(
    ("capability", "on"),
    [((8, 0), False), ((9, 0), True)],
)
def test_batch_invariant_mode_needs_a_gpu_of_capability_9(
    capability: tuple[int, int], on: bool, monkeypatch
):
    config = load_config(None, {"bitwise": "true"})
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "0")  # put back at the end
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    enable_batch_invariance(config)
    assert not batch_invariant(), "CPUs have nothing to turn on"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if on:
        enable_batch_invariance(config)
    else:
        with pytest.raises(ConfigError, match=r"capability 8\.0: below 9\.0 .* without a backward"):
            enable_batch_invariance(config)
    assert batch_invariant() is on


@pytest.mark.parametrize(
    "other",
    [
        {"learner.aligned": "false"},
        {"learner.kernel": "reference"},
        {"learner.operators": "transformers"},
        {"rollout.servers": "2"},
        {"rollout.router_replay": "true", "rollout.prefix_caching": "false"},
        {"sync.gate_bound": "0.1"},
    ],
)
def test_settings_without_bitwise_equality_are_refused(other: dict[str, str]):
    with pytest.raises(InputError, match=f"bitwise true: .*{next(iter(other))}"):
        load_config(None, {"bitwise": "true", **other})
