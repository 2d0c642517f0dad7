"""Tests of whole runs on a GPU and of the mismatch between learner and sampler there.

Nothing here has run yet.

Axes: T tokens, L decoder layers, K experts per token.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.mismatch import measure
from qarl.cli.main import main
from qarl.configs.load import config_file, load_config
from qarl.configs.schema.rollout import RolloutConfig
from qarl.planning.machine import this_machine
from qarl.planning.memory import LIBRARIES
from qarl.planning.plan import make_plan
from qarl.planning.shapes import shapes_of
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.batch_invariance import FIRST_CAPABILITY
from qarl.quant.schemes import get_scheme
from qarl.rollout.types import Prompt, Sampling
from qarl.rollout.vllm.engine import VllmEngine
from qarl.rollout.vllm.options import VllmOptions
from qarl.sync.export import export_checkpoint
from tests.support import Policies
from tests.support.gpu_schemes import need
from tests.support.kernels import needs_cuda
from tests.support.runs import ROOT, SMALL, environment, lines, qarl_alone

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs_cuda("whole runs on GPUs")]
schemes = pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
BF16 = torch.bfloat16


def completed(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


@schemes
def test_the_aligned_learner_is_nearer_than_two_implementations(scheme: str):
    """Contract: the mismatch is below the floor, which is the difference between an unquantized
    engine and transformers.
    """
    need(scheme)
    rows = measure("tiny-qwen3", [scheme], ["bfloat16"])
    row = next(row for row in rows if (row.scheme, row.learner) == (scheme, "aligned"))
    assert row.over_floor < 1.0, row


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_the_engines_experts_are_the_learners(
    random_experts: Policies, tmp_path: Path, scheme: str
):
    """Contract: experts agree for 99 % of the tokens in every layer. vLLM's second runner reports
    them.
    """
    need(scheme, experts=True)
    folder = random_experts(False)
    masters = load_masters(folder, torch.float32, torch.device("cuda"))
    model = LowBitModel(masters, get_scheme(scheme), LayerContext(BF16, "vllm"))
    export_checkpoint(model, folder, tmp_path / "start")
    rollout = RolloutConfig(
        max_prompt_tokens=64,
        max_new_tokens=64,
        router_replay=True,
        prefix_caching=False,
    )
    engine = VllmEngine(tmp_path / "start", VllmOptions(rollout))
    try:
        assert engine._llm.llm_engine.vllm_config.use_v2_model_runner
        token_ids = [tuple(range(20 + n, 40 + n)) for n in range(16)]
        prompts = [Prompt(str(n), "", ids) for n, ids in enumerate(token_ids)]
        samples = [group[0] for group in engine.generate(prompts, Sampling(1, 64, seed=0))]
    finally:
        engine.close()
    model.router_log.enabled = True
    top_k = model.config.num_experts_per_tok
    same = 0
    total = 0
    for prompt, sample in zip(prompts, samples, strict=True):
        tokens = torch.tensor([[*prompt.token_ids, *sample.token_ids]], device="cuda")
        with torch.no_grad():
            model.hidden(tokens, torch.ones_like(tokens, dtype=torch.bool))
        chosen = [logits.topk(top_k).indices for logits in model.router_log.logits]
        ours = torch.stack(chosen, 1).cpu().sort().values
        # [T, L, K], of the tokens that were computed
        theirs = torch.as_tensor(sample.experts).long().sort().values
        # vLLM says the answer's or all tokens', of which the last is never computed
        count = len(prompt.token_ids)
        first = 0 if len(theirs) >= count else count - 1
        ours = ours[first:][: len(theirs)]
        same += int((ours == theirs).all(-1).sum())
        total += ours.shape[0] * ours.shape[1]
    assert same > 0.99 * total


@schemes
def test_a_run_and_its_resumption(tmp_path: Path, scheme: str):
    """Contract: five steps, two more of the same run, and an export that is within its bound in a
    fresh engine.
    """
    need(scheme)
    run = tmp_path / "run"
    completed(qarl_alone("train", *SMALL, "--steps", "5", "--scheme", scheme, "--output", run))
    completed(qarl_alone("train", "--resume", run, "--steps", "7"))
    assert [line["step"] for line in lines(run)] == list(range(1, 8))
    assert (run / "export" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--learner.lora.name", "lora"),
        ("--learner.compile", "true"),
        ("--learner.keep_codes", "false"),
        ("--rollout.enforce_eager", "true"),
    ],
    ids=lambda options: options[0],
)
def test_options_with_gpu_specific_code_train(tmp_path: Path, options: list[str]):
    """Contract: each option trains."""
    completed(qarl_alone("train", *SMALL, "--steps", "2", *options, "--output", tmp_path / "run"))


def test_expert_choices_are_replayed(tmp_path: Path):
    replay = ["--rollout.router_replay", "true", "--rollout.prefix_caching", "false"]
    mixture = ["--config", "tiny-qwen3-moe", "--model", "tiny-qwen3-moe"]
    completed(
        qarl_alone(
            "train",
            *SMALL,
            *mixture,
            "--steps",
            "2",
            *replay,
            "--output",
            tmp_path / "run",
        )
    )


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_bitwise_runs_have_equal_log_probs(tmp_path: Path, scheme: str):
    """Contract: log-probs are equal for every sampled token of every step.

    Gate, canary and export demand this too.
    """
    if torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        pytest.skip("refused below 9.0: tests/quant/test_cuda_kernels.py")
    run = tmp_path / "run"
    completed(qarl_alone("train", *SMALL, "--bitwise", "true", "--scheme", scheme, "--output", run))
    assert all(line["learn/mismatch/equal"] == 1 for line in lines(run))


@pytest.mark.parametrize(
    ("shape", "layers", "options"),
    [("qwen3-1.7b", 28, {}), ("qwen3-30b-a3b", 4, {"learner.lora.name": "lora"})],
    ids=["dense", "experts"],
)
def test_memory_is_what_the_plan_says(
    tmp_path: Path, shape: str, layers: int, options: dict[str, str]
):
    """Contract: the plan is within a tenth of torch's peak over two steps in this process, engine
    included. Memory that CUDA and libraries take outside torch is neither in that peak nor
    compared.
    """
    folder = tmp_path / "model"
    script = ROOT / "scripts" / "random_model.py"
    subprocess.run(
        [sys.executable, script, shape, folder, "--layers", str(layers)],
        env=environment(),
        check=True,
    )
    fields = {
        "model": str(folder),
        "steps": "2",
        "eval.problems": "0",
        "export": "false",
        "rollout.kv_cache_gib": "4",
        "learner.micro_batch_tokens": "8192",
        "learner.gradient_checkpointing": "true",
        **options,
    }
    shapes = shapes_of(json.loads((folder / "config.json").read_text()), shape)
    plan = make_plan(load_config(config_file("tiny-qwen3"), fields), shapes, "", this_machine(), 1)
    torch.cuda.reset_peak_memory_stats()
    words = [word for name, value in fields.items() for word in (f"--{name}", value)]
    assert (
        main(
            [
                "train",
                "--config",
                "tiny-qwen3",
                *words,
                "--output",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    peak = torch.cuda.max_memory_allocated()
    planned = plan.memory.total - LIBRARIES["cuda"]
    assert abs(planned / peak - 1) <= 0.1, (
        f"{planned / 2**30:.2f} GiB planned, {peak / 2**30:.2f} measured"
    )
