"""Whole runs through the command line, with the real engine: learning, resuming, refusing."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.runs import SMALL, Run, lines, qarl, qarl_alone, succeeded, wait_for_lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "dtype", "more"),
    [
        ("w4a16", "bfloat16", []),
        ("w8a8", "float16", ["--master-dtype", "bfloat16"]),
        ("fp8", "bfloat16", ["--objective", "grpo", "--optimizer", "adamw", "--lr", "1e-4", "--eval.problems", "8"]),
        ("w4a8", "bfloat16", ["--bitwise", "true"]),
        ("w4a16-g32", "float16", []),
        ("bf16", "float16", []),
        ("w4a16", "float16", ["--learner.kernel", "reference"]),
        ("w4a16", "bfloat16", ["--aligned", "false"]),
        ("w8a8", "float32", []),
        ("w4a16", "bfloat16", ["--aligned", "false", "--learner.compute_dtype", "float32"]),
    ],
)
def test_a_run_from_start_to_export(tmp_path: Path, scheme: str, dtype: str, more: list[str]):
    run = tmp_path / "run"
    done = succeeded("train", "--scheme", scheme, "--dtype", dtype, "--output", run, *SMALL, *more)
    assert "of the exported checkpoint in a fresh engine" in done.stdout
    metrics = lines(run)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert [m["weight_version"] for m in metrics] == [1, 2, 3, 4]
    assert len({m["digest"] for m in metrics}) == 4
    aligned = "false" not in more
    # Products in float32 sum in an order that depends on the number of rows, and on GPUs attention is torch's.
    exact = aligned and "reference" not in more and dtype != "float32" and not torch.cuda.is_available()
    for m in metrics:
        assert m["learn/updates"] in (1, 2)  # a mini-batch of equal rewards teaches nothing
        assert (m["learn/mismatch/mean_abs"] < 0.005) or not aligned
        assert (m["learn/mismatch/equal"] == 1) or not exact
        assert (m["learn/lost_updates"] is None) == (m["step"] != 1)  # every tenth step from the first
    assert sum(m["learn/updates"] for m in metrics) > 4
    written = json.loads((run / "export" / "config.json").read_text())
    assert ("quantization_config" in written) == (scheme != "bf16")
    assert (run / "export" / "model.safetensors").stat().st_mode & 0o777 == 0o644, "servers run under other users"
    note = json.loads((run / "export" / "qarl.json").read_text())
    assert (note["run"], note["step"], note["scheme"], note["task"]["name"]) == ("run", 4, scheme, "chain_sum")
    assert note["digest"] == metrics[-1]["digest"]
    low, high = note["heldout_interval"]
    assert low <= note["heldout_accuracy"] <= high
    for name in (
        "config.yaml",
        "environment.json",
        "start.json",
        "tokens/step-000004.parquet",
        "tensorboard",
        "export/tokenizer.json",
    ):
        assert (run / name).exists(), name


@pytest.mark.slow
def test_kill_and_resume_gives_the_uninterrupted_run(tmp_path: Path):
    """kill -9 in the middle of a step; after --resume every metric but wall time equals, to the last bit, those of a
    run that was never killed."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = [*SMALL, "--steps", "6", "--export", "false"]
    succeeded("train", *flags, "--output", whole)
    process = Run("train", *flags, "--output", cut)
    wait_for_lines(process, cut / "metrics.jsonl", 3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 3 <= len((cut / "metrics.jsonl").read_text().splitlines()) < 6
    succeeded("train", "--resume", cut)
    assert lines(cut) == lines(whole)
    tokens = [{file.name: file.read_bytes() for file in (run / "tokens").iterdir()} for run in (cut, whole)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6


@pytest.mark.slow
def test_interrupt_saves_and_resume_goes_on(tmp_path: Path):
    run = tmp_path / "run"
    flags = [*SMALL, "--steps", "400", "--checkpoint-every", "400", "--eval.problems", "0", "--export", "false"]
    process = Run("train", *flags, "--output", run)
    wait_for_lines(process, run / "metrics.jsonl", 2)
    os.kill(process.pid, signal.SIGINT)
    done = process.wait()
    assert done.returncode == 130, done.stderr
    stopped = len(lines(run))
    assert f"stopped at step {stopped}; continue with: qarl train --resume" in done.stdout
    succeeded("train", "--resume", run, "--steps", str(stopped + 2))
    assert [m["step"] for m in lines(run)] == list(range(1, stopped + 3))


@pytest.mark.slow
def test_equal_rewards_teach_nothing_and_are_counted(tmp_path: Path):
    (tmp_path / "flat.py").write_text("def reward(problem, text):\n    return 1.0\n")
    run = tmp_path / "run"
    done = succeeded(
        "train", *SMALL, "--steps", "2", "--reward", "flat:reward", "--output", run, "--export", "false",
        folders=[tmp_path],
    )  # fmt: skip
    metrics = lines(run)
    assert "no step taught anything" in done.stdout
    assert [m["skipped_batches"] for m in metrics] == [1, 2]
    assert [m["weight_version"] for m in metrics] == [0, 0]
    assert not any("digest" in m for m in metrics)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('boom')", "raised KeyError: 'boom' ("),
        ("return float('nan')", "returned nan (float); a reward must be a finite number"),
    ],
)
def test_a_broken_reward_stops_with_its_problem(tmp_path: Path, body: str, message: str):
    """One that is fine for reference answers, so that the run starts; no step was done, so nothing is left of it."""
    code = f"def reward(problem, text):\n    if text == problem.answer:\n        return 1.0\n    {body}\n"
    (tmp_path / "broken.py").write_text(code)
    done = qarl(
        "train", *SMALL, "--reward", "broken:reward", "--output", tmp_path / "run",
        folders=[tmp_path],
    )  # fmt: skip
    assert done.returncode == 1
    assert not (tmp_path / "run").exists()
    assert message in done.stderr
    assert "problem id:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_dead_engine_leaves_a_resumable_run(tmp_path: Path):
    """The engine's model runner is broken at step 3 by a fault injected from outside the code under test."""
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    run = tmp_path / "run"
    flags = [*SMALL, "--eval.problems", "0"]
    done = qarl_alone("train", *flags, "--output", run, folders=[tmp_path])  # sitecustomize is for a new interpreter
    assert done.returncode == 1, done.stderr
    assert "vLLM failed in 'generate' at weight version 2: the device fell off" in done.stderr
    assert f"checkpoint step-000002 is intact: qarl train --resume {run}" in done.stdout
    succeeded("train", "--resume", run)
    assert [m["step"] for m in lines(run)] == [1, 2, 3, 4]


FAULT = """
import sys, importlib.abc, importlib.util
class Break(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "qarl.rollout.vllm.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            generate = module.VllmEngine.generate
            def broken(self, *args):
                def fail(*a, **k):
                    raise RuntimeError("the device fell off")
                broken.calls += 1
                if broken.calls == 3:
                    self._llm.collective_rpc(lambda worker: setattr(worker.model_runner, "execute_model", fail))
                return generate(self, *args)
            broken.calls = 0
            module.VllmEngine.generate = broken
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Break())
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    succeeded("train", *SMALL, "--steps", "2", "--output", run)
    return run


@pytest.mark.slow
def test_export_and_eval_commands(finished: Path, tmp_path: Path):
    """`qarl export` writes the same bytes the run's own export holds, and `qarl eval` reads both."""
    exported = succeeded("export", finished, "-o", tmp_path / "out")
    assert "loaded in a fresh engine" in exported.stdout
    ours, theirs = (d / "model.safetensors" for d in (tmp_path / "out", finished / "export"))
    assert ours.read_bytes() == theirs.read_bytes()
    asked, first = ["--problems", "64", "--max-new-tokens", "8"], tmp_path / "eval.json"
    succeeded("eval", finished, *asked, "--json", first)
    done = succeeded("eval", tmp_path / "out", *asked, "--against", first)
    assert "of 64 held-out problems" in done.stdout
    assert f"chain_sum: +0.0 points [+0.0, +0.0] against {finished}, by question" in done.stdout


@pytest.mark.slow
def test_a_finished_run_can_be_continued(finished: Path, tmp_path: Path):
    """More steps after the end: the run goes on and its export is written anew."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    succeeded("train", "--resume", run, "--steps", "3")
    assert [m["step"] for m in lines(run)] == [1, 2, 3]
    before, after = (d / "export" / "model.safetensors" for d in (finished, run))
    assert before.read_bytes() != after.read_bytes()


def test_the_command_itself_is_what_a_fork_runs(tmp_path: Path):
    """Exit status and words of the real command, on which the other tests' forks rest."""
    arguments = ("train", "--scheme", "w4a17", "--output", tmp_path / "run")
    alone, forked = qarl_alone(*arguments), qarl(*arguments)
    assert alone.returncode == forked.returncode == 2 and "Traceback" not in alone.stderr
    assert (alone.stdout, alone.stderr) == (forked.stdout, forked.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"), "lacks 1 tensors, the first being"),
        (lambda tensors: tensors["model.norm.weight"][3].fill_(float("nan")), "holds NaN or infinity"),
    ],
    ids=["incomplete", "damaged"],
)
def test_unusable_weights_are_refused(
    tmp_path: Path,
    random_policy: Callable[[bool], Path],
    harm: Callable[[dict[str, torch.Tensor]], object],
    message: str,
):
    """What only reading all of the weights shows; the rest of a model's files is `tests/qarl/test_refusals.py`'s."""
    weights = Path(shutil.copytree(random_policy(True), tmp_path / "model")) / "model.safetensors"
    tensors = load_file(weights)
    harm(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    done = qarl("train", "--config", "tiny-qwen3", *SMALL, "--model", weights.parent, "--output", tmp_path / "run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
