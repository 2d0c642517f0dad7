"""docs/lab/workarounds.md is true: files and tests exist, and every fault it works around is still
there.

Most faults are looked for in the library's source, which takes milliseconds and is blind to a fault
that moved elsewhere; tests of what a workaround is for (publishes against a fresh engine, and so
on) see those.
"""

import importlib.metadata
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qarl.quant.kernels.row_independence import on_threads
from tests.support.kernels import attention_depends_on_requests

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/lab/workarounds.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ")
]
TABLE = [row for row in ROWS if row[0] != "fault"]

UPSTREAM = {
    "biases are loaded in place": [
        "vllm/model_executor/model_loader/reload/meta.py",
        'SKIP_LOAD_TENSORS | {"bias"}',
    ],
    "generators are rewound": [
        "vllm/v1/worker/gpu_model_runner.py",
        "gen.set_offset(gen.get_offset() - 4)",
    ],
    "reload copies back": [
        "vllm/model_executor/model_loader/reload/layerwise.py",
        "param.data.copy_(getattr(layer, ",
    ],
    "gpt-oss copies by itself": [
        "vllm/model_executor/models/gpt_oss.py",
        "param.data.copy_(narrow_weight)",
    ],
    "heads are prepacked": [
        "vllm/model_executor/layers/utils.py",
        "handler = ops.create_onednn_mm(origin_weight.t()",
    ],
    "strides of a kernel": [
        "vllm/model_executor/layers/fused_moe/experts/cutlass_moe.py",
        "ab_strides2 = torch.full((e,), n, device",
    ],
    "flashinfer by path": ["vllm/utils/flashinfer.py", 'shutil.which("ninja") is None'],
    "humming is preferred": [
        "vllm/model_executor/layers/fused_moe/oracle/int_wna16.py",
        "return prioritize_humming(backends)",
    ],
    "tiles by rows": [
        "vllm/model_executor/determinism/batch_invariant_configs.py",
        "for max_m, bucket_config in shape_config.m_buckets:",
    ],
    "int8 by CUTLASS everywhere": [
        "vllm/model_executor/kernels/linear/scaled_mm/cutlass.py",
        """class CutlassInt8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):
    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        if not current_platform.is_cuda():
            return False, "requires CUDA."
        return True, None
""",
    ],
    "gates quantize": [
        "vllm/model_executor/layers/fusion/quant_activation.py",
        'getattr(layer, "requires_unquantized_input", False)',
    ],
    "w4a8 alias": [
        (
            "vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a8_int.py"
        ),
        'layer.register_parameter("weight_packed", weight)',
    ],
    "experts' kernel": [
        "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py",
        "# Setup moe kernel only on the first",
    ],
    "sigmoids in groups alone": [
        "vllm/model_executor/layers/fused_moe/router/cpu_router.py",
        """            assert self.scoring_func == "softmax"
            return _softmax_topk(router_logits, self.top_k, self.renormalize)
""",
    ],
    "pictures in one batch": [
        "vllm/v1/worker/gpu_model_runner.py",
        "for modality, num_items, mm_kwargs_batch in group_and_batch_mm_kwargs(",
    ],
    "smolvlm needs num2words": [
        "transformers/models/smolvlm/processing_smolvlm.py",
        "        if not num2words:\n            raise ImportError(",
    ],
    "videos need torchvision": [
        "transformers/models/qwen2_vl/video_processing_qwen2_vl.py",
        "\nimport torchvision.transforms.v2.functional as tvF\n",
    ],
    "pixtral needs torchvision": [
        "transformers/models/pixtral/processing_pixtral.py",
        '@requires(backends=("torchvision", "torch"))',
    ],
    "lfm2's pixels need torchvision": [
        "transformers/models/lfm2_vl/image_processing_lfm2_vl.py",
        "class Lfm2VlImageProcessor(TorchvisionBackend):",
    ],
    "towers have a part more": [
        "vllm/model_executor/models/clip.py",
        'prefix=maybe_prefix(prefix, "vision_model"),',
    ],
    "pictures are read from left to right": [
        "vllm/v1/attention/backends/cpu_attn.py",
        """            dynamic_causal=dynamic_casual,
        )

        return attn_metadata
""",
    ],
    "pixels are normalized in the tower": [
        "vllm/model_executor/layers/fusion/mm_input_norm.py",
        """    do_normalize = bool(config.get("do_normalize", has_norm_params))
""",
    ],
    "image processors import torchvision": [
        "transformers/models/qwen2_vl/image_processing_qwen2_vl.py",
        "\nfrom torchvision.transforms.v2 import functional as tvF\n",
    ],
    "loaders are asked for a name": [
        "vllm/model_executor/model_loader/reload/layerwise.py",
        '_get_weight_loader(tensor).__name__ != "online_process_loader"',
    ],
    "sampler compiles": ["vllm/v1/sample/ops/logprobs.py", "@torch.compile(backend="],
    "a new stream a thread": [
        "vllm/utils/torch_utils.py",
        "            torch.cuda.set_stream(new_stream)",
    ],
    "parameters ask for a group": [
        "vllm/model_executor/parameter.py",
        "tp_rank = get_tensor_model_parallel_rank()",
    ],
    "fp8 asks the model's config": [
        (
            "vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py"
        ),
        "_vllm_config().model_config.dtype",
    ],
    "loaders are bound methods": [
        "vllm/model_executor/layers/linear.py",
        "weight_loader=self.weight_loader",
    ],
    "experts need AMX": [
        "vllm/model_executor/layers/fused_moe/experts/cpu_moe.py",
        "and torch.cpu._is_amx_tile_supported()",
    ],
    "experts without a gate": [
        "vllm/model_executor/layers/fused_moe/config.py",
        """            raise NotImplementedError(
                "is_act_and_mul=False is supported only for CUDA, XPU and ROCm for now"
            )

    @property
""",
    ],
    "sums are scaled down in float16": [
        "vllm/model_executor/layers/fused_moe/runner/moe_runner.py",
        "shared_output *= 1.0 / self.routed_scaling_factor",
    ],
    "int8 activations by default": ["vllm/envs.py", 'os.getenv("VLLM_CPU_INT4_W4A8", "1")'],
    "int8 by rows alone": [
        "vllm/model_executor/kernels/linear/scaled_mm/cpu.py",
        "and check_cpu_sgl_kernel(N, K, dtype)",
    ],
    "fp8 one element at a time": [
        "vllm/model_executor/kernels/linear/scaled_mm/cpu.py",
        "requires native AMX-FP8 hardware (Diamond Rapids); ",
    ],
    "int4 widened": [
        "vllm/model_executor/kernels/linear/mixed_precision/cpu.py",
        "into_int32(weight, self.config.weight_type, 1)",
    ],
    "few rows by another kernel": [
        "vllm/model_executor/layers/utils.py",
        "layer.cpu_linear = lambda x, weight, bias: ops.onednn_mm(",
    ],
    "a thread shows its error": [
        "tensorboard/summary/writer/event_file_writer.py",
        "            self.exception = ex\n",
    ],
    "convolutions are views": [
        "vllm/model_executor/layers/mamba/mamba_mixer2.py",
        'self.register_buffer("conv_weights", conv_weights, persistent=False)',
    ],
    "Granite's layers are called mixers": [
        "vllm/model_executor/models/granitemoehybrid.py",
        'prefix=f"{prefix}.mixer",',
    ],
    "steps have a bound": [
        "transformers/models/nemotron_h/modeling_nemotron_h.py",
        'self.time_step_limit = (config.time_step_min, float("inf"))',
    ],
    "keys are split over threads": [
        "vllm/v1/attention/backends/cpu_attn.py",
        "enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV",
    ],
    "prompts by other latent attention": [
        "vllm/model_executor/layers/attention/mla_attention.py",
        "output_prefill = prefill_metadata.prefill_backend.run_prefill_new_tokens(",
    ],
    "kv_b_proj by torch's product": [
        "vllm/model_executor/layers/linear.py",
        "layer.cpu_linear = torch.nn.functional.linear",
    ],
    "sums of ranks in any order": [
        "vllm/distributed/device_communicators/cpu_communicator.py",
        "self.dist_module.all_reduce(input_, group=self.device_group)",
    ],
    "attention by AMX": [
        "vllm/v1/attention/backends/cpu_attn.py",
        "if supports_amx and dtype in (torch.bfloat16,) and block_size % 32 == 0:",
    ],
    "forms are registered anew": [
        "vllm/triton_utils/dispatcher.py",
        'logger.warning("Kernel %s is already registered. Overwriting.", name)',
    ],
    "classes are decorated": [
        "vllm/model_executor/models/transformers/base.py",
        "self._decorate_for_torch_compile()",
    ],
    "classes are looked at apart": [
        "vllm/model_executor/models/registry.py",
        "mi = _run_in_subprocess(",
    ],
    "schedule is dumped": ["vllm/v1/engine/core.py", "dump_engine_exception("],
    "hub asked six times": ["huggingface_hub/utils/_http.py", "    max_retries: int = 5,"],
}
"""Fault → the library's file, and the text in it that makes the workaround necessary."""


def installed(library: str) -> Path:
    found = find_spec(library)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def mended(fault: str) -> str:
    places = ", ".join(row[1] for row in TABLE if fault in row[3])
    return (
        f"upstream may have mended {fault!r}: see whether {places} can go, and the row in"
        " docs/lab/workarounds.md"
    )


@pytest.mark.parametrize("fault", UPSTREAM)
def test_upstream_still_has(fault: str):
    name, text = UPSTREAM[fault]
    library, _, rest = name.partition("/")
    file = installed(library) / rest
    assert file.is_file() and text in file.read_text(encoding="utf-8"), mended(
        f"test_upstream_still_has[{fault}]"
    )


def test_vllm_does_not_ask_for_amx():
    files = (
        "platforms/cpu.py",
        "v1/worker/cpu_worker.py",
        "model_executor/kernels/linear/mixed_precision/cpu.py",
    )
    sources = [(installed("vllm") / file).read_text() for file in files]
    assert not any("_init_amx" in source for source in sources), mended(
        "test_vllm_does_not_ask_for_amx"
    )


def test_attention_still_has_tiles_of_several_widths():
    assert attention_depends_on_requests(), mended(
        "test_attention_still_has_tiles_of_several_widths"
    )


def test_latent_attention_still_shares_keys_among_threads():
    """vLLM's kernel alone gives a query of 200 keys other bits on two threads than on one."""
    from vllm import _custom_ops as ops

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 576, generator=generator)
    cache = torch.randn(13, 16, 576, generator=generator)
    table = torch.arange(13, dtype=torch.int32)[None]
    seen = torch.tensor([200], dtype=torch.int32)

    def attend() -> torch.Tensor:
        sums = torch.zeros(1, 4, 512)
        ops.mla_decode_kvcache_cpu(sums, q, cache, 0.04, table, seen)
        return sums

    one, two = (on_threads(count, attend) for count in (1, 2))
    torch.testing.assert_close(one, two)
    assert not torch.equal(one, two), mended(
        "test_latent_attention_still_shares_keys_among_threads"
    )


def test_llvmlite_still_claims_a_dict():
    """It runs in a process of its own, because the repair may have been made in this one."""
    code = (
        "from llvmlite.binding import ffi; print(hasattr(ffi.lib, '__dict__') and ffi.lib.__dict__)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "_lib_fn_wrapper" in printed, mended("test_llvmlite_still_claims_a_dict")


def test_llmcompressor_still_caps():
    from packaging.requirements import Requirement

    needs = map(Requirement, importlib.metadata.requires("llmcompressor") or ())
    capped = {
        need.name
        for need in needs
        if need.marker is None
        and not need.specifier.contains(importlib.metadata.version(need.name), prereleases=True)
    }
    assert {"torch", "transformers", "compressed-tensors"} & capped, mended(
        "test_llmcompressor_still_caps"
    )


def test_xgrammar_still_asks_for_triton():
    needs = importlib.metadata.requires("xgrammar") or ()
    assert any(need.startswith("triton") for need in needs), mended(
        "test_xgrammar_still_asks_for_triton"
    )


def test_cellpylib_still_warns():
    file = installed("cellpylib") / "ca_functions.py"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile(file.read_text(), str(file), "exec")
    assert any('"is" with' in str(warning.message) for warning in caught), mended(
        "test_cellpylib_still_warns"
    )


def test_rows_were_read_against_what_is_installed():
    """The version guard of all rows: another release of a library asks for reading its rows
    again.
    """
    versions = dict(re.findall(r"\b([a-z-]+) (\d[\d.]*\d)", PAGE.partition("## ")[0]))
    libraries = "vllm-cpu torch transformers llmcompressor llvmlite cellpylib huggingface-hub"
    assert versions.keys() == set(libraries.split())
    for library, version in versions.items():
        found = importlib.metadata.version(library).partition("+")[0]
        assert found == version, (
            f"{library} is {found}, docs/lab/workarounds.md was read against {version}: run this"
            " file's tests, read the rows, and write the new version there"
        )


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[3])
def test_files_and_tests_of_a_row_exist(row: list[str]):
    assert len(row) == 4
    for name in re.findall(r"`([^`]+)`", row[1]):
        assert (ROOT / name).is_file(), name
    *file, test = re.findall(r"`([^`]+)`", row[3])
    name, _, fault = test.rstrip("]").partition("[")
    source = (ROOT / file[0] if file else Path(__file__)).read_text()
    assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"there is no test {name}"
    assert not fault or fault in UPSTREAM, f"UPSTREAM lacks {fault!r}"


def test_every_fault_has_a_row():
    told = [row[3] for row in TABLE]
    assert all(f"`test_upstream_still_has[{fault}]`" in told for fault in UPSTREAM)
