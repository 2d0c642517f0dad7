"""Post-training quantization of a mixture of experts: llmcompressor's round-to-nearest is QaRL's materialization."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qarl.ptq.compressor import Job, compress
from qarl.ptq.expected_checkpoint import checkpoint_layout, read_as
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from qarl.sync.export import export_checkpoint
from tests.support.moe_models import with_tokenizer
from tests.support.runs import qarl
from tests.support.tensors import as_bytes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_compressor")]
SMALL = ("--steps", "2", "--rollout.prompts", "8", "--rollout.samples", "4", "--eval.problems", "32")


@pytest.mark.parametrize(
    ("kind", "scheme"), [("qwen3_moe", "w4a16"), ("qwen3_moe", "w8a8"), ("qwen3_moe", "fp8"), ("mixtral", "w8a8")]
)
def test_rtn_is_materialize_bit_for_bit(random_experts: Callable[[bool], Path], tmp_path: Path, kind: str, scheme: str):
    """Contract: the same names, dtypes, shapes and bytes as QaRL's export of the same unquantized checkpoint: every
    expert is quantized, no router is."""
    with_tokenizer(kind, random_experts(True), tmp_path / "masters")
    compute = torch.bfloat16
    plain = LowBitModel(
        load_masters(tmp_path / "masters", torch.float32), get_scheme("bf16"), LayerContext(compute, "reference")
    )
    export_checkpoint(plain, tmp_path / "masters", tmp_path / "unquantized")
    layout = checkpoint_layout(tmp_path / "unquantized", scheme, "bfloat16")
    (tmp_path / "work").mkdir()
    job = Job(str(tmp_path / "unquantized"), scheme, "rtn", layout.ignored, (), str(tmp_path / "out"))
    compress(job, tmp_path / "work")
    theirs = {item.name: item.tensor for item in read_as(layout, tmp_path / "out")}
    ours = LowBitModel(
        load_masters(tmp_path / "unquantized", compute), get_scheme(scheme), LayerContext(compute, "reference")
    )
    experts = 0
    for item in ours.low_bit_tensors():
        found = theirs.pop(item.name)
        assert (found.dtype, found.shape) == (item.tensor.dtype, item.tensor.shape), item.name
        assert torch.equal(as_bytes(found), as_bytes(item.tensor)), item.name
        experts += ".experts." in item.name and "scale" in item.name
    assert not theirs
    assert experts == {"qwen3_moe": 15, "mixtral": 18}[kind]


def test_a_run_is_exported_by_ptq(random_experts: Callable[[bool], Path], tmp_path: Path):
    """`qarl export --ptq rtn` of a bf16 run of a mixture of experts, audited in a fresh engine."""
    run, model = tmp_path / "run", random_experts(True)
    done = qarl("train", "--config", "tiny-qwen3-moe", "--model", model, "--scheme", "bf16", "--output", run, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    done = qarl("export", run, "-o", tmp_path / "out", "--ptq", "rtn", "--scheme", "w4a16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by rtn to w4a16" in done.stdout
