"""A LoRA run through the command line, with the real engine."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import SMALL, lines, succeeded

LORA = ["--learner.lora.name", "lora", "--learner.lora.rank", "8", "--lr", "5e-3", "--learner.kl.name", "k3"]


@pytest.mark.slow
def test_a_lora_run_from_start_to_export(tmp_path: Path):
    """Contract: every step publishes merged codes that the engine takes for the learner's (mismatch, canary); the
    checkpoint is of the adapters alone and continues; `qarl export` writes the bytes of the run's own export, in which
    adapted layers differ from what the engine started with and everything else is the same bit for bit. The first
    policy is the KL's reference."""
    run = tmp_path / "run"
    done = succeeded("train", *SMALL, *LORA, "--learner.lora.targets", "*_proj", "--steps", "2", "--output", run)
    assert "LoRA: rank 8, alpha 32 on 14 of 15 weight matrices; 32,768 parameters are trained" in done.stdout
    state = torch.load(run / "checkpoints" / "step-000002" / "state-00000.pt", weights_only=True)["learner"]
    assert all(name.endswith((".lora_A", ".lora_B")) for name in state["masters"]) and len(state["base"]) == 32
    succeeded("train", "--resume", run, "--steps", "3")
    metrics = lines(run)
    assert [m["weight_version"] for m in metrics] == [1, 2, 3] and len({m["digest"] for m in metrics}) == 3
    assert all(m["learn/mismatch/mean_abs"] < 0.005 and m["learn/updates"] in (1, 2) for m in metrics)
    assert 0 <= metrics[0]["learn/kl"] < metrics[2]["learn/kl"]
    succeeded("export", run, "-o", tmp_path / "out")
    ours, theirs = (folder / "model.safetensors" for folder in (tmp_path / "out", run / "export"))
    assert ours.read_bytes() == theirs.read_bytes()
    start, end = load_file(run / "engine-start" / "model.safetensors"), load_file(ours)
    assert start.keys() == end.keys()
    moved = {name for name in end if not torch.equal(start[name], end[name])}
    assert moved and all("_proj.weight" in name for name in moved)
    assert len({name.partition(".weight")[0] for name in moved}) == 14
