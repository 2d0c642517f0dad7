"""Tests of which schemes run on this machine, of their cost, and that schemes which cannot run are
refused before anything loads.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3ForCausalLM

import qarl.quant.kernels as kernels_module
from qarl.cli.main import main
from qarl.cli.schemes import _show, scheme_rows
from qarl.configs.schema.run import RunConfig
from qarl.preflight.prepare import prepare
from qarl.ptq.compressor import _restore_granite_experts
from qarl.quant.checkpoint.whole import language_config
from qarl.quant.kernels import KernelError, make_factory
from qarl.quant.kernels import supported as support_module
from qarl.quant.kernels.reference import ReferenceFactory
from qarl.quant.kernels.supported import require_support, support
from qarl.quant.kernels.vllm_layers import INT8_ACTIVATIONS, kernel_name
from qarl.quant.materialize import materialize
from qarl.quant.schemes import (
    COMPUTE_DTYPES,
    SCHEMES,
    SchemeError,
    get_scheme,
    write_quantization_config,
)
from qarl.sync.export import export_checkpoint
from qarl.tasks import load_task
from tests.support import Policies
from tests.support.kernels import AVX512, VLLM_CPU_KERNELS, no_cuda
from tests.support.models import cast, low_bit, qwen3
from tests.support.tensors import same_bits


@no_cuda
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_a_kernel_or_a_reason(scheme: str, dtype: torch.dtype):
    """Contract: a scheme has either vLLM's own low-bit kernel and no reason, or a reason in words
    and no kernel. Experts run if dense layers do. The small layer of the probe must not overflow
    float16.
    """
    runs = scheme in VLLM_CPU_KERNELS and not (
        dtype == torch.float32 and "w4a16" in scheme and AVX512
    )
    for experts in (False, True):
        found = support(scheme, dtype, experts)
        assert (found.reason == "") == bool(found.kernel) == runs, found
        if runs and experts:
            own = "CPUUnquantizedExperts" if scheme == "bf16" else VLLM_CPU_KERNELS[scheme]
            assert own in found.kernel
            assert found.kernel.endswith(", per expert") == (scheme != "bf16")
        elif runs:
            assert VLLM_CPU_KERNELS[scheme] in found.kernel
        else:
            assert "\n" not in found.reason
            assert len(found.reason) > 30


def test_probing_schemes_does_not_change_the_random_state():
    """Contract: a resumed run must not depend on whether its schemes were probed."""
    support.cache_clear()
    before = torch.get_rng_state()
    for experts in (False, True):
        support("w4a16", torch.bfloat16, experts)
    assert torch.equal(torch.get_rng_state(), before)


@no_cuda
def test_a_scheme_that_cannot_run_is_refused_with_the_reason_and_the_ones_that_can():
    fault = "leaves activations" if torch.cpu._is_amx_tile_supported() else "requires AMX"
    with pytest.raises(
        SchemeError,
        match=rf"'fp8-block' cannot run in the engine .*{fault}.*can: 'bf16', 'w4a16'",
    ):
        require_support(get_scheme("fp8-block"), torch.bfloat16)
    require_support(get_scheme("w4a8"), torch.bfloat16)


@no_cuda
@pytest.mark.skipif(not AVX512, reason="there QaRL multiplies, and has it")
def test_float32_is_refused_for_schemes_without_a_float32_kernel():
    """Contract: vLLM's int4 kernel for CPUs has no float32.

    The error names every scheme that has, and no other.
    """
    config = RunConfig.model_validate({"scheme": "w4a16", "dtype": "float32", "model": "./nowhere"})
    with pytest.raises(
        SchemeError,
        match=r"cannot run in the engine .*float32.*cpu_gemm_wna16.*'Float'",
    ) as raised:
        prepare(config, load_task(config.task))
    able = str(raised.value).rpartition("schemes that can: ")[2]
    assert able == "'bf16', 'w8a8', 'w4a8', 'fp8'"


@pytest.mark.parametrize(
    ("scheme", "kernel", "said"),
    [
        ("nvfp4", "MarlinNvFp4LinearKernel", "leaves activations in the compute dtype"),
        ("fp8-block", "CPUFp8BlockScaledMMKernel", "leaves activations in the compute dtype"),
        ("mxfp4a16", "FlashInferMxFp4LinearKernel", "quantizes activations"),
        ("mxfp4a16", "MarlinMxFp4LinearKernel", ""),
        ("nvfp4a16", "FlashInferCuteDslNvFp4W4A16LinearKernel", ""),
        ("nvfp4", "CutlassNvFp4LinearKernel", ""),
        ("w4a16", "CPUWNA16LinearKernel", ""),
        ("w4a16", "CPUWNA16LinearKernel, {int8}", "quantizes activations"),
        ("w4a16", "CPUWNA16LinearKernel, {int8}, per expert", "quantizes activations"),
        ("w4a16", "CPUExpertsInt4", "quantizes activations"),
    ],
)
def test_kernels_that_compute_something_else_are_refused(scheme: str, kernel: str, said: str):
    """Contract: a kernel with other arithmetic than the scheme's is refused. vLLM falls back to
    weight-only kernels, and away from them, without a message, and the scheme's name would then be
    wrong.
    """
    reason = support_module._other_arithmetic(
        get_scheme(scheme), kernel.format(int8=INT8_ACTIVATIONS)
    )
    assert (said in reason) if said else reason == ""


def test_without_vllm_no_scheme_runs_and_learners_multiply_by_the_reference(
    monkeypatch: pytest.MonkeyPatch,
):
    for module in (support_module, kernels_module):
        monkeypatch.setattr(module, "has_vllm", lambda: False)
    assert "not installed" in support.__wrapped__("w4a16", torch.bfloat16).reason
    assert isinstance(make_factory("auto", torch.bfloat16), ReferenceFactory)
    with pytest.raises(KernelError, match="use 'reference' or 'auto'"):
        make_factory("vllm", torch.bfloat16)


@no_cuda
def test_an_environment_variable_that_changes_a_kernel_is_reported():
    """Contract: vLLM's mark on a layer that int8 activations will multiply is read from the layer.

    If the environment makes vLLM set it (CPUs with AMX, `VLLM_CPU_INT4_W4A8` not 0), the variable
    is refused: tests/rollout/test_vllm.py.
    """
    name = "CPUWNA16NibbleKernel" if AVX512 else "CPUWNA16Fp32LinearKernel"
    weight = materialize(torch.ones(64, 128), get_scheme("w4a16"), torch.bfloat16)
    layer = make_factory("vllm", torch.bfloat16).linear("layer", [weight], [None])._linear  # type: ignore[attr-defined]
    assert layer.use_w4a8 is False
    assert kernel_name(layer) == name
    layer.use_w4a8 = True
    assert kernel_name(layer) == f"{name}, {INT8_ACTIVATIONS}"


def test_the_schemes_command_prints_a_table_and_writes_json(
    random_policy: Policies,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: the table and the JSON agree on kernels, reasons and bytes.
    tests/quant/test_layout.py compares a scheme's total bytes.
    """
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["schemes", "--model", "tiny-qwen3", "--json", str(tmp_path / "rows.json")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == list(SCHEMES)
    assert rows["bf16"]["bytes_per_parameter"] == 2.0
    assert rows["bf16"]["shape_reason"] == ""
    parameters = load_file(random_policy(True) / "model.safetensors").values()
    assert rows["bf16"]["checkpoint_bytes"] == 2 * sum(
        parameter.numel() for parameter in parameters
    )
    assert "64 output rows" in rows["fp8-block"]["shape_reason"]
    assert rows["fp8-block"]["checkpoint_bytes"] is None
    assert rows["nvfp4"]["kernel"] == ""
    assert "NVIDIA" in rows["nvfp4"]["reason"]
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line for line in printed.splitlines()}
    assert "bytes/param" in lines["scheme"]
    assert lines["w4a16-g32"].split()[-1] == "yes"
    assert "  no  " in lines["nvfp4"]
    assert "vLLM has it for NVIDIA GPUs alone" in lines["nvfp4"]
    assert max(map(len, lines.values())) < 200, "a line a scheme, no longer than that"


@pytest.mark.parametrize("verbose", [False, True])
def test_a_scheme_whose_groups_do_not_divide_the_models_width_does_not_run(
    verbose: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: a hidden size of 576 is 4.5 groups of 128 and nine of 64.

    The scheme's line says only that, and the last line names what to take instead.
    """
    monkeypatch.setenv("QARL_CACHE", str(tmp_path / "cache"))
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
    )
    config.save_pretrained(tmp_path)
    rows = scheme_rows(str(tmp_path), "bfloat16")
    _show(Console(width=100), rows, str(tmp_path), verbose)
    printed = capsys.readouterr().out.splitlines()
    lines = {line.split()[0]: line for line in printed}
    by_name = {row.name: row for row in rows}
    assert by_name["w4a16"].kernel
    assert not by_name["w4a16"].runs
    assert by_name["w4a16-g64"].runs
    assert by_name["w4a16"].kernel not in lines["w4a16"]
    (remedy,) = [line for line in printed if "does not fit" in line]
    assert remedy.startswith(
        f"{tmp_path} does not fit w4a16, w8a16, w4a8, w4afp8, fp8-block; take one that does"
    )
    assert "runs here: w4a16-g64, w4a16-g32, w4a16-channel" in remedy
    if not verbose:
        assert lines["w4a16"].endswith(
            "-  no    576 input columns, no multiple of the group size 128"
        )
        assert lines["w4a16-g64"].split()[-1] == "yes"


def test_schemes_of_a_model_without_a_class_for_text_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QARL_CACHE", str(tmp_path / "cache"))
    config = transformers.MuseGlimmerConfig()
    config.save_pretrained(tmp_path)
    assert main(["schemes", "--model", str(tmp_path)]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert f"is a {config.model_type!r}, which takes pictures beside text, and trans" in words
    assert "give a model of text (Qwen3" in words
    assert len(words) < 600


@pytest.mark.parametrize("kind", ["Glm4vConfig", "MllamaConfig"])
def test_a_whole_need_not_say_whether_its_head_is_tied(kind: str):
    config = getattr(transformers, kind)()
    text = language_config(config)
    assert text is not None
    assert text.model_type == config.get_text_config().model_type


def test_gemma_4_agrees_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Check a model whose layers differ in their heads' size, and that has a buffer for each."""
    monkeypatch.setenv("QARL_CACHE", str(tmp_path / "cache"))
    kind: Any = Gemma4TextConfig  # it also takes what is no field of its own
    config = kind(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    )
    config.save_pretrained(tmp_path)
    assert main(["schemes", "--model", str(tmp_path)]) == 0
    assert "learner and sampler agree to the last bit" in capsys.readouterr().out


LLMCOMPRESSOR_PRESETS = {
    "w8a16": "W8A16",
    "w4a8": "W4A8",
    "fp8-block": "FP8_BLOCK",
    "nvfp4a16": "NVFP4A16",
    "mxfp4a16": "MXFP4A16",
}
"""Presets that llmcompressor writes without calibration data. tests/runs/test_ptq.py covers the
baseline's schemes.
"""
restore_granite_experts = functools.cache(_restore_granite_experts)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", LLMCOMPRESSOR_PRESETS)
def test_exports_are_llmcompressors_round_to_nearest(scheme: str, tmp_path: Path):
    """Contract: for a bfloat16 model, llmcompressor's data-free `oneshot` and `export_checkpoint`
    write the same tensors: names, dtypes, bytes. The whole path is compared, including fused global
    scales of NVFP4.
    """
    pytest.importorskip("llmcompressor.version", reason="llmcompressor is not installed")
    restore_granite_experts()
    import llmcompressor
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = cast(qwen3(), torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    recipe: Any = QuantizationModifier(
        targets="Linear", scheme=LLMCOMPRESSOR_PRESETS[scheme], ignore=["lm_head"]
    )
    llmcompressor.oneshot(model=theirs, recipe=recipe)
    theirs.save_pretrained(tmp_path / "theirs", save_compressed=True)
    export_checkpoint(low_bit(model, scheme), tmp_path / "model", tmp_path / "ours")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert same_bits(sorted(written.items()), sorted(expected.items()))


def test_a_cache_scheme_without_any_quantized_layer_is_refused():
    with pytest.raises(SchemeError, match="kv_cache 'fp8' of a model without a low-bit layer"):
        write_quantization_config([], ["lm_head"], "fp8")
