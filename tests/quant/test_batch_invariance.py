"""vLLM's batch-invariant mode on both sides (`bitwise`): kernels under a stand-in for the platform. Blind
spot: whether bits are equal on a GPU (tests/gpu/test_runs.py)."""

import pytest
import torch

from qarl.configs.errors import ConfigError, InputError
from qarl.configs.load import load_config
from qarl.learner.mismatch import measure_mismatch
from qarl.quant.kernels import flash_attention, supported
from qarl.quant.kernels.base import Scoring
from qarl.quant.kernels.vllm import VllmFactory
from qarl.quant.runtime.batch_invariance import BATCH_INVARIANT, batch_invariant
from qarl.quant.schemes import SCHEMES, get_scheme
from qarl.quant.types import LayerReport
from qarl.rollout.vllm.options import VllmOptions, llm_arguments
from qarl.run import bitwise
from qarl.sync.audit import AuditError, audit, require_agreement
from qarl.sync.gate import GateError, require_equal
from tests.support.cuda_platform import stub_cuda
from tests.support.kernels import chosen_kernel, no_cuda

BF16, META = torch.bfloat16, torch.device("meta")
QKV = ([2048, 1024, 1024], 2048)
_BOTH = {"bf16", "w4a16", "w4a16-g64", "w4a16-g32", "w4a16-channel", "w8a16", "w4a8", "w8a8", "fp8"}
KEEP = {(9, 0): _BOTH | {"w4afp8", "mxfp4a16"}, (10, 0): _BOTH | {"nvfp4"}}
"""Schemes whose kernels for Qwen3-1.7B's qkv keep the mode."""


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


@no_cuda
@pytest.mark.parametrize("capability", KEEP, ids=str)
def test_kernels_that_keep_the_mode_say_so(capability: tuple[int, int], mode: None):
    """Contract: int4 and int8 weights go to Humming instead of Machete and Marlin; of the others, those that vLLM does
    not call batch-invariant are refused before anything loads."""
    factory, names = VllmFactory(BF16), {}  # before the stand-in: vLLM's plugins are loaded for this platform
    with stub_cuda(capability):
        for scheme in map(get_scheme, SCHEMES):
            try:
                names[scheme.name] = chosen_kernel(factory, "layer", *QKV, scheme, META)
            except (NotImplementedError, ValueError):
                continue
            refused = "as `bitwise` asks" in supported._other_arithmetic(scheme, names[scheme.name])
            assert refused != (BATCH_INVARIANT in names[scheme.name])
    assert {name for name, kernel in names.items() if BATCH_INVARIANT in kernel} == KEEP[capability], names
    assert names["w4a16"] == f"HummingLinearKernel, {BATCH_INVARIANT}"


def test_the_engine_is_told_the_same(mode: None):
    """vLLM's own reading of the arguments: attention by the kernel the learner calls, weights by the same backend."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    arguments = llm_arguments(VllmOptions())
    known = EngineArgs(model="none", **{name: arguments[name] for name in ("attention_backend", "kernel_config")})
    assert known.kernel_config.linear_backend_per_quant == {"mixed_precision": "humming"}
    assert AttentionBackendEnum[arguments["attention_backend"]] is AttentionBackendEnum.FLASH_ATTN


def test_attention_asks_for_it(mode: None, monkeypatch: pytest.MonkeyPatch):
    """Contract: it does not split keys. Norms are vLLM's own modules, which read the mode themselves."""
    from vllm.v1.attention.backends import fa_utils

    splits = []
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **needed: 3)
    kernel = "flash_attn_varlen_func"
    monkeypatch.setattr(fa_utils, kernel, lambda **how: splits.append(how["num_splits"]), raising=False)
    q, scoring = torch.zeros(6, 1, 8, dtype=BF16), Scoring(scale=1.0)
    flash_attention.flash_attention(q, q, q, None, scoring, [6], [6])
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    flash_attention.flash_attention(q, q, q, None, scoring, [6], [6])
    assert splits == [1, 0]


@pytest.mark.parametrize(("capability", "on"), [((8, 0), False), ((9, 0), True)])
def test_it_is_turned_on_where_the_backward_works(
    capability: tuple[int, int], on: bool, monkeypatch: pytest.MonkeyPatch
):
    config = load_config(None, {"bitwise": "true"})
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "0")  # put back at the end
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bitwise.enable_batch_invariance(config)
    assert not batch_invariant(), "CPUs have nothing to turn on"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if on:
        bitwise.enable_batch_invariance(config)
    else:
        with pytest.raises(ConfigError, match=r"capability 8\.0: below 9\.0 .* without a backward"):
            bitwise.enable_batch_invariance(config)
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
def test_what_cannot_be_equal_is_refused(other: dict[str, str]):
    with pytest.raises(InputError, match=f"bitwise true: .*{next(iter(other))}"):
        load_config(None, {"bitwise": "true", **other})


def test_audit_and_gate_demand_it():
    rows = [LayerReport(name="q", scheme="w4a16", group_size=128, dtype="bfloat16", kernel="MacheteLinearKernel")]
    require_agreement(audit(rows, rows, same_kernels=True))
    with pytest.raises(AuditError, match="'MacheteLinearKernel' is not known to be batch-invariant"):
        require_agreement(audit(rows, rows, same_kernels=True, same_bits=True))
    logprobs, mask = -torch.rand(2, 3), torch.ones(2, 3, dtype=torch.bool)
    require_equal(measure_mismatch(logprobs, logprobs, mask))
    other = logprobs.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(0.0))
    for apart in (other, other * torch.nan):
        with pytest.raises(GateError, match="bitwise, and"):
            require_equal(measure_mismatch(apart, logprobs, mask))
